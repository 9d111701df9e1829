"""Shared by batch reads, raw reads and streams: task settings, splits, and rows of a split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from memq.spark.columns import fields_at
from memq.spark.options import ReadOptions
from memq.spark.read.planner import BatchPart, Split, TaskSettings, split_parts, spread_bytes
from memq.spark.read.pruning import ReadFilter
from memq.spark.stores import StoreUrls

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql.types import StructType


def settings_of(options: ReadOptions, urls: StoreUrls, wanted: ReadFilter) -> TaskSettings:
    """Return the settings of tasks."""
    prefetch, skip, missing_s = options.prefetch_bytes, options.skip_damaged, options.missing_s
    return TaskSettings(urls, wanted, prefetch, skip, options.dedup, missing_s)


def splits_of(parts: Sequence[BatchPart], options: ReadOptions, settings: TaskSettings) -> list[Split]:
    """Cut what is read into what tasks read."""
    return split_parts(parts, spread_bytes(parts, options.partition_bytes), settings)


def read_task(split: Split, options: ReadOptions, schema: StructType) -> Iterator[pyarrow.RecordBatch]:
    """Yield the records of a split. Raises: as `read_split`."""
    from memq.spark.read.arrow_rows import Decoding, RowMaker  # they import pyarrow, which takes its time
    from memq.spark.read.json_values import json_decoder
    from memq.spark.read.task import read_split

    decoding = None
    if options.schema and options.value_format == "avro":
        from memq.spark.read.avro_values import avro_decoder  # an extra of its own

        decoding = Decoding(avro_decoder(options.avro_schema), options.fail_malformed)
    elif options.schema:
        decoding = Decoding(json_decoder, options.fail_malformed)
    fields = fields_at(schema.names, options.columns, options.schema)
    return read_split(split, RowMaker(schema, fields, decoding)) if split.settings is not None else iter(())
