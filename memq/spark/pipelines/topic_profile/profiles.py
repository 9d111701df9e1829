"""`profile`: sizes of records, spread of keys, compression of blocks, schema of JSON values."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click
import pyarrow
import pyarrow.compute
from pyspark import StorageLevel
from pyspark.sql import functions

from memq.client.io_thread import io_thread
from memq.format.pointer import Pointer, read_pointer
from memq.runtime.network import Runtime
from memq.spark.access import open_access
from memq.spark.options import ReadOptions
from memq.spark.pipelines.inputs import options_of, spark_session, tell, topic_options
from memq.spark.pipelines.spread import Batches, mapped
from memq.spark.pipelines.topic_profile.json_schema import Guess, ddl_of, guess_value, joined
from memq.spark.pipelines.topic_profile.sizes import Sizes

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

HEAVIEST = 10
SAMPLED_MAX = 10_000  # values that a task looks into; evenly, of each batch
SAMPLED_OF_BATCH = 20
_PART = pyarrow.schema({"part": pyarrow.binary()})


@dataclass(slots=True)
class Profile:
    """Statistics of some records. They can be added."""

    values: Sizes = field(default_factory=Sizes)
    keys: Sizes = field(default_factory=Sizes)
    records: int = 0
    sampled: int = 0
    objects: int = 0  # of the sampled, those that are JSON objects
    guess: Guess = None

    def take(self, keys: pyarrow.Array, values: pyarrow.Array) -> None:
        """Take a batch of records."""
        self.records += len(values)
        self.keys.take(pyarrow.compute.binary_length(keys).drop_null().to_numpy(zero_copy_only=False))
        self.values.take(pyarrow.compute.binary_length(values).drop_null().to_numpy(zero_copy_only=False))
        step = max(1, len(values) // SAMPLED_OF_BATCH)
        for value in values[::step] if self.sampled < SAMPLED_MAX else ():
            if value.is_valid:
                self._look_into(value.as_py())

    def add(self, other: Profile) -> None:
        """Take what another has seen."""
        self.values.add(other.values)
        self.keys.add(other.keys)
        self.records += other.records
        self.sampled += other.sampled
        self.objects += other.objects
        self.guess = joined(self.guess, other.guess)

    def _look_into(self, value: bytes) -> None:
        self.sampled += 1
        guess = guess_value(value)
        if guess is not None:
            self.objects += 1
            self.guess = joined(self.guess, guess)

    def to_json(self) -> dict[str, Any]:
        """Return it for people."""
        return {
            "records": self.records,
            "tombstones": self.records - self.values.count,
            "values": self.values.to_json(),
            "keys": {"null": self.records - self.keys.count, **self.keys.to_json()},
            "json": {"sampled": self.sampled, "objects": self.objects, "schema": ddl_of(self.guess)},
        }


@click.command("profile")
@topic_options
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def command(topic: str, brokers: str | None, given: tuple[str, ...], as_json: bool) -> int:
    """Say how large TOPIC's records are, how its keys are spread, and what schema its JSON values have."""
    options, read = options_of(topic, brokers, given)
    with spark_session(f"profile {topic}", read) as spark:
        figures = profile(spark, options, read)
    click.echo(json.dumps(figures) if as_json else "\n".join(_lines(figures)))
    return 0


def profile(spark: SparkSession, options: Mapping[str, str], read: ReadOptions) -> dict[str, Any]:
    """Profile what `options` name: two passes over the data, and one over the pointers.

    Raises: as a batch read.
    """
    stored = io_thread().run(_stored(read))
    tell(f"profile: {stored['batches']} batches of {stored['stored_bytes']:,} bytes")
    records = spark.read.format("memq").options(**{**options, "columns": "key,value"}).load()
    whole = Profile()
    for part in mapped(records, _profiled, _PART).toArrow().column(0).to_pylist():
        whole.add(pickle.loads(part))  # noqa: S301 - our own task made it
    figures = whole.to_json()
    figures["keys"] |= _spread_of(records)
    return {"topic": read.topics[0], **figures, "stored": stored}


def _profiled(batches: Batches) -> Batches:
    part = Profile()
    for batch in batches:
        part.take(batch.column("key"), batch.column("value"))
    yield pyarrow.RecordBatch.from_pylist([{"part": pickle.dumps(part)}], _PART)


def _spread_of(records: DataFrame) -> dict[str, Any]:
    """Count keys: how many there are, and which have most of the records."""
    counted = records.where("key IS NOT NULL").groupBy("key").count().persist(StorageLevel.DISK_ONLY)
    try:
        heaviest = counted.orderBy(functions.desc("count"), "key").limit(HEAVIEST).collect()
        distinct = counted.count()
    finally:
        counted.unpersist()
    figures = [{"key": bytes(row[0]).decode(errors="backslashreplace"), "records": row[1]} for row in heaviest]
    return {"distinct": distinct, "heaviest": figures}


async def _stored(options: ReadOptions) -> dict[str, Any]:
    """Sum up what the pointers of the whole topic say."""
    batches = records = raw = stored = 0
    async with open_access(options, Runtime()) as access:
        for partition in access.topics[options.topics[0]].partitions:
            span = await access.places.span(partition)
            async for entries in access.places.pages(partition, span.begin, span.end):
                for body in (entry.body for entry in entries):
                    pointer = read_pointer(body, newer="return")
                    if not isinstance(pointer, Pointer):
                        continue
                    batches += pointer.kind == "data"
                    records, raw = records + pointer.records, raw + pointer.raw_bytes
                    stored += pointer.stored_bytes
    ratio = round(raw / stored, 2) if stored else 1.0
    return {"batches": batches, "records": records, "raw_bytes": raw, "stored_bytes": stored, "ratio": ratio}


def _lines(figures: Mapping[str, Any]) -> Iterator[str]:
    stored, keys = figures["stored"], figures["keys"]
    tombstones = f"{figures['tombstones']:,} tombstones"
    yield f"records: {figures['records']:,}, of these {tombstones} and {keys['null']:,} without key"
    for name in ("values", "keys"):
        sizes = figures[name]
        yield (
            f"{name}: {sizes['bytes']:,} bytes, from {sizes['least']} to {sizes['greatest']},"
            f" p50 {sizes['p50']}, p90 {sizes['p90']}, p99 {sizes['p99']}"
        )
    yield f"distinct keys: {keys['distinct']:,}"
    for each in keys["heaviest"]:
        yield f"  {each['records'] / figures['records']:.1%} {each['key'][:80]}"
    yield f"stored: {stored['batches']:,} batches, {stored['stored_bytes']:,} bytes, compressed {stored['ratio']} to 1"
    guess = figures["json"]
    yield f"JSON objects: {guess['objects']:,} of {guess['sampled']:,} sampled; schema: {guess['schema'] or 'none'}"
