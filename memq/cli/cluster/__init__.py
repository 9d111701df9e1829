"""Commands that run and show brokers, topics and groups."""
