"""Compaction: small objects become large ones, and readers see both as one log."""
