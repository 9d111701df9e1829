"""Deletes objects that nothing names: two passes, and the proofs of each."""
