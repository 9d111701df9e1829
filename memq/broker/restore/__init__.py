"""Restore: rebuilds the queue from the objects in the store."""
