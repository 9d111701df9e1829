"""The queue, made again from the objects in the store."""
