"""memq: a pub/sub log whose storage is an object store."""

__version__ = "0.1.0"
