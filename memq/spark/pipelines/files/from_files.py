"""Reads what a manifest names back as a data frame, of files alone: neither queue nor broker is asked."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import pyarrow
import pyarrow.parquet

from memq.errors import NotFoundError
from memq.spark.pipelines.files.file_store import FilePlace, at_place, latest
from memq.spark.pipelines.files.hour_files import FILE_BYTES_MAX
from memq.spark.pipelines.files.manifest import File, FilesManifest
from memq.spark.pipelines.spread import Batches, spread

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def read_files(
    spark: SparkSession, place: FilePlace, *, least_ms: int | None = None, greatest_ms: int | None = None
) -> DataFrame:
    """Return the records of the highest manifest in files between `least_ms` and `greatest_ms`.

    Raises: NotFoundError when there is no manifest, or no file in it.
    """
    manifest = manifest_of(place)
    files = [file for file in manifest.files if _has(file, least_ms, greatest_ms)]
    if not manifest.files:
        raise NotFoundError(f"manifest {manifest.number} of topic '{manifest.topic}' has no files yet")
    schema = pyarrow.parquet.read_schema(_get(place, manifest.files[0].key)).remove_metadata()
    return spread(spark, _tasks(files), partial(_read, place), schema)


def manifest_of(place: FilePlace) -> FilesManifest:
    """Return the highest manifest of a place. Raises: NotFoundError."""
    manifest = at_place(place, latest)
    if manifest is None:
        raise NotFoundError(f"no manifest at '{place.url}'", hint="run the pipeline that writes it")
    return manifest


def _has(file: File, least_ms: int | None, greatest_ms: int | None) -> bool:
    return (least_ms is None or file.greatest_ms >= least_ms) and (greatest_ms is None or file.least_ms <= greatest_ms)


def _tasks(files: Sequence[File]) -> list[list[str]]:
    """Put files together, in order, to what one task reads."""
    tasks: list[list[str]] = []
    left = 0
    for file in files:
        if left < file.bytes:
            tasks.append([])
            left = FILE_BYTES_MAX
        tasks[-1].append(file.key)
        left -= file.bytes
    return tasks


def _read(place: FilePlace, keys: Sequence[str]) -> Batches:
    for key in keys:
        yield from pyarrow.parquet.ParquetFile(_get(place, key)).iter_batches()


def _get(place: FilePlace, key: str) -> pyarrow.BufferReader:
    return pyarrow.BufferReader(at_place(place, lambda store: store.get(key)))
