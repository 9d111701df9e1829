"""Requests about groups in Kafka, and the groups of an earlier release."""
