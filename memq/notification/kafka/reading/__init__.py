"""Reads entries and offsets from Kafka."""
