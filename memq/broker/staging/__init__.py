"""Batches that writers put into the store themselves: checked and published."""
