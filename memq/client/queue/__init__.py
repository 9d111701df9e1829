"""Clients of leased queues: enqueue, dequeue with a lease, ack; and workers."""
