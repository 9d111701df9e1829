"""Tests that start a broker, a cluster of brokers in memory, or a process of this machine."""
