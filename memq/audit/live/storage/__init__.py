"""Where the live audit keeps its state: SQLite or PostgreSQL."""
