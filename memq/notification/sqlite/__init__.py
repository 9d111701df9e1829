"""The notification queue of the embedded default, in one SQLite file."""
