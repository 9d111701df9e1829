"""Consumer groups by Kafka's own protocol."""
