"""Registers the data source `memq`: PySpark looks into every package whose name starts with `pyspark_`."""

from __future__ import annotations

from memq.spark.source import MemqSource as DefaultSource

__all__ = ["DefaultSource"]
