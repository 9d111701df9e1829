"""Clock, randomness and network, which the simulation replaces; tasks, threads, budgets, log, SQLite files."""
