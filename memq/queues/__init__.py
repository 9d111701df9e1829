"""Leased queues on state logs: each item is leased to one worker at a time (rules Q1 to Q5)."""
