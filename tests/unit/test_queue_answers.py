"""Answers about items come from an owner that has proven that it is one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from memq.errors import NotReadyError
from memq.queues import views
from memq.queues.keeper import QueueKeeper
from tests.unit.keeper_shard import Shard, on_shard

QUESTIONS: dict[str, Callable[[QueueKeeper], Awaitable[object]]] = {
    "counts": lambda keeper: keeper.counts(),
    "totals": lambda keeper: keeper.totals(),
    "get": lambda keeper: keeper.get([(1, 0)]),
    "peek": lambda keeper: keeper.peek("jobs", 1),
    "dead": lambda keeper: keeper.dead("jobs", 1, (0, 0)),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_an_owner_without_a_proof_gives_no_answer(question: str) -> None:
    """Another broker may own the shard, and its workers have acked the items meanwhile."""

    async def work(shard: Shard) -> None:
        await shard.keeper.enqueue([shard.new(1)])
        proofs = shard.log.proofs
        await QUESTIONS[question](shard.keeper)
        assert shard.log.proofs == proofs + 1
        shard.log.errors = [NotReadyError("another broker owns it")]
        with pytest.raises(NotReadyError):
            await QUESTIONS[question](shard.keeper)
        assert (await shard.keeper.counts(proven=False))["jobs"].ready == 1

    on_shard(work)


def test_a_count_of_many_blocks_lets_other_work_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "COUNTED_AT_ONCE", 2)

    async def work(shard: Shard) -> None:
        for block in range(1, 6):
            await shard.keeper.enqueue([shard.new(block)])
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        running = asyncio.create_task(other())
        assert (await shard.keeper.counts(proven=False))["jobs"].ready == 5
        running.cancel()
        assert turns == 2, "two blocks at a time"

    on_shard(work)
