"""`profile`: sizes of records, spread of keys, compression of blocks, schema of JSON values."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click
import msgspec
import numpy
import pyarrow
import pyarrow.compute
from pyspark import StorageLevel
from pyspark.sql import functions

from memq.client.io_thread import io_thread
from memq.format.pointer import Pointer, read_pointer
from memq.runtime.runtime import Runtime
from memq.spark.access import open_access
from memq.spark.options import ReadOptions
from memq.spark.pipelines.inputs import options_of, print_progress, spark_session, topic_options
from memq.spark.pipelines.spread import Batches, mapped

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


HEAVIEST = 10
SAMPLED_MAX = 10_000  # values that a task looks into; evenly, of each batch
SAMPLED_OF_BATCH = 20
_PART = pyarrow.schema({"part": pyarrow.binary()})
FIELDS_MAX = 1_000  # of one object: with more it is no record but a table of its own, and stays text
DEPTH_MAX = 32
Guess = None | str | list["Guess"] | dict[str, "Guess"]
_TEXT = "STRING"
_DECODER = msgspec.json.Decoder()
_EXACT = 16  # lengths below it have buckets of their own; above it each power of two has eight
BUCKETS = _EXACT + 8 * 28  # lengths of 32 bits


@dataclass(slots=True)
class Sizes:
    """Lengths in bytes, of any number of values, in 2 KiB: exact sums, percentiles within an eighth."""

    count: int = 0
    total: int = 0
    least: int = 0
    greatest: int = 0
    buckets: list[int] = field(default_factory=lambda: [0] * BUCKETS)

    def take(self, lengths: Sequence[int]) -> None:
        """Take some lengths."""
        given = numpy.asarray(lengths, dtype=numpy.int64)
        if not len(given):
            return
        counts = numpy.bincount(_buckets_of(given), minlength=BUCKETS).tolist()
        self.add(Sizes(len(given), int(given.sum()), int(given.min()), int(given.max()), counts))

    def add(self, other: Sizes) -> None:
        """Add the values of another one."""
        if not other.count:
            return
        self.least = min(self.least, other.least) if self.count else other.least
        self.greatest = max(self.greatest, other.greatest)
        self.count += other.count
        self.total += other.total
        self.buckets = [here + there for here, there in zip(self.buckets, other.buckets, strict=True)]

    def percentile(self, share: float) -> int:
        """Return the length that a share (0 to 1) of all do not exceed; at most an eighth too much."""
        wanted = share * self.count
        seen = 0
        for bucket, count in enumerate(self.buckets):
            seen += count
            if count and seen >= wanted:
                return min(_last_of(bucket), self.greatest)
        return self.greatest

    def to_json(self) -> dict[str, int]:
        """Return the figures that the command prints."""
        shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
        figures = {"bytes": self.total, "least": self.least, "greatest": self.greatest}
        return figures | {name: self.percentile(share) for name, share in shares.items()}


def _buckets_of(lengths: numpy.ndarray) -> numpy.ndarray:
    power = numpy.floor(numpy.log2(numpy.maximum(lengths, _EXACT))).astype(numpy.int64)
    eighth = (lengths >> (power - 3)) & 7
    return numpy.where(lengths < _EXACT, lengths, _EXACT + (power - 4) * 8 + eighth)


def _last_of(bucket: int) -> int:
    if bucket < _EXACT:
        return bucket
    power, eighth = divmod(bucket - _EXACT, 8)
    return ((9 + eighth) << (power + 1)) - 1


def guess_of(value: object, depth: int = 0) -> Guess:
    """Return the guess of one decoded value; `ddl_of` makes the option `schema` of it.

    A guess is None (only nulls were seen), the name of a type, a list with the guess of its items, or a dict of fields
    in the order in which they were first seen. Guesses can be joined: those of two tasks are that of all their values.
    """
    if value is None:
        return None
    if isinstance(value, bool):
        return "BOOLEAN"
    if isinstance(value, int):
        return "BIGINT" if -(1 << 63) <= value < 1 << 63 else "DOUBLE"
    if isinstance(value, float):
        return "DOUBLE"
    if depth < DEPTH_MAX and isinstance(value, list):
        items: Guess = None
        for item in value:
            items = joined(items, guess_of(item, depth + 1))
        return [items]
    if depth < DEPTH_MAX and isinstance(value, dict) and 0 < len(value) <= FIELDS_MAX:
        return {name: guess_of(item, depth + 1) for name, item in value.items()}
    return _TEXT


def joined(one: Guess, other: Guess) -> Guess:
    """Return the guess for the values of both; types that can't be joined become text."""
    if one is None or other is None:
        return other if one is None else one
    if isinstance(one, list) and isinstance(other, list):
        return [joined(one[0], other[0])]
    if isinstance(one, dict) and isinstance(other, dict):
        fields = {name: joined(one.get(name), other.get(name)) for name in (*one, *other)}
        return fields if len(fields) <= FIELDS_MAX else _TEXT
    if one == other:
        return one
    return "DOUBLE" if {str(one), str(other)} == {"BIGINT", "DOUBLE"} else _TEXT


def ddl_of(guess: Guess) -> str:
    """Return the DDL of a table of such values; empty when they are not objects."""
    return ", ".join(f"{_quoted(name)} {_type_of(field)}" for name, field in _fields(guess).items())


def guess_value(value: bytes) -> dict[str, Guess] | None:
    """Return the guess of a value; None when it is no JSON object."""
    try:
        decoded = _DECODER.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return _fields(guess_of(decoded)) or None


def _fields(guess: Guess) -> dict[str, Guess]:
    return guess if isinstance(guess, dict) else {}


def _type_of(guess: Guess) -> str:
    if guess is None:
        return _TEXT
    if isinstance(guess, list):
        return f"ARRAY<{_type_of(guess[0])}>"
    if isinstance(guess, dict):
        return f"STRUCT<{', '.join(f'{_quoted(name)}: {_type_of(field)}' for name, field in guess.items())}>"
    return guess


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


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
        """Add the values of another one."""
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
    print_progress(f"profile: {stored['batches']} batches of {stored['stored_bytes']:,} bytes")
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
            span = await access.resolver.span(partition)
            async for entries in access.resolver.pages(partition, span.begin, span.end):
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
