"""The producer: records become blocks, and blocks are sent until they are acked."""
