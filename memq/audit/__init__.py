"""Accounts and verdicts on records that were lost, doubled or damaged, and their collector."""
