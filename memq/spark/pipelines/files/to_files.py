"""Writes a topic to Parquet files in rounds, each committed by one manifest."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from memq.client.io_thread import io_thread
from memq.errors import InvalidSettingError
from memq.spark.columns import table_ddl
from memq.spark.options import ReadOptions
from memq.spark.pipelines.files.file_store import FilePlace, at_place, first_of, publish, put_file
from memq.spark.pipelines.files.hour_files import HourFiles, WrittenFile
from memq.spark.pipelines.files.manifest import File, FilesManifest
from memq.spark.pipelines.inputs import tell
from memq.spark.pipelines.rounds import ROUND_TASKS, Round, plan_round, topic_of
from memq.spark.pipelines.spread import Batches, spread
from memq.spark.read.planner import Split
from memq.spark.read.task import read_task
from memq.topic import Position

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_FILES = pyarrow.schema(
    {
        "key": pyarrow.string(),
        "date": pyarrow.string(),
        "hour": pyarrow.int32(),
        **dict.fromkeys(("records", "bytes", "least_ms", "greatest_ms"), pyarrow.int64()),
    }
)


def write_files(
    spark: SparkSession,
    options: ReadOptions,
    place: FilePlace,
    *,
    settled: bool,
    tasks: int = ROUND_TASKS,
    starts: dict[int, Position] | None = None,
    done: Callable[[FilesManifest], None] = lambda manifest: None,
) -> FilesManifest:
    """Write what the place does not hold yet of a topic, and return its manifest then.

    `starts` stand for the options' start. `done` is called with the manifest after each round, and first with what was
    there before. Killed at any moment and run again, each record is in the files of the highest manifest once.
    Raises: InvalidRequestError when the place holds another topic, InvalidSettingError without
    timestamps; as a batch read; as `ObjectWriter`.
    """
    if "timestamp" not in options.columns:
        raise InvalidSettingError("files by hour need the column timestamp", hint="add it to the option 'columns'")
    thread = io_thread()
    topic = thread.run(topic_of(options))
    while True:
        manifest = at_place(place, partial(first_of, topic=topic.name, topic_id=topic.id))
        if manifest.number:
            done(manifest)
        covered = {**(starts or {}), **manifest.positions}
        found = thread.run(plan_round(options, covered, settled=settled, tasks=tasks))
        if not found.splits and manifest.number:
            return manifest
        successor = manifest.next(found.starts, found.ends, _written(spark, options, place, found))
        if at_place(place, partial(publish, manifest=successor)):
            tell(
                f"{topic.name}: manifest {successor.number}, {found.bytes:,} bytes read,"
                f" {successor.records:,} records in {len(successor.files):,} files"
            )
        else:
            tell(f"{topic.name}: another run wrote manifest {successor.number}; going on from it")


def _written(spark: SparkSession, options: ReadOptions, place: FilePlace, found: Round) -> tuple[File, ...]:
    """Have tasks write files; return what they are."""
    if not found.splits:
        return ()
    schema = StructType.fromDDL(table_ddl(options.columns, options.schema))
    work = partial(_write_split, options, place, schema)
    rows = spread(spark, found.splits, work, _FILES).toArrow().to_pylist()
    return tuple(sorted((File(**row) for row in rows), key=lambda file: file.key))


def _write_split(options: ReadOptions, place: FilePlace, schema: Any, split: Split) -> Batches:
    """Write the files of one split.

    The names tell what they hold, so a second attempt writes the same ones again.
    """
    first = split.parts[0]
    arrow = to_arrow_schema(schema, timezone="UTC")
    files = HourFiles(arrow, f"{first.partition:05}-{first.offset:016}")
    for batch in read_task(split, options, schema):
        for written in files.take(batch):
            yield _stored(place, written)
    for written in files.end():
        yield _stored(place, written)


def _stored(place: FilePlace, written: WrittenFile) -> pyarrow.RecordBatch:
    file = written.file
    at_place(place, partial(put_file, key=file.key, data=memoryview(written.data)))
    return pyarrow.RecordBatch.from_pylist([msgspec.structs.asdict(file)], _FILES)
