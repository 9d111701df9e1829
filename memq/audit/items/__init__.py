"""Audits queue items: replays the state logs by its own rules, compares snapshots and payloads."""
