"""How entries and offsets are read from Kafka."""
