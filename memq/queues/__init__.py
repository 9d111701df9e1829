"""Leased queues: items on state logs, each held by one worker at a time (rules Q1 to Q5)."""
