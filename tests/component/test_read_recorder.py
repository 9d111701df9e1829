"""Reports keep the order of commits and restarts of reading, whatever is in flight meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

import memq.aio
from memq.broker.broker import Broker
from memq.client.consumer.batch import Slice
from memq.client.consumer.fetch.cursor_outcomes import ReadyRange
from memq.client.observers.audit_recorder import AuditRecorder, ReadRecorder
from memq.errors import CorruptDataError, KeyMissingError, MemqError, NotEncryptedError, UnsupportedFormatError
from memq.format.pointer import decode_pointer
from memq.format.ranges import Range
from memq.format.report import AUDIT_TOPIC, Report, decode_report
from memq.governor.memory import MemoryCluster, MemoryCoordinator
from memq.groups.coordinator import GroupCoordinator
from memq.notification.memory import MemoryQueue
from memq.runtime.runtime import Runtime
from memq.settings import BrokerSettings
from memq.storage_handlers.memory import MemoryHandler
from memq.topic import Committed, Position, ReadPartition
from tests.brokers import coordinator_of
from tests.unit.queue_model import Block, Log

WAIT_S = 60.0


def test_a_write_partition_that_the_map_does_not_know_begins_where_reading_did() -> None:
    log = Log()
    offset = log.batch(Block(1, 0))
    pointer = decode_pointer(log.entries[0].body)
    slices = tuple(Slice(piece, 0, piece.records) for piece in log.pieces(offset, pointer))
    behind = Committed(Position(0, offset + 1))
    tally = AuditRecorder(7, "consumer", "g", "host", 1_000, lambda: None)
    for _ in range(2):  # the second time after a seek, by a reader whose map is as old
        reading = ReadRecorder(lambda writer: tally.part("clicks", "ab" * 16, writer, 0), [9], commits=True)
        reading.begin(Position(0, 0), "seek")
        reading.deliver(ReadyRange(Position(0, offset), behind, pointer=pointer, slices=slices), 0)
        reading.store(behind, 0)
    parts = [part for _, report in tally.take(0, 1) for part in report.parts if part.partition == pointer.partition]
    assert [[begin.at for begin in part.begins] for part in parts] == [["0:0:0"], ["0:0:0"]]
    assert all(any(span.stage == "processed" for span in part.spans) for part in parts)


def committed_stages(aside: list[int], *commits: Position) -> list[dict[str, list[tuple[int, tuple[Range, ...]]]]]:
    """Deliver two blocks of three records, set some aside by their index, and return the stages after each commit."""
    log = Log()
    offset = log.batch(Block(1, 0), Block(2, 6))
    pointer = decode_pointer(log.entries[0].body)
    slices = tuple(Slice(piece, 0, piece.records) for piece in log.pieces(offset, pointer))
    tally = AuditRecorder(7, "consumer", "g", "host", 1_000, lambda: None)
    reading = ReadRecorder(lambda writer: tally.part("clicks", "ab" * 16, writer, 0), [0], commits=True)
    behind = Committed(Position(0, offset + 1))
    reading.deliver(ReadyRange(Position(0, offset), behind, pointer=pointer, slices=slices), 0)
    for index in aside:
        reading.set_aside(Position(0, offset, index))
    found = []
    for position in commits:
        reading.store(Committed(position), 0)
        stages: dict[str, list[tuple[int, tuple[Range, ...]]]] = {"processed": [], "passed": []}
        for _, report in tally.take(0, 1):
            for span in [span for part in report.parts for span in part.spans if span.stage in stages]:
                stages[span.stage].append((span.producer, span.ranges))
        found.append(stages)
    return found


def test_records_that_were_set_aside_are_passed_when_they_are_committed() -> None:
    (found,) = committed_stages([1, 3], Position(0, 1))
    assert found == {"processed": [(1, ((0, 1), (2, 3))), (2, ((7, 9),))], "passed": [(1, ((1, 2),)), (2, ((6, 7),))]}
    (found,) = committed_stages([0, 1, 2], Position(0, 1))
    assert found == {"processed": [(2, ((6, 9),))], "passed": [(1, ((0, 3),))]}


def test_a_commit_within_a_batch_reports_the_records_before_it_and_the_next_one_the_others() -> None:
    first, second, third = committed_stages([4], Position(0, 0, 2), Position(0, 0, 5), Position(0, 1))
    assert first == {"processed": [(1, ((0, 2),))], "passed": []}
    assert second == {"processed": [(1, ((2, 3),)), (2, ((6, 7),))], "passed": [(2, ((7, 8),))]}
    assert third == {"processed": [(2, ((8, 9),))], "passed": []}


def test_copies_that_were_left_out_are_reported_as_dropped() -> None:
    log = Log()
    offset = log.batch(Block(1, 6))
    (piece,) = log.pieces(offset, decode_pointer(log.entries[0].body))
    assert piece.header is not None
    tally = AuditRecorder(7, "consumer", "g", "host", 1_000, lambda: None)
    reading = ReadRecorder(lambda writer: tally.part("clicks", "ab" * 16, writer, 0), [0], commits=True)
    reading.drop_copies([(0, piece.header), (5, piece.header)], 0)
    (part,) = (part for _, report in tally.take(0, 1) for part in report.parts if part.partition == 0)
    assert [(span.stage, span.producer, span.ranges) for span in part.spans] == [("dropped", 1, ((6, 9),))]


@pytest.mark.parametrize("other", [UnsupportedFormatError, KeyMissingError, NotEncryptedError])
def test_a_block_of_a_newer_version_or_without_a_key_is_no_damage(other: type[MemqError]) -> None:
    log = Log()
    offset = log.batch(Block(1, 0), Block(1, 3))
    pointer = decode_pointer(log.entries[0].body)
    causes = (other("newer"), CorruptDataError("a checksum"))
    pieces = [
        piece._replace(header=None, cause=cause)
        for piece, cause in zip(log.pieces(offset, pointer), causes, strict=True)
    ]
    tally = AuditRecorder(7, "consumer", "g", "host", 1_000, lambda: None)
    reading = ReadRecorder(lambda writer: tally.part("clicks", "ab" * 16, writer, 0), [0], commits=True)
    behind = Committed(Position(0, offset + 1))
    reading.deliver(ReadyRange(Position(0, offset), behind, pointer=pointer, damaged=tuple(pieces)), 0)
    (part,) = (part for _, report in tally.take(0, 1) for part in report.parts)
    assert [(damage.block, damage.records, damage.cause) for damage in part.damages] == [(1, 3, "a checksum")]


class HeldGroups(GroupCoordinator):
    """Groups that store nothing until they are `free`."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.asked, self.free = asyncio.Event(), asyncio.Event()

    async def commit(
        self, group: str, member: str, generation: int, positions: Mapping[ReadPartition, Committed], number: int = 0
    ) -> None:
        """See `Groups.commit`."""
        self.asked.set()
        await self.free.wait()
        await super().commit(group, member, generation, positions, number)


def test_a_partition_that_is_opened_again_during_its_commit_begins_after_the_committed_position() -> None:
    async def scenario() -> list[str]:
        runtime = Runtime()
        broker = Broker(
            BrokerSettings(port=0, http_port=-1, audit_interval_ms=50),
            runtime,
            {"main": MemoryHandler(runtime.clock)},
            MemoryQueue(runtime.clock),
            MemoryCoordinator(MemoryCluster("test")),
        )
        broker.hosts.make_coordinator = HeldGroups
        await broker.start()
        async with memq.aio.Producer(broker.address) as producer:
            await (await producer.send("clicks", b"1"))
        groups = await coordinator_of(broker, "g")
        assert isinstance(groups, HeldGroups)
        async with memq.aio.Consumer(broker.address, "clicks", group="g", auto_commit=False) as consumer:
            first = await consumer.poll(WAIT_S)
            storing = asyncio.create_task(consumer.commit(first))
            await groups.asked.wait()
            await consumer.seek("clicks", 0, Position(0, 0))
            again = await consumer.poll(WAIT_S)
            groups.free.set()
            await storing
            await consumer.commit(again)
        steps = await steps_of(broker.address)
        await broker.close()
        return steps

    assert asyncio.run(scenario()) == ["begin 0:0:0", "processed", "begin 0:0:0", "processed"]


async def steps_of(address: str) -> list[str]:
    """Return what the one consumer says in its reports, in their order."""
    reports: list[Report] = []
    async with memq.aio.Consumer(address, AUDIT_TOPIC, audit=False) as consumer:
        while not any(report.last for report in reports):
            batch = await consumer.poll(WAIT_S)
            assert batch is not None, f"it does not end: {reports}"
            found = [decode_report(record.value or b"") for record in batch]
            reports += [report for report in found if report.kind == "consumer"]
    steps: list[str] = []
    for part in (part for report in sorted(reports, key=lambda each: each.number) for part in report.parts):
        steps += [f"begin {begin.at}" for begin in part.begins]
        steps += [span.stage for span in part.spans if span.stage == "processed"]
    return steps
