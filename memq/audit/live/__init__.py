"""The audit that never ends: what clients report is held against what the queue shows, by partition and minute."""
