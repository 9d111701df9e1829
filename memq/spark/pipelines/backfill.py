"""`backfill`: brings a group from its position to the end in parallel, and commits.

Files get each record once: the manifest has the progress, and the next run sets the group to it if a run was killed
between the two. A function of the caller gets each record at least once: a round without a commit is repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import click
import pyarrow
from pyspark.sql.types import StructType

from memq.client.io_thread import io_thread
from memq.errors import InvalidRequestError
from memq.spark.options import ReadOptions, table_ddl
from memq.spark.pipelines.inputs import (
    commit_positions,
    options_of,
    positions_of,
    print_progress,
    spark_session,
    tasks_option,
    topic_options,
)
from memq.spark.pipelines.rounds import ROUND_TASKS, plan_round, starts_of
from memq.spark.pipelines.spread import Batches, spread
from memq.spark.pipelines.to_files import write_files
from memq.spark.pipelines.topic_files import FilesLocation, FilesManifest, location_of_text
from memq.spark.read.planner import Split
from memq.spark.read.task import read_task

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_COUNT = pyarrow.schema({"records": pyarrow.int64()})
Work = Callable[[Batches], None]


@click.command("backfill")
@topic_options
@click.option("-G", "--group", required=True, metavar="NAME", help="The group; its members must have stopped.")
@click.option("--to", required=True, metavar="PLACE", help="Folder, or s3://BUCKET/PREFIX?endpoint=…")
@tasks_option("; each round is committed")
def command(topic: str, brokers: str | None, given: tuple[str, ...], group: str, to: str, tasks: int) -> int:
    """Write what a group has not read of TOPIC as Parquet files, in parallel, and commit it."""
    _, read = options_of(topic, brokers, given)
    location = location_of_text(to, read.config, read.profile)
    with spark_session(f"backfill {topic}", read) as spark:
        manifest = backfill_files(spark, read, group, location, tasks=tasks)
    click.echo(f"group '{group}' is now at {', '.join(manifest.covered.values())}: {manifest.records} records in files")
    return 0


def backfill_files(
    spark: SparkSession, options: ReadOptions, group: str, location: FilesLocation, *, tasks: int = ROUND_TASKS
) -> FilesManifest:
    """Write the records after a group's position to files, and commit them; return the manifest.

    Raises: InvalidRequestError while the group has members, or if its position is before the beginning of the files; as
    `write_files`.
    """
    thread = io_thread()
    starts = thread.run(positions_of(options, group))

    def commit(manifest: FilesManifest) -> None:
        thread.run(_check_start(options, group, location, manifest))
        thread.run(commit_positions(options, group, manifest.positions))

    return write_files(spark, options, location, settled=False, tasks=tasks, starts=starts, done=commit)


async def _check_start(options: ReadOptions, group: str, location: FilesLocation, manifest: FilesManifest) -> None:
    """Refuse files that begin after the group: the group would never get the records between.

    Raises: InvalidRequestError; as `positions_of` and `starts_of`.
    """
    for partition, position in (await starts_of(options, await positions_of(options, group))).items():
        began = manifest.starts.get(partition)
        if began is not None and position < began:
            raise InvalidRequestError(
                f"group '{group}' is at {position}, and the files at '{location.url}' begin at {began}",
                hint="write to another location: these files are of another group, or of its earlier position",
            )


def backfill(spark: SparkSession, options: ReadOptions, group: str, work: Work, *, tasks: int = ROUND_TASKS) -> int:
    """Pass the records after a group's position to `work`, commit them, and return their number.

    `work` runs in each task, with the Arrow batches of the task in order. A round is committed when all its tasks are
    done. A round without a commit is repeated, perhaps with other tasks.
    Raises: InvalidRequestError while the group has members; as a batch read; errors of `work`, as Spark reports them.
    """
    thread = io_thread()
    schema = StructType.fromDDL(table_ddl(options.columns, options.schema))
    records = 0
    while True:
        covered = thread.run(positions_of(options, group))
        found = thread.run(plan_round(options, covered, settled=False, tasks=tasks))
        if found.splits:
            counts = spread(spark, found.splits, partial(_work, options, schema, work), _COUNT).toArrow()
            records += sum(counts.column(0).to_pylist())
        thread.run(commit_positions(options, group, found.ends))
        if not found.splits:
            return records
        print_progress(f"group '{group}': {records:,} records, {found.bytes:,} bytes in the last round")


def _work(options: ReadOptions, schema: Any, work: Work, split: Split) -> Batches:
    records = 0

    def counted() -> Batches:
        nonlocal records
        for batch in read_task(split, options, schema):
            records += batch.num_rows
            yield batch

    work(counted())
    yield pyarrow.RecordBatch.from_pylist([{"records": records}], _COUNT)
