"""The index of an object is read without its batches: by one request if the tail has it, else two."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from awscrt.checksums import crc32c

from memq.audit.checks.object_check import NamedFinding, NamedObjects
from memq.audit.checks.object_reads import named, read_entries, read_headers
from memq.cli.store.trace import _batch_of
from memq.client.consumer.fetch.fetcher import ReadRange
from memq.errors import CorruptDataError, NotFoundError
from memq.format.blocks.header import parse_header
from memq.format.object import BatchEntry, BlockEntry, ObjectMeta, ObjectTopic, encode_index, parse_trailer
from memq.format.pointer import Location, Pointer, encode_pointer
from memq.format.ranges import RangeSet
from memq.format.report import ReportedDamage
from memq.limits import TRAILER_BYTES
from memq.notification import Publication
from memq.notification.memory import MemoryQueue
from memq.runtime.clock import SystemClock
from memq.spark.read import raw
from memq.storage_handlers import ObjectEntry, confirmed_reads
from memq.storage_handlers.confirmed_reads import read_batch_entries, read_index
from memq.storage_handlers.memory import MemoryHandler
from memq.topic import ReadPartition, Topic, equal_slots
from tests.brokers import block_of
from tests.unit.audited import Run, stored

TOPIC = Topic(name="clicks", id="0a" * 16, created_ms=0, partitions=equal_slots(1))
KEY = "memq/topics/clicks/one"
BLOCK = block_of(TOPIC, 7, [b"a", b"bb"])
BATCH = BatchEntry(0, len(BLOCK), 1_000, 3, 2, 0, 1, 0, 5)
META = ObjectMeta(cluster="memq", broker="b", topics=(ObjectTopic("clicks", TOPIC.id),), created_ms=1)
OBJECT = BLOCK + encode_index(META, [BATCH], [BlockEntry.from_header(parse_header(BLOCK), 0)], len(BLOCK))
INDEX_BYTES = len(OBJECT) - len(BLOCK)  # with the trailer
RUNS: list[Run] = [(5, 0, 10), (6, 0, 4), (5, 10, 20), (7, 0, 1)]


class RangeStore(MemoryHandler):
    """Notes the ranges that are asked for, all of which lie in their objects."""

    def __init__(self) -> None:
        super().__init__(SystemClock())
        self.ranges: list[tuple[int, int]] = []

    async def get_range(self, key: str, offset: int, length: int) -> bytes:
        """See `ObjectReader.get_range`."""
        assert offset >= 0 < length
        self.ranges.append((offset, length))
        return await super().get_range(key, offset, length)


async def store_with(body: bytes) -> tuple[RangeStore, ObjectEntry]:
    store = RangeStore()
    await store.put(KEY, [body], crc32c(body))
    return store, ObjectEntry(KEY, len(body), 0)


@pytest.mark.parametrize(
    ("tail_bytes", "ranges"),
    [
        (confirmed_reads.TAIL_BYTES, [(0, len(OBJECT))]),
        (len(OBJECT) - 1, [(1, len(OBJECT) - 1)]),
        (INDEX_BYTES, [(len(BLOCK), INDEX_BYTES)]),
        (INDEX_BYTES - 1, [(len(BLOCK) + 1, INDEX_BYTES - 1), (len(BLOCK), INDEX_BYTES - TRAILER_BYTES)]),
        (TRAILER_BYTES, [(len(OBJECT) - TRAILER_BYTES, TRAILER_BYTES), (len(BLOCK), INDEX_BYTES - TRAILER_BYTES)]),
    ],
)
def test_an_index_costs_a_second_request_only_where_it_is_longer_than_the_tail(
    monkeypatch: pytest.MonkeyPatch, tail_bytes: int, ranges: list[tuple[int, int]]
) -> None:
    async def work() -> None:
        monkeypatch.setattr(confirmed_reads, "TAIL_BYTES", tail_bytes)
        store, entry = await store_with(OBJECT)
        index, trailer = await read_index(store, entry)
        assert list(index.batches) == [BATCH]
        assert trailer == parse_trailer(OBJECT[-TRAILER_BYTES:], len(OBJECT))
        assert store.ranges == ranges

    asyncio.run(work())


@pytest.mark.parametrize("size", [0, 1, TRAILER_BYTES - 1, TRAILER_BYTES])
def test_an_object_without_room_for_an_index_is_damaged(size: int) -> None:
    async def work() -> None:
        store, entry = await store_with(OBJECT[len(OBJECT) - size :])
        with pytest.raises(CorruptDataError, match=f"object of {size} bytes is cut: the smallest object has 56\n"):
            await read_index(store, entry)

    asyncio.run(work())


def test_the_blocks_of_a_batch_are_found_by_its_pointer_in_a_store_of_this_broker() -> None:
    async def work() -> None:
        store, _ = await store_with(OBJECT)
        there = Location(store="main", key=KEY, offset=0, length=len(BLOCK))
        away = Location(store="gone", key="c-1/elsewhere", offset=0, length=len(BLOCK))
        pointer = Pointer(
            kind="data",
            cluster="c-1",
            topic="clicks",
            topic_id=TOPIC.id,
            partition=0,
            epoch=5,
            batch_sequence=3,
            records=2,
            locations=(away, there),
        )
        (entry,) = await read_batch_entries({"main": store}, pointer)
        assert (entry.first_sequence, entry.count) == (7, 2)
        assert [offset for offset, _ in store.ranges] == [len(BLOCK)] * 2, "its head, then it"
        with pytest.raises(NotFoundError, match="batch 3 is in no store of this broker"):
            await read_batch_entries({"other": store}, pointer)
        with pytest.raises(CorruptDataError, match="its index has not the 3 records of a batch"):
            await read_batch_entries({"main": store}, msgspec.structs.replace(pointer, records=3))

    asyncio.run(work())


# ---- one fetch is no proof -----------------------------------------------------------------------------


class ChangedOnce:
    """Reads an object; its first answer has a flipped bit, or says that there is no such object."""

    def __init__(self, body: bytes, *, missing: bool = False) -> None:
        self.body = body
        self.fetches = 0
        self._missing = missing

    def answer(self, offset: int, length: int) -> bytes:
        self.fetches += 1
        if self.fetches > 1:
            return self.body[offset : offset + length]
        if self._missing:
            raise NotFoundError("there is no such object")
        data = bytearray(self.body[offset : offset + length])
        data[-1] ^= 1
        return bytes(data)

    async def get_range(self, key: str, offset: int, length: int) -> bytes:
        return self.answer(offset, length)

    async def read_range(self, store: str, key: str, offset: int, length: int) -> bytes:
        return self.answer(offset, length)

    async def read(self, location: Location, *, whole: bool = True) -> bytes:
        return self.answer(0, len(self.body)) if whole else self.answer(location.offset, location.length)


def test_a_raw_reader_fetches_an_index_again_before_it_calls_it_damaged() -> None:
    async def work() -> None:
        store = ChangedOnce(OBJECT)
        (batch,) = await raw.read_one(cast(Any, store), ObjectEntry(KEY, len(OBJECT), 0))
        assert (batch.cause, store.fetches) == (None, 2)

    asyncio.run(work())


@pytest.mark.parametrize("missing", [False, True])
def test_the_live_audit_fetches_an_index_again_before_it_goes_without(missing: bool) -> None:
    async def work() -> None:
        pointer, body = stored([(5, 0, 10), (6, 0, 4)])
        reader = ChangedOnce(body, missing=missing)
        entries = await read_entries(cast(Any, reader.read_range), pointer.locations[0])
        assert [(each.producer_id, each.count) for each in entries] == [(5, 10), (6, 4)]

    asyncio.run(work())


@pytest.mark.parametrize("missing", [False, True])
def test_a_trace_fetches_a_batch_again_before_it_calls_a_record_unread(missing: bool) -> None:
    async def work() -> None:
        pointer, body = stored([(5, 0, 10)])
        reader, location = ChangedOnce(body, missing=missing), pointer.locations[0]
        data = await _batch_of(cast(Any, SimpleNamespace(read=reader.read)), pointer)
        assert data == body[location.offset : location.offset + location.length]

    asyncio.run(work())


@pytest.mark.parametrize("missing", [False, True])
def test_verify_finds_nothing_on_one_fetch(missing: bool) -> None:
    async def findings(read: Any) -> tuple[NamedFinding, ...]:
        pointer, _ = stored([(5, 0, 10)])
        log, queue = ReadPartition(pointer.topic, pointer.topic_id, 0), MemoryQueue(SystemClock())
        await queue.create([log], 30_000)
        await queue.publish(Publication(log, 0, 1, 0, encode_pointer(pointer)))
        (batch,) = [each async for each in NamedObjects(pointer.cluster, queue, read).check(log)]
        assert batch.data is not None
        return batch.findings

    async def work() -> None:
        _, body = stored([(5, 0, 10)])

        async def honest(location: Location) -> bytes:
            return body

        assert await findings(ChangedOnce(body, missing=missing).read) == await findings(honest) == ()

    asyncio.run(work())


def damage(block: int, records: int) -> ReportedDamage:
    return ReportedDamage(object="o", block=block, offset=3, records=records, cause="cut")


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize(
    ("block", "records", "wanted"),
    [(0, 25, [0, 1, 2, 3]), (1, 15, [1, 2, 3]), (2, 11, [2, 3]), (3, 1, [3])],
    ids=["all", "from the second on", "two", "the last"],
)
def test_blocks_missing_at_the_end_of_an_object_are_named(
    cut: bool, block: int, records: int, wanted: list[int]
) -> None:
    """By the index, where a broker still has it; else by the headers of what is left."""
    pointer, body = stored(RUNS)
    (location,) = pointer.locations
    entries = asyncio.run(read_entries(reader(body), location))
    if cut:
        entries = asyncio.run(read_headers(reader(body[: entries[block].offset + 10]), location, block))
        assert len(entries) == block
    found: dict[int, RangeSet] = {}
    for each in named(damage(block, records), pointer, entries):
        assert each.records == each.next - each.first
        found.setdefault(each.producer, RangeSet()).add(each.first, each.next)
    expected: dict[int, RangeSet] = {}
    for producer, first, next_ in (RUNS[at] for at in wanted):
        expected.setdefault(producer, RangeSet()).add(first, next_)
    assert found == expected


def test_one_block_is_named_by_the_index() -> None:
    pointer, body = stored(RUNS)
    entries = asyncio.run(read_entries(reader(body), pointer.locations[0]))
    (found,) = named(damage(1, 4), pointer, entries)
    assert (found.producer, found.first, found.next, found.records) == (6, 0, 4, 4)


def test_damage_with_other_counts_stays_unnamed() -> None:
    pointer, body = stored(RUNS)
    entries = asyncio.run(read_entries(reader(body), pointer.locations[0]))
    for unsure, known in ((damage(1, 14), entries[:1]), (damage(2, 11), entries[:1]), (damage(3, 1), ())):
        assert named(unsure, pointer, known) == [unsure]


def reader(body: bytes) -> ReadRange:
    """Return what reads ranges of one object."""

    async def read(store: str, key: str, offset: int, length: int) -> bytes:
        if offset + length > len(body):
            raise CorruptDataError(f"object '{key}' ends before {offset}+{length}")
        return body[offset : offset + length]

    return read
