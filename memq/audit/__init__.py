"""What was lost, doubled or damaged, by range sets of sequences: pure accounts and verdicts, and their collector."""
