"""Sizes, keys and values of the records of a topic."""
