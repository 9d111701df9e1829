"""The audit of queue items: an own fold of the state logs (docs/queues.md)."""
