"""Polls pointers of a consumer and fetches their batches, within a byte budget and in order."""
