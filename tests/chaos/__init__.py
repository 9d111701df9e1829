"""Real processes that are killed, paused and filled up."""
