"""Registers the data source `memq`: PySpark imports every package named `pyspark_…`."""

from __future__ import annotations

from memq.spark.source import MemqSource as DefaultSource

__all__ = ["DefaultSource"]
