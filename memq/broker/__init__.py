"""The broker: takes blocks, writes batches as objects, publishes pointers, acks, serves reads."""
