"""Runs a handler for each record of a group: concurrency, retries, dead letters, order by key."""
