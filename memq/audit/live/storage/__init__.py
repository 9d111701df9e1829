"""Storage of the live audit's state: SQLite or PostgreSQL."""
