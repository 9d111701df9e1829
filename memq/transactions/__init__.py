"""Transactions on a state log: one decision makes records in several partitions visible, or none."""
