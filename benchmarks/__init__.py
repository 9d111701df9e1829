"""The speed table: each file measures one row as a ratio against a peer or a limit. `python -m benchmarks`."""
