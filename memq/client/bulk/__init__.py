"""Writers of many records at once: under a given identity, through the store, or copied from Kafka."""
