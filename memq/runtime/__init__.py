"""Clock, randomness and network, which the simulation replaces; tasks, threads, log, SQLite files."""
