"""Streaming reads: offsets, micro-batches, and their reports to the audit."""
