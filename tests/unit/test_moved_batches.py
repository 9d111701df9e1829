"""Batches that are not at their pointer's location: a reader's requests for starts, lags and batches."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from memq.client.consumer.fetch.copy_search import GONE_S
from memq.client.consumer.fetch.partition_cursor import CursorState, PartitionCursor
from memq.client.consumer.offset_resolver import END_TRIES, OffsetResolver
from memq.errors import (
    CorruptDataError,
    InvalidRequestError,
    PositionExpiredError,
    PositionLostError,
)
from memq.format.pointer import Location, decode_pointer, encode_pointer
from memq.notification import Entries, Entry
from memq.topic import Position, Totals
from tests.skipping_loop import skip, skipping_runtime
from tests.unit.consumer_world import TOPIC, Reader, World, expected, log_of, partition_of, reading
from tests.unit.queue_model import WINDOW_MS, Block, Log


def relocate(log: Log, offset: int, key: str) -> None:
    """Let the pointer at an offset name another object, as after a compaction."""
    entry = log.entries[offset - log.entries[0].offset]
    pointer = decode_pointer(entry.body)
    moved = msgspec.structs.replace(
        pointer, locations=tuple(msgspec.structs.replace(each, key=key) for each in pointer.locations)
    )
    log.entries[offset - log.entries[0].offset] = Entry(entry.offset, entry.time_ms, encode_pointer(moved))


def test_a_batch_that_was_moved_is_found_by_its_pointer_of_now() -> None:
    async def work() -> None:
        world = World(log_of(2))
        world.fetch_s = 1.0
        reader = Reader(world)
        reader.add(0)
        await skip(0.5)
        world.gone = {"o/1"}
        relocate(world.logs[0], 1, "large/1")
        await reader.until(6)
        assert reader.got == expected(0, 2)
        assert "large/1" in world.keys
        assert reader.reading.retries == 0
        await reader.tasks.stop()

    reading(work())


def test_a_reader_does_not_take_another_batch_for_one_that_was_moved() -> None:
    """The log was cut and has grown again: from the reader's record index on, only a part of a new batch would come."""

    async def work() -> None:
        world = World(log_of(3))
        world.fetch_s = 1.0
        reader = Reader(world)
        cursor = PartitionCursor(partition_of(0), Position(0, 1, 2), window_ms=WINDOW_MS)
        reader.reading.add(cursor, TOPIC)
        await skip(0.5)
        world.gone = {"o/1"}
        log = world.logs[0]
        grown = Log(log.entries[:1], log.bodies, records=3, stored=log.stored // 3, next_offset=1)
        grown.batch(Block(1, 9), epoch=2)
        grown.batch(Block(1, 12), epoch=2)
        world.logs[0] = grown
        relocate(grown, 1, "large/1")
        await skip(3)
        reader.deliver()
        assert reader.got == []
        assert isinstance(reader.reading.failure, PositionLostError)
        await reader.tasks.stop()

    reading(work())


def test_a_batch_that_is_nowhere_is_damage() -> None:
    async def work() -> None:
        world = World(log_of(2))
        world.gone = {"o/0"}
        strict = Reader(world)
        strict.add(0)
        await skip(1)
        strict.deliver()
        (failure,) = strict.failures
        assert isinstance(failure, CorruptDataError)
        assert "its object is missing" in str(failure)
        await strict.tasks.stop()
        lenient = Reader(world)
        passing = lenient.add(0, pass_damage=True)
        await lenient.until(3)
        assert lenient.got == expected(0, 2)[3:]
        assert passing.cursor.counts.damaged_records == 3
        await lenient.tasks.stop()

    reading(work())


@pytest.mark.parametrize("skips", [True, False])
def test_a_batch_that_retention_took_while_it_was_fetched_expires(skips: bool) -> None:
    async def work() -> None:
        world = World(log_of(3))
        world.fetch_s = 1.0
        reader = Reader(world)
        assigned = reader.add(0, pass_expired=skips, known=Totals())
        await skip(0.5)
        world.gone = {"o/0", "o/1"}
        del world.logs[0].entries[:2]
        if skips:
            await reader.until(3)
            assert reader.got == expected(0, 3)[6:]
            assert assigned.cursor.counts.expired_records == 6
        else:
            await skip(2)
            reader.deliver()
            (failure,) = reader.failures
            assert isinstance(failure, PositionExpiredError)
            assert failure.first == "0:2:0"
        await reader.tasks.stop()

    reading(work())


def test_entries_expired_before_they_were_polled_are_a_gap() -> None:
    async def work() -> None:
        world = World(log_of(2))
        reader = Reader(world)
        assigned = reader.add(0, pass_expired=True)
        await reader.until(6)
        for first in (6, 9, 12):
            world.logs[0].batch(Block(1, first))
        del world.logs[0].entries[:4]
        world.news.set()
        await reader.until(9)
        assert reader.got[6:] == expected(0, 5)[12:]
        assert (assigned.cursor.counts.expired_offsets, assigned.cursor.counts.expired_records) == (2, 6)
        await reader.tasks.stop()

    reading(work())


def test_a_copy_of_what_lies_before_the_start_is_compared_and_left_out() -> None:
    async def work() -> None:
        log = Log()
        log.batch(Block(1, 0))
        log.batch(Block(1, 0), Block(1, 3))
        log.batch(Block(1, 3, more=b"!"))
        reader = Reader(World(log))
        assigned = reader.add(0, start=1)
        await reader.until(6)
        assert [value for _, value in reader.got] == [b"1:3", b"1:4", b"1:5"] * 2
        counts = assigned.cursor.counts
        assert (counts.duplicate_records, counts.conflicting_blocks) == (3, 1)
        await reader.tasks.stop()

    reading(work())


@pytest.mark.parametrize("missing", [False, True])
def test_a_resumed_reader_delivers_the_copy_of_a_block_that_its_forerunner_could_not_read(missing: bool) -> None:
    async def work() -> None:
        log = Log()
        log.batch(Block(1, 0), Block(1, 3))
        log.batch(Block(1, 0), Block(1, 3))
        world = World(log)
        if missing:
            world.gone = {"o/0"}
        else:
            body = bytearray(log.bodies[0])
            body[len(body) // 2 - 1] ^= 1  # in the payload of the first block
            log.bodies[0] = bytes(body)
        first, resumed = Reader(world), Reader(world)
        first.add(0, pass_damage=True)
        await first.until(6)
        assert set(first.got) == set(expected(0, 2))
        assigned = resumed.add(0, start=1)
        await resumed.until(6 if missing else 3, limit_s=GONE_S + 60)
        await skip(5)
        resumed.deliver()
        assert resumed.got == expected(0, 2)[: 6 if missing else 3]
        assert assigned.cursor.counts.duplicate_records == (0 if missing else 3)
        await first.tasks.stop()
        await resumed.tasks.stop()

    reading(work())


# ---- places --------------------------------------------------------------------------------------


def test_a_start_after_the_end_is_asked_about_for_a_while() -> None:
    async def work() -> None:
        world = World(log_of(2))
        loop = asyncio.get_running_loop()
        begin_s = loop.time()
        with pytest.raises(InvalidRequestError, match="after its end"):
            await OffsetResolver(world).start_at(Position(0, 3), partition_of(0), TOPIC.settings)
        assert loop.time() - begin_s == pytest.approx(0.1 * (2**END_TRIES - 1))

    reading(work())


def test_a_look_back_reads_the_index_of_a_pointer_that_could_not_name_all() -> None:
    async def work() -> None:
        log = Log()
        log.batch(Block(1, 0), named=False)
        log.batch(Block(1, 0), Block(1, 3))
        world = World(log)
        cursor = PartitionCursor(partition_of(0), Position(0, 1), window_ms=TOPIC.settings.reader_window_ms)
        await OffsetResolver(world).look_back(cursor, TOPIC.settings, [0], world.index_of)
        reader = Reader(world)
        reader.add(0, start=1)
        await reader.until(3)
        assert [value for _, value in reader.got] == [b"1:3", b"1:4", b"1:5"]
        await reader.tasks.stop()

    reading(work())


def test_a_lag_is_in_records_bytes_and_seconds() -> None:
    async def work() -> None:
        runtime = skipping_runtime()
        log = log_of(4, time_ms=runtime.clock.wall_ms() - 5_000)
        resolver, size, stored = OffsetResolver(World(log)), len(Block(1, 0).data()), log.stored

        async def lag(position: Position, here: Totals) -> tuple[int, int, float]:
            found = await resolver.lag(TOPIC, partition_of(0), position, here, runtime.clock)
            return found.records, found.bytes, found.seconds

        assert await lag(Position(0, 1), Totals(3, size)) == (9, stored - size, 5.0)
        assert await lag(Position(0, 1, 2), Totals(3, size)) == (7, stored - size, 5.0)
        assert await lag(Position(0, 4), Totals(12, stored)) == (0, 0, 0.0)
        assert await lag(Position(0, 4), Totals(13, stored)) == (0, 0, 0.0)
        assert await resolver.end_totals(partition_of(0), TOPIC.settings, [0]) == Totals(12, stored)

    reading(work())


def test_locations_are_compared_as_a_whole() -> None:
    async def work() -> None:
        world = World(log_of(1))
        cursor = PartitionCursor(partition_of(0), Position(0, 0), window_ms=WINDOW_MS)
        cursor.begin()
        cursor.take_entries(Entries(world.logs[0].entries, 1))
        slot = cursor.next_fetch()
        assert slot is not None
        assert not slot.move(world.logs[0].entries[0], partition_of(0)), "it is where it was"
        relocate(world.logs[0], 0, "large/0")
        assert slot.move(world.logs[0].entries[0], partition_of(0))
        assert slot.pointer is not None
        assert slot.pointer.locations == (Location(store="main", key="large/0", offset=0, length=slot.bytes),)
        assert not slot.move(Entry(0, 0, b"{"), partition_of(0)), "what can't be read names no place"
        assert cursor.state is CursorState.READING

    reading(work())
