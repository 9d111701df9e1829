"""The bytes of a state log: its entries, and the snapshots in the store."""
