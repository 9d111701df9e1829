"""The broker's periodic work: retention, truncation, seals, idle and deleted topics, and its proofs."""
