"""Transactions: records of several partitions that become visible by one decision."""
