"""Service partitions at a broker: the machines of their state logs, and their owners."""
