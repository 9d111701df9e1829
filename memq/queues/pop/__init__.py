"""Pop groups: queues whose items are the records of a plain topic."""
