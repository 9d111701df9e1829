"""How a consumer polls pointers and fetches their batches, within a budget and in order."""
