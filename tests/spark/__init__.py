"""Spark's side of memq on a real Spark: one session for all files, two threads, loopback only."""
