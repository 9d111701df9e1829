"""Reports of staged batches: identities, minutes and stages of the blocks that readers get."""

from __future__ import annotations

import asyncio

from memq.broker.broker import Broker
from memq.client.bulk.staged_writer import StagedCommits, StagedWriter
from memq.client.consumer.consumer import AsyncConsumer
from memq.client.observers.audit_recorder import AuditRecorder, StagedRecorder
from memq.format.object import parse_index, parse_trailer
from memq.format.pointer import decode_pointer
from memq.format.ranges import RangeSet
from memq.format.report import AUDIT_TOPIC, MINUTE_MS, Report, ReportPart, decode_report
from memq.format.staged_manifest import StagedObject, decode_manifest
from memq.limits import TRAILER_BYTES
from memq.runtime.clock import SystemClock
from memq.runtime.runtime import Runtime
from memq.storage_handlers.memory import MemoryHandler
from memq.topic import Topic, TopicSettings, equal_slots, read_partitions
from tests.brokers import running_broker
from tests.unit.blocks import NOW_MS

TOPIC = Topic(name="clicks", id="0123456789abcdef" * 2, created_ms=NOW_MS, partitions=equal_slots(2))
WRITER = "nightly"
WAIT_S = 60.0
WINDOW_MS = 3_600_000
Told = dict[tuple[str, int, int, int], RangeSet]  # stage, partition, producer, minute


class Later(SystemClock):
    """The clock of a driver that comes back when the dedup window of its batch has passed."""

    def wall_ms(self) -> int:
        return super().wall_ms() + WINDOW_MS


def answer(parts: list[ReportPart]) -> Told:
    found: Told = {}
    for part in parts:
        for span in part.spans:
            assert span.level == 2
            for piece in span.ranges:
                found.setdefault((span.stage, part.partition, span.producer, span.minute), RangeSet()).add(*piece)
    return found


def blocks_of(body: bytes) -> Told:
    """Return what an object's index says of its blocks, as stage ""."""
    trailer = parse_trailer(body[-TRAILER_BYTES:], len(body))
    index = parse_index(body[trailer.index_offset : -TRAILER_BYTES], trailer)
    found: Told = {}
    for batch in index.batches:
        for block in index.blocks_of(batch):
            key = ("", batch.partition, block.producer_id, block.least_ms // MINUTE_MS)
            found.setdefault(key, RangeSet()).add(block.first_sequence, block.next_sequence)
    return found


async def staged(store: MemoryHandler, topic: Topic, values: int) -> list[StagedObject]:
    """Stage small blocks whose times wander over five minutes, back and forth."""
    writer = StagedWriter("memq", {topic.name: topic}, store, WRITER, block_bytes=60, object_bytes=2_000)
    for number in range(values):
        time_ms = NOW_MS + (number // 7 % 5) * MINUTE_MS
        await writer.add(topic.name, b"%020d" % number, timestamp_ms=time_ms, partition=number % len(topic.partitions))
    return await writer.finish()


def test_a_batch_is_described_by_the_indexes_of_its_objects() -> None:
    async def work() -> None:
        store = MemoryHandler(Runtime().clock)
        objects = await staged(store, TOPIC, 300)
        assert len(objects) > 2
        tally = AuditRecorder(1, "spark-writer", WRITER, "", 100, lambda: None)
        for partition in range(2):
            pieces = [(each, piece) for each in objects for piece in each.pieces if piece.partition == partition]
            notes = StagedRecorder(tally.part(TOPIC.name, TOPIC.id, partition, NOW_MS), pieces)
            notes.send(NOW_MS)
            for published in (1, 1, len(pieces) - 1, len(pieces)):
                notes.ack(published, NOW_MS)
        found = answer([part for _, report in tally.take(NOW_MS, 1, last=True) for part in report.parts])
        expected: Told = {}
        for each in objects:
            for (_, *key), ranges in blocks_of(await store.get(each.key)).items():
                for stage in ("sent", "acked"):
                    expected[stage, key[0], key[1], key[2]] = ranges
        assert found == expected
        assert len({minute for _, _, _, minute in found}) == 5

    asyncio.run(work())


def test_a_manifest_of_before_tells_nothing() -> None:
    body = (
        b'{"version":1,"cluster":"memq","writer":"w","batch_id":1,"store":"main","created_ms":1,"objects":[{"key":"k",'
        b'"bytes":9,"index_offset":5,"pieces":[{"topic":"clicks","topic_id":"%s","partition":0,"offset":0,"length":5,'
        b'"records":1,"raw_bytes":5}]}]}' % (b"0" * 32)
    )
    (pieces,) = decode_manifest(body, "m").by_partition().values()
    tally = AuditRecorder(1, "spark-writer", WRITER, "", 100, lambda: None)
    notes = StagedRecorder(tally.part("clicks", "0" * 32, 0, 0), pieces)
    notes.send(0)
    notes.ack(1, 0)
    assert tally.take(0, 1) == []
    StagedRecorder(None, pieces).send(0)  # nobody asks


async def heard(broker: Broker, enough: int) -> list[Report]:
    """Return the reports of writers, once so many of them have said their last word."""
    reports: list[Report] = []
    async with asyncio.timeout(WAIT_S), AsyncConsumer(broker.address, [AUDIT_TOPIC], audit=False) as consumer:
        while sum(report.last for report in reports) < enough:
            batch = await consumer.poll(WAIT_S)
            assert batch is not None
            reports += [decode_report(record.value or b"") for record in batch]
    assert {(report.kind, report.name) for report in reports} == {("spark-writer", WRITER)}
    return reports


def test_a_commit_reports_what_its_pointers_hold_and_an_old_one_says_nothing() -> None:
    async def work() -> None:
        async with running_broker(audit=True, audit_interval_ms=100) as broker:
            settings = TopicSettings(dedup_window_ms=WINDOW_MS)
            topic = await broker.partitions.create("clicks", 1, settings, exist_ok=False)
            store = broker.services.store
            assert isinstance(store, MemoryHandler)
            objects = await staged(store, topic, 300)
            for _ in range(2):  # the second one is notified that all is there
                async with StagedCommits(broker.address, WRITER, audit=True) as commits:
                    await commits.topics(["clicks"])
                    await commits.commit(1, objects, store)
            reports = await heard(broker, 2)
            found = answer([part for report in reports for part in report.parts])
            pointers = [
                decode_pointer(entry.body)
                for partition in read_partitions(topic)
                for entry in await broker.services.queue.read(partition, 0, 64 << 20)
            ]
            queued = {
                (entry.producer, piece) for pointer in pointers for entry in pointer.producers for piece in entry.ranges
            }
            for stage in ("sent", "acked"):
                merged: dict[int, RangeSet] = {}
                for (told_stage, _, producer, _), ranges in found.items():
                    for piece in ranges if told_stage == stage else ():
                        merged.setdefault(producer, RangeSet()).add(*piece)
                assert {(producer, piece) for producer, ranges in merged.items() for piece in ranges} == queued
            for runtime, batch in ((Runtime(clock=Later()), 1), (Runtime(), 2)):
                async with StagedCommits(broker.address, WRITER, runtime=runtime, audit=True) as commits:
                    await commits.topics(["clicks"])
                    await commits.commit(batch, await staged(store, topic, 10) if batch > 1 else (), store)
            assert len({report.client for report in await heard(broker, 3)}) == 3

    asyncio.run(work())
