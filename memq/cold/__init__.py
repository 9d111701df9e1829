"""Cold parts of read partitions: small objects copied into large ones, and readers that find both as one log."""
