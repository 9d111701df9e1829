"""The broker: takes blocks, writes batches as objects, publishes their pointers, acks, and lends reads."""
