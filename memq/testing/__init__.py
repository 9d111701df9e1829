"""A whole cluster in the process of a test: memory only, port 0, with failures and damage on demand."""

from memq.testing.cluster import Cluster as Cluster

__all__ = ["Cluster"]
