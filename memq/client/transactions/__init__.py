"""Transactions of a producer: records that become visible together."""
