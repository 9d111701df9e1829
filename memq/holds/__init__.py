"""Delayed records and records of transactions on a state log: held, then released or dropped."""
