"""The grants of one shard at its owner: their payloads, and requests that come again."""
