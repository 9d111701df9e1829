"""The log of one partition as the checker sees it, written event by event."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from memq.format.blocks.builder import BlockBuilder, SealedBlock
from memq.format.blocks.header import scope_of
from memq.format.pointer import Location, Pointer, ProducerRanges, encode_pointer
from memq.format.ranges import RangeSet
from memq.notification import Publication
from memq.simulation.world.world import World
from memq.topic import ReadPartition
from tests.simulation.checker import Checker

TOPIC_ID = "ab" * 16
PARTITION = ReadPartition("t", TOPIC_ID, 0)
WINDOW_MS = 10_000


def block(
    first: int, values: Sequence[bytes], producer: int = 7, partition: int = 0, *, now_ms: int = 0
) -> SealedBlock:
    """Seal one block."""
    builder = BlockBuilder()
    builder.append_many(list(values))
    scope = scope_of(bytes.fromhex(TOPIC_ID), partition)
    return builder.seal(producer_id=producer, first_sequence=first, scope=scope, now_ms=now_ms)


def ranges_of(blocks: Sequence[SealedBlock]) -> tuple[ProducerRanges, ...]:
    """Return what a pointer says of the producers of these blocks."""
    found: dict[int, RangeSet] = {}
    for one in blocks:
        header = one.header
        found.setdefault(header.producer_id, RangeSet()).add(header.first_sequence, header.next_sequence)
    return tuple(ProducerRanges(producer, tuple(found[producer])) for producer in sorted(found))


@dataclass
class Log:
    """Writes a queue and a store by hand, and tells the checker."""

    findings: list[str] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)
    end: int = 0
    partition: ReadPartition = PARTITION

    def __post_init__(self) -> None:
        self.world = World(1)
        self.node = self.world.add_node("b", offset_ms=0)
        self.checker = Checker(self.objects, WINDOW_MS, self.findings.append, self.now, refuse="age")

    def now(self) -> float:
        """Return the virtual time."""
        return self.world.now

    def send(self, *numbers: int, producer: str = "p") -> list[bytes]:
        """Send records of one producer, and return their values."""
        values = [f"{producer} {number}".encode() for number in numbers]
        for number, value in zip(numbers, values, strict=True):
            self.checker.sent(producer, 0, number, value)
        return values

    def ack(self, values: Sequence[bytes]) -> None:
        """Ack records."""
        for value in values:
            self.checker.ack(value)

    def open(self, epoch: int, broker: str = "b") -> None:
        """Publish an opening."""
        self.publish(self.pointer(kind="opened", epoch=epoch, broker=broker), epoch)

    def batch(
        self,
        blocks: Sequence[SealedBlock],
        batch_sequence: int,
        *,
        epoch: int = 1,
        skip: tuple[int, ...] = (),
        time_ms: int = 0,
        store: bool = True,
        read_to: int = 0,
    ) -> None:
        """Store a batch and publish its pointer."""
        data = b"".join(one.data for one in blocks)
        key = f"{epoch}-{batch_sequence}"
        if store:
            self.objects[key] = data
        pointer = self.pointer(
            kind="data",
            epoch=epoch,
            broker="b",
            batch_sequence=batch_sequence,
            locations=(Location(store="s", key=key, offset=0, length=len(data)),),
            records=sum(one.header.count for one in blocks),
            producers=ranges_of(blocks),
            skip=skip,
        )
        self.publish(pointer, epoch, time_ms, read_to)

    def pointer(self, **fields: object) -> Pointer:
        """Make a pointer."""
        topic, topic_id = self.partition.topic, self.partition.topic_id
        return Pointer(cluster="c", topic=topic, topic_id=topic_id, partition=0, **fields)  # type: ignore[arg-type]

    def publish(self, pointer: Pointer, epoch: int, time_ms: int = 0, read_to: int = 0) -> None:
        """Let a pointer land."""
        self.checker.published(
            Publication(self.partition, 0, epoch, time_ms, encode_pointer(pointer)),
            self.end,
            self.node,
            read_to,
            self.now(),
        )
        self.end += 1

    def finish(self) -> list[str]:
        """End the run and return the findings."""
        self.checker.finish(random.Random(1).randrange)
        return self.findings
