"""Permissions of requests: what answers show, topics of objects, and requests about the rules."""
