"""The live audit: compares reports of clients with the queue, by partition and minute.

A *home* is a partition of `_memq_audit`. It has all reports about its write partitions, and one auditor judges these.
"""
