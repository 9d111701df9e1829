"""The owner of a target takes each unit of held records once, in order, with the sound blocks (H3, H4)."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import cast

import msgspec
import pytest

from memq.broker.broker import Broker
from memq.broker.holds import taking
from memq.broker.holds.taking import IncomingUnit, UnitBlock, take_unit
from memq.broker.partition.topic_processor import TopicProcessor
from memq.errors import (
    DrainingError,
    LogLostError,
    MovedError,
    NotFoundError,
    NotReadyError,
    StoreError,
    ThrottledError,
)
from memq.format.held_object import HoldId
from memq.format.pointer import Pointer
from memq.storage_handlers import ObjectEntry, confirmed_reads
from memq.storage_handlers.memory import MemoryHandler
from memq.topic import Topic
from tests.brokers import block_of, run
from tests.partition_owners import GatedQueue, failing, owning, pointers, processor_of, turns, unopened

SHARD, OTHER = 0xAB, 0xCD


class Target:
    """An owner with its partition, and held objects in its store."""

    def __init__(self, broker: Broker, topic: Topic) -> None:
        self.broker, self.topic = broker, topic
        self.processor: TopicProcessor = processor_of(broker, topic)
        self.store = cast(MemoryHandler, broker.services.store)
        self.held = 0

    def put(self, *records: int, partition: int = 0) -> list[UnitBlock]:
        """Store an object with a block of so many records from each of new producers."""
        self.held += 1
        key, data, blocks = f"held/{self.held}", b"", []
        for at, count in enumerate(records):
            producer = 100 * self.held + at
            block = block_of(self.topic, 0, [b"value"] * count, partition=partition, producer=producer)
            blocks.append(UnitBlock(key, len(data), len(block), HoldId(producer, 0)))
            data += block
        self.store.objects[key], self.store.modified_ms[key] = data, 0
        return blocks

    def put_one_of(self, producer: int, first: int) -> list[UnitBlock]:
        """Store an object with one block of a producer, with this first sequence."""
        self.held += 1
        key, block = f"held/{self.held}", block_of(self.topic, first, [b"value"], producer=producer)
        self.store.objects[key], self.store.modified_ms[key] = block, 0
        return [UnitBlock(key, 0, len(block), HoldId(producer, first))]

    def unit(self, number: int, blocks: list[UnitBlock], *, behind: int = 0, shard: int = SHARD) -> IncomingUnit:
        return IncomingUnit(shard, number, behind, blocks)

    async def take(self, number: int, blocks: list[UnitBlock], *, behind: int = 0, shard: int = SHARD) -> None:
        await take_unit(self.processor, self.unit(number, blocks, behind=behind, shard=shard))

    def start(self, number: int, blocks: list[UnitBlock], *, shard: int = SHARD) -> asyncio.Task[None]:
        """Take a unit in the background."""
        return asyncio.create_task(self.take(number, blocks, shard=shard))

    async def named(self) -> list[tuple[int, int, int]]:
        """Return records, shard and number of each pointer that names a unit."""
        found = await pointers(self.broker, self.topic)
        assert {name.epoch for each in found for name in each.named} <= {0}, "a shard has no instances"
        return [(each.records, name.producer, name.last_sequence) for each in found for name in each.named]

    async def batches(self) -> list[Pointer]:
        return [each for each in await pointers(self.broker, self.topic) if each.records]

    def lost(self) -> int:
        return self.broker.services.counters.lost_held_blocks


def on_target(work: Callable[[Target], Awaitable[None]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test at an owner, without pauses between reads."""
    monkeypatch.setattr(confirmed_reads, "MISSING_CONFIRMED_S", 0.0)
    monkeypatch.setattr(confirmed_reads, "MISSING_LIST_PAUSE_S", 0.0)
    monkeypatch.setattr(confirmed_reads, "PAUSE_S", 0.0)

    async def begin() -> None:
        async with owning() as (broker, _, topic):
            await work(Target(broker, topic))

    run(begin())


def test_a_target_takes_a_unit_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(target: Target) -> None:
        blocks = target.put(2, 1, 3)
        for _ in range(2):
            await target.take(1, blocks)
            assert await target.named() == [(6, SHARD, 1)]
        (pointer,) = await target.batches()
        assert [each.producer for each in pointer.producers] == [100, 101, 102]
        own = target.processor.own
        assert own is not None
        assert [own.producer(producer).next for producer in (100, 101, 102)] == [2, 1, 3]
        await target.take(2, target.put(1))
        await target.take(1, blocks)
        assert await target.named() == [(6, SHARD, 1), (1, SHARD, 2)]
        assert (len(target.processor.ring), target.lost()) == (0, 0)

    on_target(work, monkeypatch)


def test_a_unit_whose_former_one_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(target: Target) -> None:
        with pytest.raises(NotReadyError, match="lacks the unit before 2 of shard 00000000000000ab"):
            await target.take(2, target.put(1))
        await target.take(2, target.put(1), behind=1)  # the log had unit 1 once
        await target.take(3, target.put(1))
        with pytest.raises(NotReadyError, match="lacks the unit before 5"):
            await target.take(5, target.put(1), behind=3)
        with pytest.raises(NotReadyError, match="lacks the unit before 4"):
            await target.take(4, target.put(1), shard=OTHER)
        assert [number for _, _, number in await target.named()] == [2, 3]

    on_target(work, monkeypatch)


def test_a_unit_in_the_ring_is_awaited_and_the_next_one_follows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(target: Target) -> None:
        queue = GatedQueue.close_gate(target.broker.services.queue)
        blocks = target.put(1)
        first = target.start(1, blocks)
        await turns(50)
        assert target.processor.ring.last_unit(SHARD) == 1
        again, second, other = target.start(1, blocks), target.start(2, target.put(2)), target.start(1, [], shard=OTHER)
        await turns(50)
        assert not any(task.done() for task in (first, again, second, other))
        assert target.processor.ring.last_unit(SHARD) == 2
        queue.gate.set()
        await asyncio.gather(first, again, second, other)
        named = await target.named()
        assert sum(records for records, _, _ in named if records) == 3
        assert sorted({(shard, number) for _, shard, number in named if shard == SHARD}) == [(SHARD, 1), (SHARD, 2)]

    on_target(work, monkeypatch)


def test_a_unit_that_the_queue_has_is_answered_while_later_ones_are_on_their_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(target: Target) -> None:
        blocks = target.put(1)
        await target.take(1, blocks)
        queue = GatedQueue.close_gate(target.broker.services.queue)
        second = target.start(2, target.put(1))
        await turns(50)
        async with asyncio.timeout(10):
            await target.take(1, blocks)
        assert not second.done()
        queue.gate.set()
        await second

    on_target(work, monkeypatch)


def test_a_unit_that_is_larger_than_a_slab_has_one_of_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(target: Target) -> None:
        target.broker.services.pool.slab_bytes = 16
        await target.take(1, target.put(2, 3))
        assert await target.named() == [(5, SHARD, 1)]

    on_target(work, monkeypatch)


def test_two_requests_at_once_add_a_unit_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(target: Target) -> None:
        blocks = target.put(1)
        await asyncio.gather(*(target.start(1, blocks) for _ in range(3)))
        assert await target.named() == [(1, SHARD, 1)]

    on_target(work, monkeypatch)


def test_a_target_that_is_not_open_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(target: Target) -> None:
        services, blocks = target.broker.services, target.put(1)
        services.lost_logs[target.topic.id, 0] = "its log was lost"
        with pytest.raises(LogLostError, match="its log was lost"):
            await target.take(1, blocks)
        services.lost_logs.clear()
        monkeypatch.setattr(taking, "READY_TIMEOUT_S", 0.0)
        opening = unopened(target.broker, target.topic)
        with pytest.raises(NotReadyError, match="is still being opened"):
            await take_unit(opening, target.unit(1, blocks))
        queue = GatedQueue.close_gate(services.queue)
        first = target.start(1, blocks)
        await turns(50)
        again = target.start(1, blocks)
        await turns(50)
        target.processor.fail(MovedError("another owner"))
        target.processor.changed.set()
        for task in (first, again):
            with pytest.raises(MovedError):
                await task
        with pytest.raises(MovedError):
            await target.take(1, blocks)
        queue.gate.set()

    on_target(work, monkeypatch)


def test_a_target_that_drains_takes_no_new_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(target: Target) -> None:
        blocks = target.put(1)
        target.processor.draining = True
        for _ in range(2):
            with pytest.raises(DrainingError):
                await target.take(1, blocks)
            target.processor.ready = _at_once  # type: ignore[method-assign]  # it began to drain meanwhile
        target.processor.draining = False

    on_target(work, monkeypatch)


async def _at_once() -> None:
    return None


def test_a_sealed_target_takes_no_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(target: Target) -> None:
        sealed = msgspec.structs.replace(target.topic, sealed_ms=5, version=target.topic.version + 1)
        target.processor.topic = sealed  # newer than what a refresh of the broker brings meanwhile
        with pytest.raises(NotReadyError, match="is sealed: its delayed records wait until it is unsealed"):
            await target.take(1, target.put(1))

    on_target(work, monkeypatch)


def test_a_target_without_memory_or_room_gives_back_what_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(target: Target) -> None:
        services, processor, blocks = target.broker.services, target.processor, target.put(1, 1)
        leased = services.pool.leased_bytes
        with monkeypatch.context() as patch:
            patch.setattr(type(services.pool), "lease", lambda self, size: None)
            with pytest.raises(ThrottledError, match="no memory for held records"):
                await target.take(1, blocks)
        with monkeypatch.context() as patch:
            patch.setattr(type(processor.ring), "extend_unit", lambda self, runs, unit, now_s: False)
            with pytest.raises(ThrottledError, match=r"the ring of .* is full"):
                await target.take(1, blocks)
            assert services.pool.leased_bytes == leased
        await target.take(1, blocks)
        assert await target.named() == [(2, SHARD, 1)]
        own = processor.own
        assert own is not None
        assert [own.producer(producer).streams for producer in (100, 101)] == [0, 0]

    on_target(work, monkeypatch)


# ---- lost blocks ---------------------------------------------------------------------------------


def test_a_unit_goes_without_its_lost_blocks(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    async def work(target: Target) -> None:
        sound, damaged, gone = target.put(1, 2), target.put(4, 8, 16), target.put(32)
        foreign, short = target.put(64, partition=1), target.put(128)
        target.store.objects[short[0].key] = target.store.objects[short[0].key][:-1]
        data = bytearray(target.store.objects[damaged[0].key])
        data[damaged[1].offset + 50] ^= 1
        target.store.objects[damaged[0].key] = bytes(data)
        del target.store.objects[gone[0].key]
        await target.take(1, [*sound, *damaged, *gone, *foreign, *short])
        assert await target.named() == [(1 + 2 + 4 + 16, SHARD, 1)]
        assert target.lost() == 4

    on_target(work, monkeypatch)
    texts = [each.getMessage() for each in caplog.records if getattr(each, "event", "") == "held-block-lost"]
    assert len(texts) == 4
    assert all("unit 1: block at " in text for text in texts)


def test_a_unit_without_a_sound_block_leaves_its_number_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(target: Target) -> None:
        gone = target.put(1)
        target.store.objects.clear()
        for _ in range(2):
            await target.take(1, gone)
        assert [(records, number) for records, shard, number in await target.named() if shard == SHARD] == [(0, 1)]
        assert target.lost() == 1
        await target.take(2, target.put(1))
        assert (await target.named())[-1] == (1, SHARD, 2)

    on_target(work, monkeypatch)


def test_an_empty_unit_waits_for_the_one_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pointer would say that the queue has both."""

    async def work(target: Target) -> None:
        queue = GatedQueue.close_gate(target.broker.services.queue)
        first = target.start(1, target.put(1))
        await turns(50)
        target.processor.changed.set()  # by an earlier batch
        second = target.start(2, [])
        await turns(50)
        own = target.processor.own
        assert own is not None
        assert own.named.last_unit(SHARD) == 0
        queue.gate.set()
        await asyncio.gather(first, second)
        assert [number for _, shard, number in await target.named() if shard == SHARD] == [1, 2]

    on_target(work, monkeypatch)


def test_an_empty_unit_of_a_lost_epoch_is_not_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(target: Target) -> None:
        queue = GatedQueue.close_gate(target.broker.services.queue)
        first = target.start(1, target.put(1))
        await turns(50)
        second = target.start(2, [])
        await turns(50)
        target.processor.own = other = copy.copy(target.processor.own)
        target.processor.changed.set()
        with pytest.raises(MovedError, match="lost its epoch"):
            await second
        assert other is not None
        assert other.named.last_unit(SHARD) == 0
        first.cancel()
        queue.gate.set()

    on_target(work, monkeypatch)


def test_an_object_that_the_store_lists_and_does_not_find_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(target: Target) -> None:
        blocks, others = target.put(1, 1), target.put(1)
        with pytest.MonkeyPatch.context() as wrong:

            async def missing(key: str, first: int, length: int) -> bytes:
                raise NotFoundError(f"object '{key}' does not exist")

            async def unlisted(prefix: str) -> AsyncIterator[ObjectEntry]:
                for error in [StoreError("away")]:
                    raise error
                yield ObjectEntry(prefix, 0, 0)

            lists, listed = list[str](), target.store.list

            async def once_unlisted(prefix: str) -> AsyncIterator[ObjectEntry]:
                lists.append(prefix)
                async for entry in listed(prefix):
                    if len(lists) > 2:
                        yield entry

            wrong.setattr(target.store, "get_range", missing)
            with pytest.raises(StoreError, match="held/1' was not found for 0 s, and the store lists it"):
                await target.take(1, blocks)
            wrong.setattr(target.store, "list", once_unlisted)
            with pytest.raises(StoreError, match="and the store lists it"):
                await target.take(1, blocks)
            assert (target.lost(), len(lists)) == (0, 3)
            del target.store.objects["held/1"]
            target.store.objects["held/10"] = b"another one"
            target.store.modified_ms["held/10"] = 0
            wrong.setattr(target.store, "list", unlisted)
            with pytest.raises(StoreError, match="away"):
                await target.take(1, blocks)
        assert (target.lost(), await target.named()) == (0, [])
        await target.take(1, [*blocks, *others])
        assert (target.lost(), await target.named()) == (2, [(1, SHARD, 1)])

    on_target(work, monkeypatch)


def test_a_store_that_fails_loses_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(target: Target) -> None:
        blocks = target.put(1, 1)
        failing(target.store, "get_range", *[StoreError("away")] * 20)
        with pytest.raises(StoreError):
            await target.take(1, blocks)
        assert (target.lost(), await target.named()) == (0, [])

    on_target(work, monkeypatch)


@pytest.mark.parametrize("same_producer", [False, True], ids=["of another producer", "of the same transaction"])
def test_a_store_that_answers_with_another_held_block_is_asked_again(
    same_producer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(target: Target) -> None:
        wanted = target.put_one_of(100, 0)
        other = target.put_one_of(100 if same_producer else 101, 1)
        get_range = target.store.get_range
        wrong = [other[0].key]

        async def answer(key: str, offset: int, length: int) -> bytes:
            return await get_range(wrong.pop() if wrong else key, offset, length)

        monkeypatch.setattr(target.store, "get_range", answer)
        await target.take(1, wanted)
        assert not wrong
        (pointer,) = await target.batches()
        assert [(each.producer, list(each.ranges)) for each in pointer.producers] == [(100, [(0, 1)])]
        assert target.lost() == 0

    on_target(work, monkeypatch)


def test_adjacent_blocks_are_read_by_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(target: Target) -> None:
        first, second = target.put(1, 2, 4, 8, 32), target.put(16)
        reads: list[tuple[str, int, int]] = []
        get_range = target.store.get_range

        async def note(key: str, offset: int, length: int) -> bytes:
            reads.append((key, offset, length))
            return await get_range(key, offset, length)

        target.store.get_range = note  # type: ignore[method-assign]
        await target.take(1, [*second, first[0], first[1], first[2], first[4]])
        ends = [each.offset + each.length for each in first]
        assert sorted(reads) == [
            (first[0].key, 0, ends[2]),
            (first[0].key, ends[3], ends[4] - ends[3]),
            (second[0].key, 0, second[0].length),
        ]
        assert await target.named() == [(1 + 2 + 4 + 32 + 16, SHARD, 1)]

    on_target(work, monkeypatch)
