"""Runs of queue items at the owner of a shard: blocks move, come back in order, and are found by requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from memq.errors import CorruptDataError, MemqError, NotFoundError, NotReadyError, OutcomeUnknownError, StoreError
from memq.format.blocks.header import Buffer
from memq.format.state_log.queue_run import QUEUE_ROWS, QueueRunEntry
from memq.format.state_log.run import RunWriter
from memq.queues.decisions import (
    ItemOutcome,
    ItemRanges,
    ItemTerms,
    LeasedItems,
    OutcomeRun,
    decode_decision,
    encode_decision,
)
from memq.queues.grants.repeats import Delivered
from memq.queues.keeper import NO_BLOCK, WHOLE_ANSWER
from memq.queues.runs import keeper as runs
from memq.queues.runs.spilled import BringBlocksDecision, QueueLane, SpillBlocksDecision, bytes_of
from tests.skipping_loop import skip
from tests.unit.keeper_shard import KEY_S, LEASE_S, Shard, on_shard

ITEMS = 2  # of a block
BLOCKS = 60


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make runs of few blocks."""
    for name, value in {"KEEP_ITEMS": 8, "RUN_BLOCKS": 10, "AHEAD_ITEMS": 6, "BRING_ITEMS": 8}.items():
        monkeypatch.setattr(runs, name, value)


def on_full(work: Callable[[Shard], Awaitable[None]]) -> None:
    """Run a test on a shard whose blocks are in runs."""

    async def full(shard: Shard) -> None:
        start(shard)
        for block in range(1, BLOCKS + 1):
            await shard.keeper.enqueue([shard.new(block, count=ITEMS)])
        await skip(2)
        assert len(shard.machine.spilled.runs) == 5
        await work(shard)
        check(shard)

    on_shard(full)


def start(shard: Shard) -> None:
    shard.tasks.start(shard.keeper.run(), "run")


def check(shard: Shard) -> None:
    """Each block is in memory or in one run, and the counts have all of them."""
    machine = shard.machine
    in_runs = [id_ for run in machine.spilled.runs.values() for id_ in run.ids]
    assert len(set(in_runs)) == len(in_runs)
    assert not set(in_runs) & set(machine.blocks)
    left = sum(block.left for block in machine.blocks.values()) + ITEMS * len(in_runs)
    assert (machine.items, machine.topics.get("jobs", 0)) == (left, left)


def decisions(shard: Shard, kind: type) -> int:
    return sum(isinstance(decode_decision(body), kind) for _, body in shard.log.applied)


async def take(shard: Shard, count: int = 10) -> list[int]:
    """Lease and ack items; return their blocks in order."""
    found = await shard.dequeue(count)
    for each in found:
        ranges = tuple(bound for run in each.found.items for bound in (run.begin, run.end))
        await shard.keeper.ack([LeasedItems(ItemRanges(each.found.block.id.producer, ranges), each.grant)])
    return [each.found.block.id.producer for each in found for run in each.found.items for _ in range(*run[:2])]


async def drain(shard: Shard, pause_s: float = 0.0) -> list[int]:
    """Take all items, with a pause after each request."""
    found: list[int] = []
    while some := await take(shard):
        found += some
        await skip(pause_s)
    return found


ALL = [block for block in range(1, BLOCKS + 1) for _ in range(ITEMS)]


@pytest.mark.parametrize("pause_s", [0.0, 1.0])
def test_all_items_come_once_and_in_their_order(pause_s: float) -> None:
    async def work(shard: Shard) -> None:
        assert await drain(shard, pause_s) == ALL
        assert (shard.machine.spilled.runs, shard.machine.items, shard.events) == ({}, 0, [])

    on_full(work)


def test_a_dequeue_waits_for_no_run_while_items_are_ahead() -> None:
    async def work(shard: Shard) -> None:
        get = shard.store.get_range
        reads: list[str] = []

        async def slow(key: str, offset: int, length: int) -> bytes:
            reads.append(key)
            await skip(1)
            return await get(key, offset, length)

        shard.store.get_range = slow  # type: ignore[method-assign]
        began_s = asyncio.get_running_loop().time()
        found = [await take(shard, 2) for _ in range(4)]
        await skip(0.1)
        assert asyncio.get_running_loop().time() - began_s < 0.5
        assert [block for some in found for block in some] == ALL[:8]
        assert reads
        assert await take(shard, 2) == [5, 5], "nothing else is ready"

    on_full(work)


def test_a_new_owner_opens_runs_and_brings_them_in_order() -> None:
    async def work(shard: Shard) -> None:
        first = await take(shard, 6)
        state = shard.machine.snapshot()
        await shard.tasks.stop()
        again = Shard()
        again.machine.restore(state)
        again.store = shard.store
        again.keeper = again.made(epoch=2)
        start(again)
        assert len(again.machine.blocks) < 20
        assert first + await drain(again) == ALL
        await again.tasks.stop()

    on_full(work)


def test_items_in_runs_are_found_by_their_ids() -> None:
    async def work(shard: Shard) -> None:
        assert 30 not in shard.machine.blocks
        seen = await shard.keeper.get([(30, 1), (31, 0), (99, 0)])
        assert [(each.item, each.state) for each in seen.items] == [((30, 1), "ready"), ((31, 0), "ready")]
        assert set(seen.blocks) == {30, 31}
        items = [ItemRanges(40, (0, 2)), ItemRanges(41, (1, 2)), ItemRanges(30, (0, 1)), ItemRanges(99, (0, 1))]
        outcomes = await shard.keeper.cancel(items)
        assert outcomes == (OutcomeRun(ItemOutcome.CANCELLED, 4), OutcomeRun(ItemOutcome.UNKNOWN, 1))
        await shard.keeper.enqueue([shard.new(50, count=ITEMS)])
        check(shard)
        gone = [40, 40, 41, 30]
        expected = ALL.copy()
        for each in gone:
            expected.remove(each)
        assert await drain(shard) == expected

    on_full(work)


def test_a_block_that_moves_while_it_is_cancelled_is_found_again() -> None:
    async def work(shard: Shard) -> None:
        start(shard)
        for block in range(1, 30):
            await shard.keeper.enqueue([shard.new(block, count=ITEMS)])
            if block == 18:
                shard.log.delay_s = 0.5
        cancelling = asyncio.get_running_loop().create_task(shard.keeper.cancel([ItemRanges(9, (0, 2))]))
        assert await cancelling == (OutcomeRun(ItemOutcome.CANCELLED, 2),)
        shard.log.delay_s = 0
        assert 9 not in await drain(shard)

    on_shard(work)


def test_counts_have_the_items_in_runs() -> None:
    async def work(shard: Shard) -> None:
        counts = (await shard.keeper.counts())["jobs"]
        assert (counts.ready, counts.delayed, counts.oldest_ms) == (BLOCKS * ITEMS, 0, 1)
        assert await shard.keeper.counts("other") == {}

    on_full(work)


def test_a_peek_brings_blocks_of_a_run() -> None:
    async def work(shard: Shard) -> None:
        seen = await shard.keeper.peek("jobs", 14)
        assert [each.item[0] for each in seen.items] == ALL[:14]

    on_full(work)


@pytest.mark.parametrize("error", [StoreError("not now"), NotFoundError("404"), CorruptDataError("flipped")])
def test_a_run_that_cannot_be_read_delays_its_own_items_only(error: MemqError) -> None:
    async def work(shard: Shard) -> None:
        get, is_broken = shard.store.get_range, True
        first = min(shard.machine.spilled.runs.values(), key=lambda run: run.head).run

        async def broken(key: str, offset: int, length: int) -> bytes:
            if key == first.key and is_broken:
                raise error
            return await get(key, offset, length)

        shard.store.get_range = broken  # type: ignore[method-assign]
        some = await drain(shard)
        assert len(some) == len(ALL) - ITEMS * 10
        assert sorted(some) == some
        with pytest.raises(NotReadyError, match="can't be read now"):
            await shard.keeper.get([(next(iter(shard.machine.spilled.runs[first.key].ids)), 0)])
        assert set(shard.events) == {"queue-run-retry"}
        is_broken = False
        await skip(40)
        assert sorted(some + await drain(shard)) == ALL

    on_full(work)


def test_blocks_stay_in_memory_while_the_store_takes_no_run() -> None:
    async def work(shard: Shard) -> None:
        put, left = shard.store.put, 2

        async def full(key: str, buffers: Sequence[Buffer], checksum: int) -> None:
            nonlocal left
            if key.startswith("runs/") and left:
                left -= 1
                raise StoreError("full")
            await put(key, buffers, checksum)

        shard.store.put = full  # type: ignore[method-assign]
        start(shard)
        for block in range(1, 31):
            await shard.keeper.enqueue([shard.new(block, count=ITEMS)])
        await skip(0.1)
        assert (len(shard.machine.blocks), shard.events) == (30, ["queue-run-retry"])
        await skip(30)
        assert (len(shard.machine.blocks), left) == (10, 0)
        assert await drain(shard) == ALL[:60]

    on_shard(work)


def test_a_run_that_is_named_late_is_brought_back_at_once() -> None:
    async def work(shard: Shard) -> None:
        propose, late = shard.log.propose, list[str]()

        async def slow(name: str, body: bytes) -> object:
            decision = decode_decision(body)
            if isinstance(decision, SpillBlocksDecision) and not late:
                late.append(decision.run.key)
                await skip(KEY_S + 1)
            return await propose(name, body)

        shard.log.propose = slow  # type: ignore[method-assign,assignment]
        start(shard)
        for block in range(1, 25):
            await shard.keeper.enqueue([shard.new(block, count=ITEMS)])
        await skip(KEY_S + 3)
        assert shard.events == ["queue-run-late"]
        assert late[0] not in shard.machine.spilled.runs
        check(shard)
        assert await drain(shard) == ALL[:48]

    on_shard(work)


def test_blocks_of_a_decision_whose_answer_was_lost_are_scheduled() -> None:
    async def work(shard: Shard) -> None:
        found = await take(shard, 4)
        await skip(1)
        machine, propose = shard.machine, shard.log.propose

        async def lost(name: str, body: bytes) -> object:
            answer = await propose(name, body)
            if isinstance(decode_decision(body), BringBlocksDecision):
                shard.log.propose = propose  # type: ignore[method-assign]
                raise OutcomeUnknownError("gone")
            return answer

        shard.log.propose = lost  # type: ignore[method-assign,assignment]
        found += await drain(shard, 2)
        assert (found, machine.items) == (ALL, 0)

    on_full(work)


def test_requests_that_wait_for_a_run_end_with_the_keeper() -> None:
    async def work(shard: Shard) -> None:
        get = shard.store.get_range

        async def slow(key: str, offset: int, length: int) -> bytes:
            await skip(10)
            return await get(key, offset, length)

        shard.store.get_range = slow  # type: ignore[method-assign]
        asking = asyncio.get_running_loop().create_task(shard.keeper.get([(40, 0)]))
        await skip(1)
        await shard.tasks.stop()
        with pytest.raises(NotReadyError, match="moves"):
            await asking
        with pytest.raises(NotReadyError, match="moves"):
            await shard.keeper.get([(40, 0)])

    on_full(work)


def test_items_that_are_given_back_stay_in_their_order() -> None:
    async def work(shard: Shard) -> None:
        leased: list[Delivered] = await shard.dequeue(6)
        assert [each.found.block.id.producer for each in leased] == [1, 2, 3]
        await skip(LEASE_S + 1)
        assert await drain(shard) == ALL

    on_full(work)


def put_run(shard: Shard, stored: Sequence[int], named: Sequence[int]) -> None:
    """Move the blocks `named` into a run that has the blocks `stored`."""
    known = [shard.machine.blocks[each] for each in stored]
    writer = RunWriter(QUEUE_ROWS)
    writer.add([QueueRunEntry(each.block, each.target, each.key, each.lane, each.arrival) for each in known])
    run, buffers = writer.finish("runs/0", 0, 0)
    shard.store.objects[run.key] = b"".join(buffers)
    decision = SpillBlocksDecision(run, QueueLane("jobs", "", 5), bytes_of(named))
    assert shard.machine.apply(encode_decision(decision)) is True


def test_a_cancel_that_meets_a_block_on_its_way_into_a_run_is_decided_again() -> None:
    async def work(shard: Shard) -> None:
        start(shard)
        for block in (1, 2):
            await shard.keeper.enqueue([shard.new(block, count=ITEMS)])

        def spill() -> None:
            shard.log.before = int
            put_run(shard, [1, 2], [1, 2])

        shard.log.before = spill
        assert await shard.keeper.cancel([ItemRanges(1, (0, 2))]) == (OutcomeRun(ItemOutcome.CANCELLED, 2),)
        assert await drain(shard) == [2, 2]

    on_shard(work)


def test_blocks_that_a_run_lacks_are_not_passed_over() -> None:
    async def work(shard: Shard) -> None:
        start(shard)
        for block in (1, 2, 3):
            await shard.keeper.enqueue([shard.new(block, count=ITEMS)])
        put_run(shard, [1], [1, 2])
        assert await drain(shard) == [3, 3]
        assert shard.machine.is_known(2)
        assert set(shard.events) == {"queue-run-retry"}

    on_shard(work)


def delay_reads(shard: Shard, delay_s: float) -> None:
    get = shard.store.get_range

    async def slow(key: str, offset: int, length: int) -> bytes:
        await skip(delay_s)
        return await get(key, offset, length)

    shard.store.get_range = slow  # type: ignore[method-assign]


def test_items_of_a_run_come_to_a_request_that_comes_again() -> None:
    async def work(shard: Shard) -> None:
        assert len(await take(shard, 8)) == 8
        (first,) = await shard.keeper.dequeue({"jobs": 2}, (), WHOLE_ANSWER, 7)
        assert first.found.block.id.producer == 5, "it was in a run"
        for block in range(100, 150):
            await shard.keeper.enqueue([shard.new(block, count=ITEMS)])
        await skip(2)
        assert len(shard.machine.spilled.runs) > 5
        assert shard.machine.spilled.run_of(5) is None, "a block with a granted item does not move"
        (again,) = await shard.keeper.dequeue_again(7)
        assert (again.grant, again.found.items, again.data) == (first.grant, first.found.items, first.data)
        returned = (OutcomeRun(ItemOutcome.RETURNED, 2),)
        items = [LeasedItems(ItemRanges(5, (0, 2)), first.grant)]
        assert await shard.keeper.nack(items, 0, b"") == returned
        later = [block for block in range(100, 150) for _ in range(ITEMS)]
        assert await drain(shard) == [*ALL[10:], *later, 5, 5], "the nack is the due time"
        assert await shard.keeper.nack(items, 0, b"") == returned, "the outcome of the first one"

    on_full(work)


def test_a_request_that_comes_again_while_it_waits_for_a_run_leases_nothing() -> None:
    async def work(shard: Shard) -> None:
        delay_reads(shard, 0.2)
        assert len(await take(shard, 8)) == 8
        asking = asyncio.get_running_loop().create_task(shard.keeper.dequeue({"jobs": 2}, (), WHOLE_ANSWER, 7))
        await skip(0.1)
        assert await shard.keeper.dequeue_again(7) == []
        assert await asking == []
        assert await take(shard, 2) == [5, 5]

    on_full(work)


def test_a_dequeue_that_may_not_take_the_next_item_brings_no_blocks() -> None:
    async def work(shard: Shard) -> None:
        await shard.keeper.enqueue([shard.new(100, terms=ItemTerms(1, 0, 0, 0))])
        brought = decisions(shard, BringBlocksDecision)
        for _ in range(5):
            assert await shard.keeper.dequeue({"jobs": 1}, (), WHOLE_ANSWER._replace(once_max=0)) == []
        assert decisions(shard, BringBlocksDecision) == brought
        assert await shard.dequeue(1)
        assert await drain(shard) == ALL

    on_full(work)


def test_a_dequeue_with_acks_waits_for_no_run() -> None:
    async def work(shard: Shard) -> None:
        delay_reads(shard, 1)
        assert len(await take(shard, 8)) == 8
        began_s = asyncio.get_running_loop().time()
        assert await shard.keeper.dequeue({"jobs": 2}, reads_runs=False) == []
        assert asyncio.get_running_loop().time() - began_s < 0.1
        assert await drain(shard) == ALL[8:]

    on_full(work)


def test_a_request_about_another_queue_does_not_name_blocks_in_runs() -> None:
    async def work(shard: Shard) -> None:
        items = [LeasedItems(ItemRanges(block, (0, 2)), 0) for block in (1, 30, 99)]
        assert shard.keeper.of_queue("jobs", items) == items
        assert [each.items.block for each in shard.keeper.of_queue("other", items)] == [NO_BLOCK, NO_BLOCK, 99]

    on_full(work)


def test_a_dequeue_that_meets_a_block_on_its_way_into_a_run_leases_it_later() -> None:
    async def work(shard: Shard) -> None:
        start(shard)
        for block in (1, 2, 3):
            await shard.keeper.enqueue([shard.new(block, count=ITEMS)])
        asking = asyncio.get_running_loop().create_task(shard.dequeue(4))
        await asyncio.sleep(0)  # its items are chosen, their payloads are not read
        put_run(shard, [2, 3], [2, 3])
        assert [each.found.block.id.producer for each in await asking] == [1]
        assert await drain(shard) == [2, 2, 3, 3]

    on_shard(work)
