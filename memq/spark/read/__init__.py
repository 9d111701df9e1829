"""Batch reads: pointers become splits, splits become Arrow batches."""
