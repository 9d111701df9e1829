"""Observers of producers and consumers: reports to the audit, counts and traces."""
