"""Batch and streaming writes: Arrow batches become staged objects or acked blocks."""
