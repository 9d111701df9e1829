"""Pop groups: the records of a plain topic as items of a queue, read behind the owner of the topic."""
