"""Retention and sweep: what goes, and the proofs that it may go."""
