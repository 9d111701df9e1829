"""Commands that run and show brokers, auditors, topics and groups."""
