"""The objects of cancelled holds: they are stored before a cancel is answered, so that a restore knows it (S9)."""

from __future__ import annotations

import asyncio

import pytest

from memq.errors import NotReadyError, StoreError
from memq.format.held_object import CANCELLED_LANE, HeldLane, HoldId, held_object_index
from memq.holds.decisions import DropDecision, HoldState
from tests.skipping_loop import now_s, skip
from tests.unit.hold_shard import A, Shard, on_shard


def cancelled(shard: Shard) -> list[list[int]]:
    """Return the producers of the cancelled holds, by object."""
    lanes = [held_object_index(data)[0] for _, data in shard.store.puts]
    return [_producers(lane) for lane in lanes if lane.lane == CANCELLED_LANE]


def _producers(lane: HeldLane) -> list[int]:
    return [block.id.producer for block in lane.blocks]


def test_a_cancel_is_answered_when_the_store_has_it() -> None:
    async def work(shard: Shard) -> None:
        await shard.keeper.hold([shard.new(1), shard.new(2)])
        shard.store.delay_s = 3.0
        began_s = now_s()
        states = await shard.keeper.cancel([HoldId(2, 0), HoldId(7, 0)], A)
        assert (states, now_s() - began_s) == ([HoldState.DROPPED, None], 3.0)
        ((decided_s, _),) = shard.decisions(DropDecision)
        assert decided_s == began_s, "the decision counts before that"
        assert cancelled(shard) == [[2]], "what is not known is not cancelled"

    on_shard(work)


def test_cancels_share_an_object_while_another_one_is_stored() -> None:
    async def work(shard: Shard) -> None:
        await shard.keeper.hold([shard.new(number) for number in range(1, 6)])
        shard.store.delay_s = 1.0
        first = asyncio.create_task(shard.keeper.cancel([HoldId(1, 0)], A))
        await skip(0.5)
        others = [asyncio.create_task(shard.keeper.cancel([HoldId(number, 0)], A)) for number in (2, 3)]
        await skip(0.2)
        others.append(asyncio.create_task(shard.keeper.cancel([HoldId(4, 0)], A)))
        await first
        assert not any(each.done() for each in others)
        assert await asyncio.gather(*others) == [[HoldState.DROPPED]] * 3
        assert cancelled(shard) == [[1], [2, 3, 4]]

    on_shard(work)


def test_a_cancel_that_the_store_does_not_take_is_asked_for_again() -> None:
    async def work(shard: Shard) -> None:
        await shard.keeper.hold([shard.new(1)])
        shard.store.errors = [StoreError("the store is away")]
        with pytest.raises(NotReadyError, match="the store does not take cancelled records"):
            await shard.keeper.cancel([HoldId(1, 0)], A)
        assert shard.machine.state_of(HoldId(1, 0)) is HoldState.DROPPED
        assert await shard.keeper.cancel([HoldId(1, 0)], A) == [HoldState.DROPPED]
        assert cancelled(shard) == [[1], [1]]

    on_shard(work)


def test_a_cancel_at_a_keeper_that_closes_gets_an_error() -> None:
    async def work(shard: Shard) -> None:
        await shard.keeper.hold([shard.new(1), shard.new(2)])
        shard.store.delay_s = 100.0
        waiting = [asyncio.create_task(shard.keeper.cancel([HoldId(number, 0)], A)) for number in (1, 2)]
        await skip(1)
        await shard.tasks.stop()
        for each in (*waiting, asyncio.create_task(shard.keeper.cancel([HoldId(1, 0)], A))):
            with pytest.raises(NotReadyError, match="closed"):
                await each

    on_shard(work)
