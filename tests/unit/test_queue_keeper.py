"""The keeper of queue items with a log and a store in memory, on virtual time."""

from __future__ import annotations

import asyncio

import pytest

from memq.errors import (
    CorruptDataError,
    MemqError,
    NotFoundError,
    NotReadyError,
    OutcomeUnknownError,
    StoreError,
    ThrottledError,
)
from memq.holds import storing
from memq.queues import keeper
from memq.queues.decisions import (
    GrantedItems,
    ItemOutcome,
    ItemRanges,
    ItemTerms,
    LeasedItems,
    OutcomeRun,
)
from memq.queues.keeper import EPOCH_GRANTS, STORE_GAP_S
from memq.queues.pop.groups import BeginPopDecision
from tests.skipping_loop import now_s, skip, skipping_runtime
from tests.unit.kept_queues import KEY_S, LEASE_S, PAYLOAD_BYTES, Shard, on_shard


def lease(block: int, grant: int) -> list[LeasedItems]:
    return [LeasedItems(ItemRanges(block, (0, 1)), grant)]


def test_a_worker_that_goes_away_while_its_request_is_decided_keeps_no_item_for_ever() -> None:
    async def work(shard: Shard) -> None:
        await shard.keeper.enqueue([shard.new(1)])
        for request in (shard.dequeue, lambda: shard.keeper.extend(lease(1, shard.machine.last_grant), 4_000)):
            shard.log.delay_s = 1
            asking = asyncio.get_running_loop().create_task(request())
            await skip(0.5)
            asking.cancel()
            await skip(1)
            shard.log.delay_s = 0
            assert await shard.dequeue() == [], "it counts, and the item is leased"
            await skip(LEASE_S)
            (found,) = await shard.dequeue()
            assert found.grant > EPOCH_GRANTS

    on_shard(work)


def test_items_whose_decision_fails_are_free_again() -> None:
    async def work(shard: Shard) -> None:
        await shard.keeper.enqueue([shard.new(1)])
        shard.log.errors.append(OutcomeUnknownError("gone"))
        with pytest.raises(NotReadyError):
            await shard.dequeue()
        (found,) = await shard.dequeue()
        shard.log.errors.append(OutcomeUnknownError("gone"))
        with pytest.raises(NotReadyError):
            await shard.keeper.ack(lease(1, found.grant))
        assert await shard.keeper.ack(lease(1, found.grant)) == (OutcomeRun(ItemOutcome.ACKED, 1),)
        await shard.tasks.stop()
        for refused in (shard.keeper.ack(lease(1, 1)), shard.keeper.cancel([ItemRanges(1, (0, 1))])):
            with pytest.raises(NotReadyError, match="is closed"):
                await refused

    on_shard(work)


def test_an_end_of_the_keeper_ends_the_requests_that_wait_for_it() -> None:
    async def work(shard: Shard) -> None:
        await shard.keeper.enqueue([shard.new(1)])
        shard.log.delay_s = 5
        asking = asyncio.get_running_loop().create_task(shard.dequeue())
        await skip(1)
        await shard.tasks.stop()
        with pytest.raises(NotReadyError, match="was closed"):
            await asking

    on_shard(work)


def test_a_block_that_comes_again_is_stored_once() -> None:
    async def work(shard: Shard) -> None:
        assert shard.begun == 0, "a shard without items has no task"
        block = shard.new(1, count=3)
        await asyncio.gather(shard.keeper.enqueue([block]), shard.keeper.enqueue([block]))
        await shard.keeper.enqueue([block])
        assert (len(shard.store.puts), shard.machine.topics, shard.begun) == (1, {"jobs": 3}, 1)
        (found,) = await shard.dequeue(2)
        assert found.found.items == (GrantedItems(0, 2, 1, b""),)
        assert found.data == block.data

    on_shard(work)


@pytest.mark.parametrize("error", [StoreError("not now"), NotFoundError("404"), CorruptDataError("flipped"), None])
def test_a_wrong_answer_of_the_store_costs_no_item(error: MemqError | None) -> None:
    """None: the store gives the sound bytes of another block."""

    async def work(shard: Shard) -> None:
        other = shard.new(9)
        await shard.keeper.enqueue([shard.new(1)])
        await shard.keeper.enqueue([shard.new(2)])
        shard.keeper = shard.made(epoch=2)  # whose memory has no payloads
        get, refused = shard.store.get_range, shard.machine.blocks[1].key

        wrong = [error, error]

        async def failing(key: str, *place: int) -> bytes:
            if key != refused or not wrong:
                return await get(key, *place)
            if (found := wrong.pop()) is not None:
                raise found
            return bytes(other.data)

        setattr(shard.store, "get_range", failing)  # noqa: B010 - a method is no variable
        (found,) = await shard.dequeue()
        assert found.found.block.id.producer == 2, "one payload that can't be read delays no other"
        assert await shard.dequeue() == []
        await skip(10)
        assert {each.found.block.id.producer for each in await shard.dequeue()} == {1, 2}

    on_shard(work)


@pytest.mark.parametrize("ordered", [False, True])
def test_an_item_whose_object_was_named_too_late_is_granted(ordered: bool) -> None:
    """A second decision names another object (ADR 6); to this one the block is known, and it was not scheduled."""

    async def work(shard: Shard) -> None:
        delay_s = KEY_S + 1
        shard.log.delay_s = delay_s
        terms = ItemTerms(5, LEASE_S * 1_000, 0, 0, key="k" if ordered else "", ordered=ordered)
        sent = asyncio.create_task(shard.keeper.enqueue([shard.new(1, terms=terms)]))
        await skip(delay_s - 0.5)
        shard.log.delay_s = 0.0  # of the next decision
        assert await sent == [1]
        assert len(shard.store.puts) == 2
        assert shard.events == ["held-object-late"]
        assert len(await shard.dequeue()) == 1

    on_shard(work)


def test_the_life_of_a_pop_group_is_random() -> None:
    """Else the ids of its blocks could be guessed, and items enqueued in their place."""

    async def work(shard: Shard) -> None:
        for name in ("clicks@a", "clicks@b"):
            assert await shard.keeper.pop.begin(BeginPopDecision(name, "aa" * 16, LEASE_S * 1_000, 0, ()))
        lives = [each.life for each in shard.machine.pops.groups.values()]
        assert len(set(lives)) == 2
        assert min(lives) > 1_000_000
        assert await shard.keeper.pop.begin(BeginPopDecision("clicks@a", "aa" * 16, LEASE_S * 1_000, 3, ()))
        assert shard.machine.pops.groups["clicks@a"].life == lives[0], "a known group keeps its life"

    on_shard(work)


def test_few_bytes_wait_for_a_gap_between_objects_and_many_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(shard: Shard) -> None:
        shard.store.delay_s = STORE_GAP_S * 20
        sent = []

        async def send(block: int) -> None:
            sent.append(asyncio.get_running_loop().create_task(shard.keeper.enqueue([shard.new(block)])))
            await skip(STORE_GAP_S / 5)

        for block in range(1, 5):
            await send(block)
        assert len(shard.store.puts) == 1, "the first one waits for nothing"
        await skip(STORE_GAP_S)
        assert len(shard.store.puts) == 2, "the others are one object, and do not wait for the first one"
        monkeypatch.setattr(storing, "PROMPT_BYTES", 1)
        await send(5)
        assert len(shard.store.puts) == 3
        await asyncio.gather(*sent)
        assert (len(shard.store.puts), shard.machine.topics) == (3, {"jobs": 5})

    on_shard(work)


def test_a_closed_keeper_refuses_blocks_that_wait_for_a_gap() -> None:
    async def work(shard: Shard) -> None:
        shard.store.delay_s = 1
        loop = asyncio.get_running_loop()
        sent = [loop.create_task(shard.keeper.enqueue([shard.new(1)]))]
        await asyncio.sleep(0)
        sent.append(loop.create_task(shard.keeper.enqueue([shard.new(2)])))
        await skip(STORE_GAP_S / 5)
        await shard.tasks.stop()
        for each in sent:
            with pytest.raises(NotReadyError, match="was closed"):
                await each

    on_shard(work)


def test_payloads_on_their_way_have_a_bound_and_take_the_room_of_recent_ones() -> None:
    async def work(shard: Shard) -> None:
        first = shard.new(1)
        await shard.keeper.enqueue([first])
        assert shard.recent.get(1) == first.data
        shard.store.delay_s = 1
        size = len(first.data)
        many = PAYLOAD_BYTES // size
        sent = [asyncio.get_running_loop().create_task(shard.keeper.enqueue([shard.new(2 + n)])) for n in range(many)]
        await asyncio.sleep(0)
        assert shard.recent.get(1) is None, "it made room"
        with pytest.raises(ThrottledError, match=f"{many * size} bytes of items are on their way"):
            await shard.keeper.enqueue([shard.new(999)])
        await asyncio.gather(*sent)
        await shard.keeper.enqueue([shard.new(999)])
        assert shard.recent.get(999) is not None

    on_shard(work)


def test_a_payload_that_the_store_does_not_give_fails_the_request_and_comes_later() -> None:
    async def work(shard: Shard) -> None:
        await shard.keeper.enqueue([shard.new(1)])
        shard.keeper = shard.made(epoch=2)
        kept = dict(shard.store.objects)
        shard.store.objects.clear()
        with pytest.raises(StoreError, match="can't be read now"):
            await shard.dequeue()
        await skip(5)
        shard.store.objects.update(kept)
        assert await shard.keeper.until_ready(["jobs"], 60)
        (found,) = await shard.dequeue()
        assert (found.found.items[0].attempt, found.grant) == (1, 2 * EPOCH_GRANTS + 1)

    on_shard(work)


def test_an_item_whose_object_is_gone_is_dead_after_many_answers() -> None:
    async def work(shard: Shard) -> None:
        await shard.keeper.enqueue([shard.new(1)])
        shard.keeper = shard.made(epoch=2)
        shard.store.objects.clear()
        with pytest.raises(StoreError):
            await shard.dequeue()
        await skip(9)
        assert (await shard.keeper.counts())["jobs"].dead == 0
        await skip(10)
        assert (await shard.keeper.counts())["jobs"].dead == 1
        assert shard.events == ["object-missing", "queue-block-lost"]

    on_shard(work)


def test_the_keeper_ends_items_by_time_and_wakes_those_that_wait() -> None:
    async def work(shard: Shard) -> None:
        terms = ItemTerms(5, LEASE_S * 1_000, 1, 0)
        await shard.keeper.enqueue([shard.new(1), shard.new(2, terms=terms)])
        running = shard.tasks.start(shard.keeper.run(), "run")
        assert len(await shard.dequeue()) == 2
        began_s = now_s()
        assert await shard.keeper.until_ready(["jobs"], 60)
        assert now_s() - began_s == pytest.approx(LEASE_S, abs=0.1)
        await skip(1)
        counts = (await shard.keeper.counts())["jobs"]
        assert (counts.ready, counts.dead) == (1, 1)
        assert not await shard.keeper.until_ready(["other"], 3)
        assert not running.done()

    on_shard(work)


def test_ends_that_fail_are_decided_again() -> None:
    async def work(shard: Shard) -> None:
        ends_ms = skipping_runtime().clock.wall_ms() + LEASE_S * 1_000
        expires, last = ItemTerms(5, LEASE_S * 1_000, 0, ends_ms), ItemTerms(5, LEASE_S * 1_000, 1, 0)
        await shard.keeper.enqueue([shard.new(1, terms=last)])
        await shard.dequeue()
        await shard.keeper.enqueue([shard.new(2, terms=expires)])
        await skip(LEASE_S)
        shard.log.errors.append(ThrottledError("later"))
        shard.tasks.start(shard.keeper.run(), "run")
        await skip(LEASE_S)
        assert shard.machine.totals == {"expired": 1, "dead": 1}

    on_shard(work)


def test_many_items_end_without_a_pause() -> None:
    async def work(shard: Shard) -> None:
        ends_ms = skipping_runtime().clock.wall_ms() + LEASE_S * 1_000
        terms = ItemTerms(5, LEASE_S * 1_000, 0, ends_ms)
        await shard.keeper.enqueue([shard.new(block, count=1_000, terms=terms) for block in (1, 2, 3)])
        shard.tasks.start(shard.keeper.run(), "run")
        await skip(LEASE_S + 0.5)
        assert shard.machine.totals == {"expired": 3_000}

    on_shard(work)


def test_few_ends_are_known_while_many_blocks_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "ENDED_BLOCKS_MAX", 3)

    async def work(shard: Shard) -> None:
        for block in range(1, 11):
            await shard.keeper.enqueue([shard.new(block)])
            await skip(0.01)
            (found,) = await shard.dequeue()
            await shard.keeper.ack(lease(block, found.grant))
        assert shard.machine.ended_blocks <= 4, "the enqueue that finds more lets the older ones go"

    on_shard(work)


def test_items_of_an_ordered_key_have_times_of_their_own_for_a_restore() -> None:
    async def work(shard: Shard) -> None:
        terms = ItemTerms(5, LEASE_S * 1_000, 0, 0, "k", ordered=True)
        await shard.keeper.enqueue([shard.new(block, terms=terms) for block in (3, 2, 1)])
        dues_ms = [shard.machine.blocks[block].block.due_ms for block in (3, 2, 1)]
        assert dues_ms == sorted(set(dues_ms))

    on_shard(work)
