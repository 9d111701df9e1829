"""`replay`: a range of a topic into another topic or files, each record once, safe against kills.

One task for each read partition sends its records in order, as a named producer. The target knows the number of records
of each name, so a second task continues after them, and fences a first one that still runs. This works only if both
read the same records in the same order. So the range begins at positions that retention does not move, a damaged block
ends the replay, and each read partition goes to one partition of the target.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import click
import pyarrow
from pyspark.sql.types import StructType

from memq.client.consumer.progress import expired_error
from memq.client.io_thread import io_thread
from memq.client.producer.producer import Producer
from memq.errors import InvalidRequestError
from memq.runtime.runtime import Runtime
from memq.spark.access import open_access
from memq.spark.options import ReadOptions, table_ddl
from memq.spark.pipelines.inputs import options_of, print_progress, spark_session, tasks_option, topic_options
from memq.spark.pipelines.spread import Batches, iterate, spread
from memq.spark.pipelines.to_files import write_files
from memq.spark.pipelines.topic_files import location_of_text
from memq.spark.read.batch_reader import Stretch, parts_of, plan_of, stretches
from memq.spark.read.planner import BatchPart, Split, split_parts
from memq.spark.read.pruning import ReadFilter
from memq.spark.read.task import read_task, settings_of
from memq.topic import name_of_run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_COUNTS = pyarrow.schema({"partition": pyarrow.int32(), "sent": pyarrow.int64(), "held": pyarrow.int64()})
_COLUMNS = ("key", "value", "headers", "tag", "timestamp")


@dataclass(frozen=True, slots=True)
class ReplayTarget:
    """The target of a replay: a topic, its brokers, and the name of the replay."""

    topic: str
    brokers: str | None
    name: str


@click.command("replay")
@topic_options
@click.option("--to-topic", metavar="TOPIC", help="Send the records to this topic.")
@click.option("--to-brokers", metavar="HOST:PORT", help="A broker of that topic's cluster; default: --brokers.")
@click.option("--name", metavar="NAME", help="Name of this replay; a run that continues under it sends nothing twice.")
@click.option("--to", metavar="PLACE", help="Write Parquet files to a folder, or s3://BUCKET/PREFIX?endpoint=…")
@tasks_option(", to files")
def command(
    topic: str,
    brokers: str | None,
    given: tuple[str, ...],
    to_topic: str | None,
    to_brokers: str | None,
    name: str | None,
    to: str | None,
    tasks: int,
) -> int:
    """Send or write a range of TOPIC, as `-o start=… -o end=…` say."""
    _, read = options_of(topic, brokers, given)
    if bool(to_topic) == bool(to):
        raise click.UsageError("one of --to-topic and --to is needed")
    if to_topic == topic and not to_brokers:
        raise click.UsageError(f"'{topic}' can't be replayed into itself: the next run would send it twice")
    with spark_session(f"replay {topic}", read) as spark:
        if to:
            location = location_of_text(to, read.config, read.profile)
            manifest = write_files(spark, read, location, settled=False, tasks=tasks)
            click.echo(f"{manifest.records} records in {len(manifest.files)} files at {location.url}")
        elif to_topic:
            target = ReplayTarget(to_topic, to_brokers or brokers, name or name_of_run("replay", topic, to_topic))
            click.echo(f"{replay(spark, read, target)} records sent to topic '{to_topic}'")
    return 0


def replay(spark: SparkSession, options: ReadOptions, target: ReplayTarget) -> int:
    """Send the range of `options` to a topic; return how many records this call has added.

    Raises: InvalidRequestError for a range that a second run would not find again; PositionExpiredError; errors of
    tasks, as Spark reports them: ProducerFencedError if another run took over.
    """
    if options.skip_damaged or not options.dedup:
        raise InvalidRequestError(
            "a replay neither skips damage nor sends copies", hint="leave out onDamaged and dedup"
        )
    lanes = io_thread().run(_lanes(options))
    print_progress(f"replay: {', '.join(f'{lane.start} to {lane.end}' for lane in lanes) or 'nothing in this range'}")
    schema = StructType.fromDDL(table_ddl(_COLUMNS, ""))
    work = partial(_replay, options, target, schema)
    counts = spread(spark, lanes, work, _COUNTS).toArrow().to_pylist() if lanes else []
    io_thread().run(_check_kept(options, lanes))
    for row in counts:
        print_progress(f"replay: partition {row['partition']}: {row['sent']} sent, {row['held']} were there")
    return sum(row["sent"] for row in counts)


async def _lanes(options: ReadOptions) -> list[Stretch]:
    """Return the range of each read partition, if a later run finds the same one.

    Raises: InvalidRequestError when retention may move its start; PositionExpiredError.
    """
    async with open_access(options, Runtime()) as access:
        found = await stretches(access, options, ReadFilter())
        begins = {lane: (await access.resolver.span(lane.partition)).begin for lane in found}
    fixed = isinstance(options.start, Mapping)
    for lane, begin in begins.items():
        if lane.start.pointer_offset < begin:
            raise expired_error(lane.partition, lane.start, begin)
        if begin and not fixed:
            starts = ",".join(str(each.start) for each in found)
            raise InvalidRequestError(
                f"retention may remove the first records of '{options.topics[0]}': a second run would start elsewhere",
                hint=f"begin at positions: -o start={starts}",
            )
    return found


async def _check_kept(options: ReadOptions, lanes: list[Stretch]) -> None:
    """Check that retention took nothing of the range while it was read. Raises: PositionExpiredError."""
    async with open_access(options, Runtime()) as access:
        for lane in lanes:
            begin = (await access.resolver.span(lane.partition)).begin
            if lane.start.pointer_offset < begin:
                raise expired_error(lane.partition, lane.start, begin)


# ---- a task ------------------------------------------------------------------------------------------


def _replay(options: ReadOptions, target: ReplayTarget, schema: Any, lane: Stretch) -> Batches:
    """Send the records of one read partition's range that the target lacks."""
    number = lane.partition.partition
    name = f"{target.name}.{number}-{lane.start.pointer_offset}-{lane.start.record_index}"
    sent = 0
    with Producer(target.brokers, name=name) as producer:
        partition, held = _target_partition(producer, target.topic, number)
        left = held
        for split in iterate(_splits(options, lane)):
            for batch in read_task(split, options, schema):
                behind = batch.slice(left)
                left = max(0, left - batch.num_rows)
                sent += behind.num_rows
                for record in _records_of(behind):
                    producer.send(target.topic, partition=partition, **record)
        producer.flush()
    yield pyarrow.RecordBatch.from_pylist([{"partition": number, "sent": sent, "held": held}], _COUNTS)


def _target_partition(producer: Producer, topic: str, number: int) -> tuple[int, int]:
    """Return the target's partition for read partition `number`, and how many of its records it has.

    Raises: InvalidRequestError if several partitions have such records: the target's partitions have changed.
    """
    points = producer.resume_points(topic)
    holding = [partition for partition, held in points.items() if held]
    partitions = sorted(points)
    partition = holding[0] if holding else partitions[number % len(partitions)]
    if len(holding) > 1:
        raise InvalidRequestError(
            f"partitions {holding} of topic '{topic}' hold records of one replay", hint="replay under another name"
        )
    return partition, points[partition]


async def _splits(options: ReadOptions, lane: Stretch) -> AsyncGenerator[Split, None]:
    """Yield the splits of a range, in order, a few batches at a time.

    The dedup window before the range is not used: retention removes it, and a second run would drop other copies.
    """
    async with open_access(options, Runtime()) as access:
        settings = settings_of(options, access.urls, ReadFilter())
        plan = plan_of(access, lane, ReadFilter(), options)
        held: list[BatchPart] = []
        size = 0
        async for part in parts_of(access, lane, plan, seen=True):
            held.append(part)
            size += part.bytes
            if size >= options.prefetch_bytes:
                yield Split(held, settings)
                held, size = [], 0
        for split in split_parts(held, options.partition_bytes, settings):
            yield split


def _records_of(batch: pyarrow.RecordBatch) -> Any:
    """Yield the arguments of `Producer.send` for each record."""
    times = batch.column("timestamp").cast(pyarrow.int64())
    for row, time in zip(batch.select(["key", "value", "headers", "tag"]).to_pylist(), times.to_pylist(), strict=True):
        headers = [(header["name"], header["value"]) for header in row["headers"] or ()]
        yield {**row, "headers": headers, "timestamp_ms": time // 1_000}
