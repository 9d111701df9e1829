"""Topics of a Kafka in memory, and their import into a broker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from memq.broker.broker import Broker
from memq.client.bulk.kafka_import import ImportedPartition, ImportProgress, import_topics
from memq.errors import NotFoundError, QueueError
from memq.format.blocks.header import parse_header
from memq.format.object import BlockEntry
from memq.format.pointer import Pointer, encode_pointer
from memq.notification import Entries, Span
from memq.notification.kafka.admin import KafkaPartition
from memq.notification.kafka.reading.import_source import KafkaSource, SourceEnd, SourceRecord, SourceTopic
from memq.runtime.clock import SystemClock
from memq.topic import ReadPartition
from tests.unit.queue_model import PARTITION, Log

Value = bytes | None


class MemorySource:
    """A log in memory: what its topics hold, what its groups have stored, and what befalls a copy on the way.

    `rows` are the records by their offsets; `begins` where retention left a partition. `take` gives out `portion`
    records at a time, and at the end what lies behind it. `broken_after` of those the source is gone.
    """

    def __init__(self, rows: dict[KafkaPartition, dict[int, Value]], portion: int = 3) -> None:
        self.rows = rows
        self.begins: dict[KafkaPartition, int] = {}
        self.positions: dict[KafkaPartition, tuple[int, str]] = {}
        self.stores: list[dict[KafkaPartition, tuple[int, str]]] = []
        self.others: dict[str, dict[KafkaPartition, int]] = {}
        self.group = ""
        self.closed = 0
        self.broken_after: int | None = None
        self.on_take: Callable[[], None] = lambda: None
        self._portion = portion
        self._at: dict[KafkaPartition, int] = {}

    async def describe(self, topics: Sequence[str]) -> tuple[str, dict[str, SourceTopic]]:
        there = {topic for topic, _ in self.rows}
        if missing := [topic for topic in topics if topic not in there]:
            raise NotFoundError(f"no topic {missing[0]}")
        counts = {topic: sum(partition[0] == topic for partition in self.rows) for topic in topics}
        return "kafka-1", {topic: SourceTopic(f"id of {topic}", count) for topic, count in counts.items()}

    async def join(self, group: str, topics: Sequence[str], partitions: Sequence[KafkaPartition]) -> None:
        self.group = group

    async def ends(self, partitions: Sequence[KafkaPartition]) -> dict[KafkaPartition, tuple[int, int]]:
        return {
            partition: (self.begins.get(partition, 0), max(self.rows[partition], default=-1) + 1)
            for partition in partitions
        }

    async def stored(self, partitions: Sequence[KafkaPartition]) -> dict[KafkaPartition, tuple[int, str]]:
        return {partition: self.positions[partition] for partition in partitions if partition in self.positions}

    async def store(self, positions: Mapping[KafkaPartition, tuple[int, str]]) -> None:
        self.stores.append(dict(positions))
        self.positions.update(positions)

    async def start(self, offsets: Mapping[KafkaPartition, int]) -> None:
        self._at = dict(offsets)

    def start_again(self) -> None:
        """Give out all records again."""
        self._at = dict.fromkeys(self._at, 0)

    async def seek(self, partition: KafkaPartition, offset: int) -> None:
        self._at[partition] = offset

    async def take(self, wait_s: float) -> list[SourceRecord | SourceEnd]:
        await asyncio.sleep(0)
        self.on_take()
        found: list[SourceRecord | SourceEnd] = []
        for partition, at in self._at.items():
            offsets = [offset for offset in sorted(self.rows[partition]) if offset >= at][: self._portion]
            for offset in offsets:
                if self.broken_after is not None:
                    self.broken_after -= 1
                    if self.broken_after < 0:
                        raise QueueError("the source is gone")
                value = self.rows[partition][offset]
                found.append(SourceRecord(partition, offset, value, b"k", (("h", b"1"),), 1_000 + offset))
                self._at[partition] = offset + 1
            if not offsets:
                found.append(SourceEnd(partition, max(at, max(self.rows[partition], default=-1) + 1)))
        return found

    async def committed_of_others(
        self, partitions: Sequence[KafkaPartition], own: str
    ) -> dict[str, dict[KafkaPartition, int]]:
        assert own == self.group
        return self.others

    async def close(self) -> None:
        self.closed += 1


def source_of(*partitions: dict[int, Value], topic: str = "orders", portion: int = 3) -> MemorySource:
    return MemorySource({(topic, number): rows for number, rows in enumerate(partitions)}, portion)


def numbered(*ranges: range) -> dict[int, Value]:
    return {number: b"%d" % number for part in ranges for number in part}


async def copy(
    source: MemorySource, broker: Broker, topics: Sequence[str] = ("orders",), **options: Any
) -> tuple[list[ImportedPartition], dict[str, int]]:
    return await import_topics(cast(KafkaSource, source), broker.address, topics, "copied", **options)


@dataclass(frozen=True)
class LaterClock(SystemClock):
    """A clock that is ahead."""

    ahead_ms: int

    def wall_ms(self) -> int:
        return super().wall_ms() + self.ahead_ms


class LogQueue:
    """A queue over a log made by hand, which shows its entries a few at a time."""

    def __init__(self, log: Log, portion: int = 7) -> None:
        self._log = log
        self._portion = portion
        self.reads = 0

    async def read(self, partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
        self.reads += 1
        found = [entry for entry in self._log.entries if entry.offset >= offset][: self._portion]
        return Entries(found, found[-1].offset + 1 if found else max(offset, self._log.next_offset))

    async def span(self, partition: ReadPartition) -> Span:
        return self._log.span()

    async def seek_time(self, partition: ReadPartition, time_ms: int) -> int:
        raise AssertionError("nobody asks for times here")

    async def wait(self, ends: dict[ReadPartition, int], timeout_s: float) -> None:
        raise AssertionError("nobody waits here")


def imported_of(log: Log, producer: int = 1) -> tuple[ImportProgress, LogQueue]:
    queue = LogQueue(log)

    async def index_of(pointer: Pointer) -> list[BlockEntry]:
        body = next(log.bodies[entry.offset] for entry in log.entries if entry.body == encode_pointer(pointer))
        entries: list[BlockEntry] = []
        at = 0
        while at < len(body):
            entries.append(BlockEntry.from_header(parse_header(body, at), at))
            at += entries[-1].length
        return entries

    return ImportProgress(queue, index_of, PARTITION, 0, producer), queue
