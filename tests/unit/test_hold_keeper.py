"""The keeper of held records takes blocks: objects, decisions, bounds, questions. On virtual time."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Awaitable
from typing import cast

import pytest

from memq.errors import (
    MovedError,
    NotReadyError,
    OutcomeUnknownError,
    StoreError,
    ThrottledError,
)
from memq.format.held_object import HeldBlock, HeldLane, HoldId, IndexedLane, Target, held_object_index
from memq.format.key import held_object_key
from memq.holds import keeper as keeper_module
from memq.holds import storing
from memq.holds.decisions import DropDecision, HoldDecision, HoldState, encode_decision
from memq.holds.storing import (
    BLOCK_COST,
    PLACE_COST,
    STORE_TIMEOUT_S,
    STORES_AT_ONCE,
    NewHold,
)
from tests.skipping_loop import now_s, skip
from tests.unit.hold_shard import KEY_S, WINDOW_MS, A, B, Shard, held, on_shard


def test_a_keeper_stores_blocks_that_arrive_together_in_one_object_and_decides_once() -> None:
    async def work(shard: Shard) -> None:
        await skip(7)
        blocks = [shard.new(1, data=b"one"), shard.new(2, B, data=b"three"), shard.new(3, data=b"7", due_s=5)]
        assert await shard.keeper.hold(blocks) == [HoldState.HELD] * 3
        ((key, data),) = shard.store.puts
        assert data.startswith(b"onethree7")
        lanes = (
            HeldLane(A, "", (HeldBlock(HoldId(1, 0), 1, blocks[0].due_ms, 0, 3), block_at(blocks[2], 8, 1))),
            HeldLane(B, "", (HeldBlock(HoldId(2, 0), 1, blocks[1].due_ms, 3, 5),)),
        )
        assert held_object_index(data) == tuple(IndexedLane(each.target, each.lane, each.blocks) for each in lanes)
        ((_, decision),) = shard.decisions(HoldDecision)
        assert decision == HoldDecision(key, shard.now_ms() - WINDOW_MS, lanes)

    on_shard(work)


def block_at(new: NewHold, offset: int, length: int) -> HeldBlock:
    return HeldBlock(new.id, new.next, new.due_ms, offset, length)


def test_a_block_that_comes_again_is_not_stored_again() -> None:
    async def work(shard: Shard) -> None:
        shard.log.delay_s = 1
        new = shard.new(1)
        first = asyncio.create_task(shard.keeper.hold([new]))
        await skip(0.5)
        assert await shard.keeper.hold([new, new]) == [HoldState.HELD] * 2, "while it is on its way"
        assert now_s() == 1
        assert await first == [HoldState.HELD]
        assert await shard.keeper.hold([new]) == [HoldState.HELD]
        assert await shard.keeper.cancel([new.id], A) == [HoldState.DROPPED]
        assert await shard.keeper.hold([new]) == [HoldState.DROPPED]
        assert len(shard.store.puts) == 2, "one with the block, one with its cancel"

    on_shard(work)


def test_a_caller_that_gives_up_does_not_take_the_outcome_from_another() -> None:
    async def work(shard: Shard) -> None:
        shard.log.delay_s = 1
        new = shard.new(1)
        first, second = (asyncio.create_task(shard.keeper.hold([new])) for _ in range(2))
        await skip(0.5)
        first.cancel()
        assert await second == [HoldState.HELD]

    on_shard(work)


def test_an_error_that_no_caller_waits_for_is_no_warning() -> None:
    async def work(shard: Shard) -> None:
        warnings: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: warnings.append(context))
        shard.store.delay_s = 1
        shard.store.errors = [StoreError("away")]
        sent = asyncio.create_task(shard.keeper.hold([shard.new(1)]))
        await skip(0.5)
        sent.cancel()
        await skip(1)
        assert shard.store.errors == []
        del sent
        gc.collect()
        assert warnings == []

    on_shard(work)


def test_the_key_of_an_object_has_64_random_bits() -> None:
    class Ones(random.Random):
        def getrandbits(self, k: int) -> int:
            return (1 << k) - 1

    async def work(shard: Shard) -> None:
        shard.runtime.random.__class__ = Ones
        await shard.keeper.hold([shard.new(1)])
        ((key, _),) = shard.store.puts
        assert key == held_object_key("memq", (1 << 64) - 1, shard.now_ms())

    on_shard(work)


def test_a_keeper_stores_a_few_objects_at_once_and_what_arrives_meanwhile_goes_into_the_next() -> None:
    async def work(shard: Shard) -> None:
        await shard.keeper.hold([shard.new(99)])
        shard.store.puts.clear()
        shard.store.delay_s = 1
        sent = []
        for producer in range(STORES_AT_ONCE + 3):
            sent.append(asyncio.create_task(shard.keeper.hold([shard.new(producer)])))
            await asyncio.sleep(0)
        await skip(0.5)
        assert len(shard.store.puts) == STORES_AT_ONCE
        await asyncio.gather(*sent)
        assert len(shard.store.puts) == STORES_AT_ONCE + 1
        assert now_s() == 2
        (last,) = held_object_index(shard.store.puts[-1][1])
        assert [block.id.producer for block in last.blocks] == [4, 5, 6]

    on_shard(work)


def test_a_request_that_meets_a_free_store_waits_for_no_other_one() -> None:
    async def work(shard: Shard) -> None:
        shard.store.delay_s = 1
        for _ in range(STORES_AT_ONCE + 1):
            await asyncio.gather(shard.keeper.hold([shard.new(len(shard.store.puts))]))
        assert now_s() == STORES_AT_ONCE + 1

    on_shard(work)


def test_a_store_that_fails_fails_its_requests_and_the_next_ones_are_stored() -> None:
    async def work(shard: Shard) -> None:
        shard.store.errors = [StoreError("away")]
        new = shard.new(1)
        with pytest.raises(NotReadyError, match="the store does not take held records: StoreError"):
            await shard.keeper.hold([new])
        assert await shard.keeper.hold([new]) == [HoldState.HELD]
        shard.store.delay_s = STORE_TIMEOUT_S + 1
        began_s = now_s()
        with pytest.raises(NotReadyError, match="TimeoutError"):
            await shard.keeper.hold([shard.new(2)])
        assert now_s() - began_s == STORE_TIMEOUT_S

    on_shard(work)


def test_an_unknown_outcome_is_answered_as_not_ready() -> None:
    async def work(shard: Shard) -> None:
        for call in (
            lambda: shard.keeper.hold([shard.new(1)]),
            lambda: shard.keeper.cancel([HoldId(1, 0)], A),
            lambda: shard.keeper.waiting(A.topic_id),
        ):
            shard.log.errors = [OutcomeUnknownError("it may count")]
            with pytest.raises(NotReadyError, match="the outcome is unknown: it may count"):
                await cast(Awaitable[object], call())

    on_shard(work)


def test_bytes_that_wait_have_a_bound_and_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storing, "WAITING_BYTES_MAX", 10)

    async def work(shard: Shard) -> None:
        shard.log.delay_s = 1
        for errors in ([], [MovedError("away")], []):
            shard.log.errors = list(errors)
            first = asyncio.create_task(
                shard.keeper.hold([shard.new(int(now_s()) * 2 + each, data=b"x" * 5) for each in (1, 2)])
            )
            await skip(0.5)
            with pytest.raises(ThrottledError, match="10 bytes of records wait"):
                await shard.keeper.hold([shard.new(99, data=b"x")])
            await asyncio.wait([first])
            assert isinstance(first.exception(), MovedError) is bool(errors)

    on_shard(work)


def test_holds_have_a_bound_with_those_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_module, "HOLDS_MAX", 3)

    async def work(shard: Shard) -> None:
        await shard.keeper.hold([shard.new(1), shard.new(2)])
        shard.log.delay_s = 1
        third = asyncio.create_task(shard.keeper.hold([shard.new(3)]))
        await skip(0.5)
        with pytest.raises(ThrottledError, match="3 delayed records of this service partition are due soon"):
            await shard.keeper.hold([shard.new(4)])
        assert await third == [HoldState.HELD]
        with pytest.raises(ThrottledError):
            await shard.keeper.hold([shard.new(4)])
        await shard.keeper.cancel([HoldId(2, 0)], A)
        assert await shard.keeper.hold([shard.new(4)]) == [HoldState.HELD]

    on_shard(work)


def test_blocks_of_a_request_that_has_room_for_some_are_stored_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They waited until another request had room."""
    monkeypatch.setattr(keeper_module, "HOLDS_MAX", 2)

    async def work(shard: Shard) -> None:
        with pytest.raises(ThrottledError):
            await shard.keeper.hold([shard.new(each) for each in (1, 2, 3)])
        await skip(1)
        assert [shard.machine.state_of(HoldId(each, 0)) for each in (1, 2, 3)] == [HoldState.HELD, HoldState.HELD, None]

    on_shard(work)


def test_a_closed_keeper_refuses_blocks_and_fails_those_that_wait() -> None:
    async def work(shard: Shard) -> None:
        shard.store.delay_s = 1
        sent = [asyncio.create_task(shard.keeper.hold([shard.new(each)])) for each in range(STORES_AT_ONCE)]
        await skip(0.5)
        await shard.tasks.stop()
        for each in sent:
            with pytest.raises(NotReadyError, match="was closed"):
                await each
        with pytest.raises(NotReadyError, match="is closed"):
            await shard.keeper.hold([shard.new(9)])
        shard.keeper.carry_out()

    on_shard(work)


@pytest.mark.parametrize(("delay_s", "objects"), [(KEY_S, 1), (KEY_S + 1, 2)])
def test_an_object_that_was_named_too_late_is_replaced(delay_s: float, objects: int) -> None:
    """The sweep may have deleted it (ADR 6)."""

    async def work(shard: Shard) -> None:
        shard.log.delay_s = delay_s
        sent = asyncio.create_task(shard.keeper.hold([shard.new(1, due_s=10_000)]))
        await skip(delay_s - 0.5)
        shard.log.delay_s = 0.0  # of the next decision
        assert await sent == [HoldState.HELD]
        assert len(shard.store.puts) == objects
        assert list(shard.machine.objects) == [shard.store.puts[-1][0]]
        assert [event for event, _ in shard.events] == ["held-object-late"] * (objects - 1)

    on_shard(work)


def fits(shard: Shard) -> list[int]:
    """Return how many blocks are in each object."""
    return [sum(len(lane.blocks) for lane in held_object_index(data)) for _, data in shard.store.puts]


def test_an_object_takes_blocks_up_to_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storing, "OBJECT_BYTES", 8)

    async def work(shard: Shard) -> None:
        await shard.keeper.hold([shard.new(each, data=b"1234") for each in range(3)])
        await shard.keeper.hold([shard.new(each, data=b"large block") for each in (7, 8)])
        assert fits(shard) == [2, 1, 1, 1]

    on_shard(work)


@pytest.mark.parametrize(("lane", "spare", "sizes"), [("", 0, [4, 1]), ("é.1", 0, [4, 1]), ("é.1", -1, [3, 2])])
def test_a_decision_names_as_many_blocks_as_fit(
    lane: str, spare: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = sum(PLACE_COST + len(each.topic) + len(each.topic_id) + len(lane.encode()) for each in (A, B))
    monkeypatch.setattr(storing, "DECISION_BYTES", names + 4 * BLOCK_COST + spare)

    async def work(shard: Shard) -> None:
        blocks = [shard.new(each, (A, B)[each % 2], lane=lane) for each in range(5)]
        await shard.keeper.hold(blocks)
        assert fits(shard) == sizes

    on_shard(work)


# ---- questions -----------------------------------------------------------------------------------


def test_a_cancel_is_dated_and_answers_for_each_hold() -> None:
    async def work(shard: Shard) -> None:
        await shard.keeper.hold([shard.new(1), shard.new(2)])
        await skip(3)
        assert await shard.keeper.cancel([HoldId(2, 0), HoldId(5, 0)], A) == [HoldState.DROPPED, None]
        ((_, decision),) = shard.decisions(DropDecision)
        assert decision == DropDecision(shard.now_ms(), (HoldId(2, 0), HoldId(5, 0)))
        assert await shard.keeper.cancel([HoldId(2, 0), HoldId(1, 0)], A) == [HoldState.DROPPED] * 2
        counters = shard.counters
        assert (counters.delayed_records, counters.delayed_cancelled_records) == (2, 2), "each once"

    on_shard(work)


def test_the_waiting_records_of_a_topic_are_counted_by_partition_after_a_proof() -> None:
    async def work(shard: Shard) -> None:
        second = Target(A.topic, A.topic_id, 1)
        news = [shard.new(1, due_s=9), shard.new(2, due_s=4), shard.new(3, second), shard.new(4, B)]
        await shard.keeper.hold(news)
        assert await shard.keeper.waiting(A.topic_id) == {A: (2, news[1].due_ms), second: (1, news[2].due_ms)}

        def dropped() -> None:
            shard.machine.apply(encode_decision(DropDecision(0, (HoldId(2, 0), HoldId(3, 0)))))

        shard.log.on_fresh = dropped
        assert await shard.keeper.waiting(A.topic_id) == {A: (1, news[0].due_ms)}

    on_shard(work)


def test_counts_of_all_topics_are_those_after_a_proof() -> None:
    async def work(shard: Shard) -> None:
        shard.log.on_fresh = lambda: held(shard.machine, (1, A, 7))  # known only by then
        assert await shard.keeper.all_waiting() == {}
        await shard.keeper.prove()
        assert await shard.keeper.all_waiting() == {A: (1, 0)}
        shard.log.errors = [OutcomeUnknownError("no answer")]
        with pytest.raises(NotReadyError):
            await shard.keeper.prove()

    on_shard(work)


def test_a_hold_that_counts_before_its_answer_is_counted_without_a_time() -> None:
    async def work(shard: Shard) -> None:
        shard.log.on_fresh = lambda: held(shard.machine, (1, A, shard.now_ms() + 50))
        assert await shard.keeper.waiting(A.topic_id) == {A: (1, 0)}

    on_shard(work)


def test_a_released_hold_of_another_topic_is_unknown_to_those_that_may_not_see_all_topics() -> None:
    async def work(shard: Shard) -> None:
        shard.append_s = 1_000  # the unit stays on its way
        shard.run()
        new = shard.new(1, due_s=1)
        await shard.keeper.hold([new])
        for state in (HoldState.HELD, HoldState.RELEASED):
            assert await shard.keeper.state_of(new.id, A.topic_id) is state
            assert await shard.keeper.state_of(new.id, B.topic_id) is None
            assert await shard.keeper.state_of(new.id) is state
            await skip(5)

    on_shard(work)
