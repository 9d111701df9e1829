"""A real broker fills store and queue; objects and pointers are damaged; the verdict names each damage."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from awscrt.checksums import crc32c

from memq.audit.checks.object_reads import ReadObject
from memq.audit.collector import audit
from memq.audit.finding import Kind, Outcome
from memq.audit.opened_topic import THROUGH_BROKER
from memq.audit.verdict import THROUGH_STORE, Verdict
from memq.broker.broker import Broker
from memq.cli.store.audit import audit_by_brokers, print_verdict
from memq.errors import MemqError, StoreError
from memq.format.blocks.builder import BlockBuilder
from memq.format.blocks.header import Buffer, scope_of
from memq.format.object import open_object
from memq.format.pointer import Location, Pointer, decode_pointer, encode_pointer
from memq.governor.memory import MemoryCluster, MemoryCoordinator
from memq.limits import SEQUENCE_END
from memq.notification import Entries, Entry, Span
from memq.notification.memory import MemoryQueue
from memq.protocol.frames import WRITE_PREFIX, Api, Frame
from memq.protocol.link import Link, connect_link
from memq.protocol.messages import Close, Done, Metadata, MetadataRequest, Open, OpenAnswer
from memq.runtime.network import parse_address
from memq.runtime.runtime import Runtime
from memq.settings import BrokerSettings
from memq.storage_handlers import StorageHandler
from memq.storage_handlers.filesystem import FilesystemHandler
from memq.storage_handlers.memory import MemoryHandler
from memq.topic import ReadPartition, Topic

RECORDS, BLOCKS = 3, 4  # of each producer
WAIT_S = 10.0


def object_reader(handler: StorageHandler) -> ReadObject:
    """Return the `ReadObject` of the store `main`."""

    async def read(location: Location, *, whole: bool) -> Buffer:
        assert location.store == "main"
        assert whole
        return await handler.get(location.key, checked=False)

    return read


class Owner:
    """Waits for the acks of one link."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[Frame] = asyncio.Queue()

    def stream_frame(self, frame: Frame) -> None:
        self.frames.put_nowait(frame)

    def draining(self) -> None:
        pass

    def writable(self) -> None:
        pass

    def lost(self, error: MemqError) -> None:
        pass


@dataclass
class World:
    """What the broker left behind."""

    runtime: Runtime
    store: MemoryHandler
    queue: MemoryQueue
    topic: Topic

    async def audit(self) -> Verdict:
        read = object_reader(self.store)
        return await audit(self.topic, self.queue, read, self.runtime.clock.wall_ms())

    @property
    def entries(self) -> list[Entry]:
        return self.queue.log(ReadPartition("t", self.topic.id, 0)).entries

    @property
    def data(self) -> list[tuple[int, Pointer]]:
        pointers = [(entry.offset, decode_pointer(entry.body)) for entry in self.entries]
        return [(offset, pointer) for offset, pointer in pointers if pointer.kind == "data"]

    def key_of(self, number: int) -> str:
        return self.data[number][1].locations[0].key

    async def overwrite(self, key: str, data: bytes) -> None:
        await self.store.delete(key)
        await self.store.put(key, [data], crc32c(data))

    def replace(self, offset: int, body: bytes) -> None:
        self.entries[offset] = Entry(offset, self.entries[offset].time_ms, body)

    def remove(self, offset: int) -> None:
        kept = [entry for entry in self.entries if entry.offset != offset]
        self.entries[:] = [Entry(at, entry.time_ms, entry.body) for at, entry in enumerate(kept)]

    async def append(self, pointer: Pointer) -> None:
        self.entries.append(Entry(len(self.entries), self.entries[-1].time_ms, encode_pointer(pointer)))


async def send(link: Link, owner: Owner, topic: Topic, producer: int, *, close: bool) -> None:
    """Send BLOCKS blocks with ack=all, one batch each."""
    stream = producer
    ask = Open(topic="t", topic_id=topic.id, partition=0, producer=f"{producer:016x}", acks=2, sequence=0)
    await link.request(Api.OPEN, ask, OpenAnswer, stream=stream)
    for first in range(0, BLOCKS * RECORDS, RECORDS):
        builder = BlockBuilder()
        for number in range(RECORDS):
            builder.append(b"value %d" % number, key=b"k", tag="web")
        block = builder.seal(
            producer_id=producer, first_sequence=first, scope=scope_of(topic.id_bytes, 0), now_ms=1_700_000_000_000
        )
        link.write(WRITE_PREFIX.pack(len(block.data), Api.WRITE, 0, stream, 0) + block.data)
        while (await asyncio.wait_for(owner.frames.get(), WAIT_S)).argument != first + RECORDS:
            pass
    if close:
        await link.request(Api.CLOSE, Close(next_sequence=BLOCKS * RECORDS), Done, stream=stream)


async def fill(producers: Sequence[int] = (5, 6), *, close: bool = True) -> World:
    runtime = Runtime()
    store, queue = MemoryHandler(runtime.clock), MemoryQueue(runtime.clock)
    broker = await started(runtime, store, queue)
    topic = await feed(runtime, broker, producers, close=close)
    await broker.drain()
    await broker.close()
    return World(runtime, store, queue, topic)


async def started(runtime: Runtime, store: StorageHandler, queue: MemoryQueue) -> Broker:
    settings = BrokerSettings(port=0)
    broker = Broker(settings, runtime, {"main": store}, queue, MemoryCoordinator(MemoryCluster()))
    await broker.start()
    return broker


async def feed(runtime: Runtime, broker: Broker, producers: Sequence[int], *, close: bool) -> Topic:
    owner = Owner()
    link = await connect_link(runtime, owner, parse_address(broker.address))
    metadata = await link.request(Api.METADATA, MetadataRequest(topics=["t"], create=True), Metadata)
    topic = metadata.topics[0].topic
    for producer in producers:
        await send(link, owner, topic, producer, close=close or producer == 6)
    link.close()
    return topic


def run(work: Callable[[World], Awaitable[None]], *, close: bool = True) -> Verdict:
    async def go() -> Verdict:
        world = await fill(close=close)
        assert (await world.audit()).passed
        await work(world)
        return await world.audit()

    return asyncio.run(go())


async def nothing(world: World) -> None:
    """Leave all as it is."""


def test_audit_of_a_topic_that_a_broker_stored_is_clean(capsys: pytest.CaptureFixture[str]) -> None:
    verdict = run(nothing)
    assert (verdict.outcome, verdict.findings) == (Outcome.CLEAN, ())
    coverage = verdict.coverage
    assert (coverage.records, coverage.blocks, coverage.objects) == (24, 8, 8)
    assert (coverage.producers, coverage.producers_proven, coverage.unread) == (2, 2, 0)
    print_verdict(verdict)
    assert capsys.readouterr().out.startswith("verdict: clean: topic 't', 24 records of 2 producers\ncoverage: ")
    assert json.loads(json.dumps(verdict.to_json()))["verdict"] == "clean"


def test_a_producer_that_did_not_close_leaves_its_tail_open() -> None:
    verdict = run(nothing, close=False)
    assert verdict.outcome is Outcome.INCOMPLETE
    (finding,) = verdict.finding(Kind.IN_FLIGHT).findings
    assert (finding.producer, finding.ranges) == (5, ((12, SEQUENCE_END),))


def test_a_flipped_byte_is_corrupt_with_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    keys: list[str] = []

    async def damage(world: World) -> None:
        keys.append(world.key_of(2))
        data = bytearray(await world.store.get(keys[0]))
        data[open_object(data).blocks[0].offset + 80] ^= 1
        await world.overwrite(keys[0], bytes(data))

    verdict = run(damage)
    assert verdict.outcome is Outcome.DAMAGED
    (finding,) = verdict.finding(Kind.CORRUPT).findings
    assert (finding.object, finding.block, finding.producer, finding.ranges) == (keys[0], 0, 5, ((6, 9),))
    assert [finding.kind for finding in verdict.findings] == [Kind.CORRUPT], "what is corrupt is not lost as well"
    print_verdict(verdict)
    assert f"object {keys[0]} block 0" in capsys.readouterr().out


def test_a_missing_object_is_corrupt_with_what_its_pointer_names() -> None:
    verdict = run(lambda world: world.store.delete(world.key_of(5)))
    (finding,) = verdict.finding(Kind.CORRUPT).findings
    assert (finding.producer, finding.ranges, finding.cause) == (6, ((3, 6),), "its object is missing")


def test_a_cut_object_and_one_that_is_too_long_are_found() -> None:
    async def damage(world: World) -> None:
        short, long = await world.store.get(world.key_of(0)), await world.store.get(world.key_of(1))
        await world.overwrite(world.key_of(0), short[:-5])
        await world.overwrite(world.key_of(1), long + b"x")

    verdict = run(damage)
    assert verdict.outcome is Outcome.DAMAGED
    assert {finding.offset for finding in verdict.finding(Kind.FAULT).findings} == {1, 2}
    assert not verdict.finding(Kind.CORRUPT).count, "the blocks are sound"


def test_a_pointer_that_is_gone_is_a_loss_and_a_hole() -> None:
    async def damage(world: World) -> None:
        world.remove(world.data[3][0])

    verdict = run(damage)
    assert verdict.outcome is Outcome.LOST
    (finding,) = verdict.finding(Kind.LOST).findings
    assert (finding.producer, finding.ranges) == (5, ((9, 12),))
    assert verdict.finding(Kind.BATCH_HOLE).count == 1


def test_the_last_pointer_of_a_silent_producer_is_missed_by_the_totals() -> None:
    async def go() -> Verdict:
        world = await fill(producers=(5,), close=False)
        world.remove(world.data[-1][0])
        return await world.audit()

    verdict = asyncio.run(go())
    assert [finding.kind for finding in verdict.findings] == [Kind.TOTALS, Kind.IN_FLIGHT]
    assert (verdict.outcome, verdict.findings[0].count) == (Outcome.DAMAGED, 3)


def test_a_damaged_pointer_hides_its_batch() -> None:
    async def damage(world: World) -> None:
        world.replace(world.data[3][0], b'{"kind":"data"')

    verdict = run(damage)
    assert verdict.outcome is Outcome.LOST
    assert (verdict.finding(Kind.POINTER).count, verdict.finding(Kind.LOST).count) == (1, 3)


def test_a_pointer_published_twice_is_a_copy_that_readers_drop() -> None:
    async def damage(world: World) -> None:
        await world.append(world.data[2][1])

    verdict = run(damage)
    assert (verdict.outcome, verdict.coverage.copies_dropped) == (Outcome.CLEAN, 3)


def test_a_copy_behind_the_window_is_doubled() -> None:
    async def damage(world: World) -> None:
        await world.append(world.data[2][1])
        last = world.entries[-1]
        world.entries[-1] = Entry(last.offset, last.time_ms + 2 * world.topic.settings.dedup_window_ms, last.body)

    verdict = run(damage)
    assert (verdict.outcome, verdict.finding(Kind.DOUBLED).count) == (Outcome.DOUBLED, 3)


@pytest.mark.parametrize("number", [2, 5])
def test_other_bytes_under_the_same_sequences_are_doubled_not_dropped(number: int) -> None:
    """Readers deliver what is no copy: so the audit names it, and says why."""

    async def damage(world: World) -> None:
        _, pointer = world.data[number]
        location = pointer.locations[0]
        body = bytearray(await world.store.get(location.key))
        block = body[location.offset : location.offset + location.length]
        block[-1] ^= 1
        block[4:8] = crc32c(bytes(block[8:])).to_bytes(4, "little")
        body[location.offset : location.offset + location.length] = block
        key = location.key[:-1] + "9"
        await world.store.put(key, [bytes(body)], crc32c(bytes(body)))
        await world.append(msgspec.structs.replace(pointer, locations=(msgspec.structs.replace(location, key=key),)))

    verdict = run(damage)
    assert (verdict.outcome, verdict.finding(Kind.DOUBLED).count) in ((Outcome.DOUBLED, 3), (Outcome.DAMAGED, 3))
    (finding,) = verdict.finding(Kind.DOUBLED).findings
    assert finding.cause == "same sequences, other bytes"
    assert verdict.coverage.copies_dropped == 0


def test_a_pointer_that_states_what_is_not_so_is_a_contradiction() -> None:
    async def damage(world: World) -> None:
        offset, pointer = world.data[1]
        world.replace(offset, encode_pointer(msgspec.structs.replace(pointer, tag_bits=0, records=4)))

    verdict = run(damage)
    assert verdict.outcome is Outcome.DAMAGED
    causes = [finding.cause for finding in verdict.finding(Kind.FAULT).findings]
    assert "pointer says records 4, the index 3" in causes
    assert any("tag bits 0" in cause for cause in causes)


def test_retention_is_no_loss() -> None:
    async def damage(world: World) -> None:
        offset, _ = world.data[2]
        keys = [world.key_of(number) for number in (0, 1)]
        await world.queue.trim(ReadPartition("t", world.topic.id, 0), offset)
        for key in keys:
            await world.store.delete(key)

    verdict = run(damage)
    assert (verdict.outcome, verdict.coverage.expired) == (Outcome.CLEAN, 6)


@pytest.mark.parametrize("moment", ["before its pointer is read", "before its object is read"])
def test_records_that_retention_removes_during_the_audit_are_not_lost(moment: str) -> None:
    async def go() -> Verdict:
        world = await fill()
        partition = ReadPartition("t", world.topic.id, 0)
        offset, keys = world.data[1][0], [world.key_of(0), world.key_of(1)]

        async def retire() -> None:
            await world.queue.trim(partition, offset + 1)
            for key in keys:
                await world.store.delete(key)

        class Queue(MemoryQueue):
            async def read(self, partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
                if moment == "before its pointer is read":
                    await retire()
                entries = await world.queue.read(partition, offset, bytes_max)
                await retire()
                return entries

            async def span(self, partition: ReadPartition) -> Span:
                return await world.queue.span(partition)

        queue = Queue(world.runtime.clock)
        return await audit(world.topic, queue, object_reader(world.store), world.runtime.clock.wall_ms())

    verdict = asyncio.run(go())
    assert verdict.outcome is Outcome.INCOMPLETE
    causes = {finding.cause for finding in verdict.finding(Kind.UNREAD).findings}
    assert all("while the audit ran" in cause for cause in causes), causes


def test_a_store_that_is_away_makes_the_verdict_incomplete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memq.audit.checks.checker.RETRY_S", 0.0)

    async def away(key: str, *, checked: bool = True) -> bytes:
        raise StoreError("away")

    async def damage(world: World) -> None:
        world.store.get = away  # type: ignore[method-assign]

    verdict = run(damage)
    assert verdict.outcome is Outcome.INCOMPLETE
    assert (verdict.finding(Kind.UNREAD).count, verdict.coverage.records) == (8, 0)


def test_a_partition_that_is_not_there_is_not_clean() -> None:
    async def damage(world: World) -> None:
        await world.queue.drop([ReadPartition("t", world.topic.id, 0)])

    verdict = run(damage)
    assert verdict.outcome is Outcome.INCOMPLETE
    assert verdict.coverage.partitions[0].error


@pytest.mark.parametrize("through", [THROUGH_STORE, THROUGH_BROKER])
def test_the_command_reads_from_the_store_where_it_opens_and_else_through_a_broker(
    through: str, tmp_path: Path
) -> None:
    async def go() -> tuple[Verdict, list[int]]:
        runtime = Runtime()
        store: StorageHandler = MemoryHandler(runtime.clock)
        if through == THROUGH_STORE:
            for name in ("objects", "tmp"):
                (tmp_path / name).mkdir()
            store = FilesystemHandler(tmp_path / "objects", tmp_path / "tmp", 1)
        broker = await started(runtime, store, MemoryQueue(runtime.clock))
        await feed(runtime, broker, (5, 6), close=True)
        read = [0]
        verdict = await audit_by_brokers(broker.address, "t", read)
        await broker.drain()
        await broker.close()
        await store.close()
        return verdict, read

    verdict, read = asyncio.run(go())
    assert (verdict.outcome, verdict.coverage.through, verdict.coverage.blocks) == (Outcome.CLEAN, through, 8)
    assert read == [verdict.coverage.partitions[0].pointers]
