"""Held records on a state log: stored now, released to their partitions later, or dropped."""
