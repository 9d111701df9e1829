"""Rules for Spark in a chaos run: its committed files and its topic of copies have each acked record once."""

from __future__ import annotations

import collections
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet

from tests.chaos.journal import COPIES, parse_value, value_of
from tests.chaos.verdict import Acks, SenderPartition, Sequences, Verdict

Row = tuple[str, int, bytes]  # topic, partition, value


class SparkRules:
    """Checks rows of the files, and records of the topic `copies`, against what was acked."""

    def __init__(self, verdict: Verdict, size: int) -> None:
        self._verdict = verdict
        self._size = size
        self._rows: dict[SenderPartition, Sequences] = collections.defaultdict(Sequences)
        self._copies: dict[tuple[int, str], Sequences] = collections.defaultdict(Sequences)

    def take_row(self, topic: str, partition: int, value: bytes) -> None:
        """Take a row of the files that a query committed."""
        self._verdict.counts["rows of Spark's files"] += 1
        name, number = parse_value(value)
        if value != value_of(name, number, self._size):
            self._verdict.find(f"Spark's files: a row of {topic} {partition} holds other bytes: {value[:40]!r}")
        elif not self._rows[topic, -1 if name.startswith("staged") else partition, name].add(number):
            self._verdict.find(f"Spark's files: record {number} of {name} in {topic} {partition} is there twice")

    def take_copy(self, value: bytes) -> None:
        """Take a record of the topic of copies."""
        self._verdict.counts["records that Spark wrote"] += 1
        partition, _, original = value.partition(b":")
        name, number = parse_value(original)
        if not partition.isdigit() or original != value_of(name, number, self._size):
            self._verdict.find(f"a copy of Spark's holds other bytes: {value[:40]!r}")
        elif not self._copies[int(partition), name].add(number):
            self._verdict.find(f"{COPIES}: Spark wrote record {number} of {name} in partition {int(partition)} twice")

    def finish(self, acks: Acks, copied: str) -> None:
        """Check that nothing acked is missing; `copied` is the topic whose records were copied."""
        for (topic, partition, producer), ranges in acks.ranges.items():
            name = acks.workers[producer]
            self._missing(f"Spark's files: {topic} {partition}", name, self._rows[topic, partition, name], ranges)
            if topic == copied:
                self._missing(f"{COPIES} of {topic} {partition}", name, self._copies[partition, name], ranges)
        for (topic, name), ranges in acks.staged.items():
            self._missing(f"Spark's files: {topic}", name, self._rows[topic, -1, name], ranges)

    def _missing(self, where: str, name: str, found: Sequences, ranges: list[tuple[int, int]]) -> None:
        lost = [number for first, end in ranges for number in found.missing(first, end)]
        if lost:
            self._verdict.find(f"{where} lacks {len(lost)} acked records of {name}, the first {lost[:5]}")


def rows_of(sink: Path) -> Iterator[Row]:
    """Yield the rows of the files that the log of a file sink names: what other files hold was never committed."""
    paths = {
        json.loads(line)["path"].removeprefix("file://")
        for log in sorted((sink / "_spark_metadata").glob("[0-9]*"))
        for line in log.read_text().splitlines()[1:]
    }
    for path in sorted(paths):
        table = pyarrow.parquet.read_table(path, columns=["topic", "partition", "value"])
        yield from zip(*(column.to_pylist() for column in table.columns), strict=True)
