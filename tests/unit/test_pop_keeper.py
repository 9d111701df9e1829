"""The keeper of pop groups with a log in memory: reads and ends in several decisions, and room."""

from __future__ import annotations

from typing import TypeVar

import pytest

from memq.queues.decisions import EndPopDecision, ItemState, decode_decision
from memq.queues.pop import keeper
from memq.queues.pop.groups import BeginPopDecision, PopGroup, PopPlace, PopPosition, ReadPopDecision
from memq.queues.pop.keeper import PopBatch, PopBlock
from tests.unit.keeper_shard import LEASE_S, Shard, on_shard

T = TypeVar("T")
QUEUE, TOPIC_ID = "clicks@g", "aa" * 16
RECORDS = 3  # of each block
BEGIN, END = PopPosition(0, 5), PopPosition(0, 6, mark=9)


async def begun(shard: Shard) -> PopGroup:
    await shard.keeper.pop.begin(BeginPopDecision(QUEUE, TOPIC_ID, LEASE_S * 1_000, 0, (BEGIN,)))
    return shard.machine.pops.groups[QUEUE]


def batch_of(group: PopGroup, blocks: int) -> PopBatch:
    found = [PopBlock(number, (number - 1) * RECORDS, RECORDS, 0, 9, b"of a topic") for number in range(1, blocks + 1)]
    return PopBatch(PopPlace(group.life, 0, 5, 9), 3, 1, found, END)


def decisions(shard: Shard, kind: type[T]) -> list[T]:
    found = (decode_decision(body) for _, body in shard.log.applied)
    return [each for each in found if isinstance(each, kind)]


@pytest.mark.parametrize("removed", [False, True])
def test_many_items_end_in_several_decisions_with_the_same_reason(
    removed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "ENDS_AT_ONCE", 2)

    async def work(shard: Shard) -> None:
        pops, group = shard.keeper.pop, await begun(shard)
        assert await pops.read(group, BEGIN, batch_of(group, 3), 0) == END
        assert await pops.end(pops.blocks_of(QUEUE), removed=removed) == 3 * RECORDS
        ends = decisions(shard, EndPopDecision)
        assert len(ends) > 3
        assert {each.removed for each in ends} == {removed}
        assert max(sum(len(lease.items) for lease in each.leases) for each in ends) < 4
        state = ItemState.CANCELLED if removed else ItemState.EXPIRED
        assert {shard.machine.state_of(1, number) for number in range(RECORDS)} == {state}
        assert not pops.blocks_of(QUEUE)

    on_shard(work)


def test_items_of_a_worker_do_not_end_with_those_that_wait() -> None:
    async def work(shard: Shard) -> None:
        pops, group = shard.keeper.pop, await begun(shard)
        await pops.read(group, BEGIN, batch_of(group, 2), 0)
        await shard.keeper.dequeue({QUEUE: 1})
        assert await pops.end(pops.blocks_of(QUEUE), removed=False) == 2 * RECORDS - 1
        assert pops.left(QUEUE) == 1
        assert shard.machine.state_of(1, 0) is ItemState.LEASED, "the first one"

    on_shard(work)


def test_a_batch_without_room_for_all_is_read_in_parts_that_continue_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keeper, "BLOCKS_AT_ONCE", 2)
    monkeypatch.setattr(keeper, "AHEAD_ITEMS", 4 * RECORDS)

    async def work(shard: Shard) -> None:
        pops, group = shard.keeper.pop, await begun(shard)
        batch = batch_of(group, 5)
        within = await pops.read(group, BEGIN, batch, 7)
        assert within == PopPosition(0, 5, 4 * RECORDS, 0)
        assert [each.number for each in pops.blocks_of(QUEUE)] == [1, 2, 3, 4]
        assert not pops.has_room(QUEUE)
        reads = decisions(shard, ReadPopDecision)
        assert [each.lost for each in reads] == [7, 0], "counted once"
        assert await pops.read(group, BEGIN, batch, 0) is None, "the group is elsewhere"
        await pops.end(pops.blocks_of(QUEUE), removed=False)
        assert pops.has_room(QUEUE)

    on_shard(work)


def test_a_batch_with_no_block_moves_the_group() -> None:
    async def work(shard: Shard) -> None:
        pops, group = shard.keeper.pop, await begun(shard)
        assert await pops.read(group, BEGIN, batch_of(group, 0), 0) == END
        assert shard.machine.pops.groups[QUEUE].positions == (END,)
        assert await pops.move(group, END, PopPosition(0, 8))
        assert not await pops.move(group, END, PopPosition(0, 9))

    on_shard(work)
