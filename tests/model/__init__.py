"""Executable models: the rules of docs/ownership.md, small enough to run millions of random schedules."""
