"""The counters of a keeper: delayed records that begin to wait, come and are cancelled, and their delay."""

from __future__ import annotations

import asyncio

import pytest

from memq.errors import NotReadyError
from memq.format.held_object import HoldId
from memq.holds.decisions import DropDecision, encode_decision
from tests.skipping_loop import LoopClock, skip
from tests.unit.hold_shard import A, B, Shard, on_shard


def test_a_keeper_counts_delayed_records_but_not_those_of_transactions() -> None:
    async def work(shard: Shard) -> None:
        shard.run()
        shard.append_s = 0.5
        twice = shard.new(1, due_s=2)
        await shard.keeper.hold([twice, shard.new(2, B, due_s=3), shard.new(3, due_s=100), shard.new(4, lane="7.1")])
        await shard.keeper.hold([twice])
        assert (shard.counters.delayed_records, shard.keeper.waiting_count) == (3, 3)
        assert (await shard.keeper.all_waiting()).keys() == {A, B}
        await skip(10)
        counters = shard.counters
        assert (counters.delayed_delivered_records, shard.keeper.waiting_count) == (2, 1)
        assert dict(counters.delayed_late_seconds.buckets())["+Inf"] == 2
        assert counters.delayed_late_seconds.sum_s == 1.0, "both targets took half a second"

    on_shard(work)


def test_a_keeper_counts_each_cancelled_record_once() -> None:
    async def work(shard: Shard) -> None:
        shard.run()
        await shard.keeper.hold([shard.new(1), shard.new(2), shard.new(3, due_s=1)])
        both = [HoldId(1, 0), HoldId(2, 0)]
        await asyncio.gather(shard.keeper.cancel(both, A), shard.keeper.cancel(both[:1], A))
        await shard.keeper.cancel([*both, HoldId(9, 0)], A)
        assert shard.counters.delayed_cancelled_records == 2
        await skip(5)
        await shard.keeper.cancel([HoldId(3, 0)], A)  # it was due before
        assert shard.counters.delayed_cancelled_records == 2

    on_shard(work)


def test_a_record_is_overdue_while_the_log_does_not_take_its_release() -> None:
    async def work(shard: Shard) -> None:
        shard.run()
        await shard.keeper.hold([shard.new(1, due_s=2)])
        due_ms = shard.now_ms() + 2_000
        shard.log.delay_s = 300
        await skip(200)
        assert (shard.keeper.overdue_s(), await shard.keeper.all_waiting()) == (198, {A: (1, due_ms)})

    on_shard(work)


def test_a_record_is_overdue_from_its_due_time_until_its_target_has_it() -> None:
    async def work(shard: Shard) -> None:
        await shard.keeper.hold([shard.new(1, due_s=2), shard.new(2, B, due_s=4), shard.new(3, lane="7.1")])
        await skip(1)
        assert shard.keeper.overdue_s() == 0
        await skip(4)
        assert shard.keeper.overdue_s() == 3, "nothing is released yet"
        shard.append_s = 10
        shard.refusals = [NotReadyError("not yet")]
        shard.run()
        await skip(2)
        assert shard.keeper.overdue_s() == 5, "the target does not have its unit yet"
        await skip(30)
        assert (shard.keeper.overdue_s(), shard.counters.delayed_delivered_records) == (0, 2)

    on_shard(work)


def test_a_keeper_counts_a_record_whose_first_cancel_had_no_outcome() -> None:
    async def work(shard: Shard) -> None:
        await shard.keeper.hold([shard.new(1)])
        shard.log.errors = [NotReadyError("not yet")]
        with pytest.raises(NotReadyError):
            await shard.keeper.cancel([HoldId(1, 0)], A)
        assert shard.counters.delayed_cancelled_records == 0
        await shard.keeper.cancel([HoldId(1, 0)], A)
        assert shard.counters.delayed_cancelled_records == 1

    on_shard(work)


def test_a_unit_whose_records_were_cancelled_is_not_overdue() -> None:
    async def work(shard: Shard) -> None:
        await shard.keeper.hold([shard.new(1, due_s=2)])
        shard.append_s = 50
        drop = encode_decision(DropDecision(0, (HoldId(1, 0),)))
        shard.log.before = lambda: shard.machine.apply(drop)  # just before the release counts
        shard.run()
        await skip(20)
        assert [producers for *_, producers in shard.appended] == [[]]
        assert shard.keeper.overdue_s() == 0
        assert await shard.keeper.waiting(A.topic_id) == {}
        assert await shard.keeper.waiting(A.topic_id, undelivered=True) == {A: (0, 0)}
        await skip(40)
        assert await shard.keeper.waiting(A.topic_id, undelivered=True) == {}

    on_shard(work)


def test_the_blocks_of_transactions_are_undelivered_until_the_log_has_them() -> None:
    async def work(shard: Shard) -> None:
        await shard.keeper.hold([shard.new(1, B, lane="7.1"), shard.new(2, A, due_s=100)])
        due_ms = shard.now_ms() + 100_000
        assert await shard.keeper.waiting(B.topic_id) == {}
        assert await shard.keeper.waiting(B.topic_id, undelivered=True) == {B: (0, 0)}
        assert await shard.keeper.waiting(A.topic_id, undelivered=True) == {A: (1, due_ms)}

    on_shard(work)


def test_a_clock_that_is_set_back_makes_no_record_early(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(shard: Shard) -> None:
        await shard.keeper.hold([shard.new(1, due_s=2)])
        shard.append_s = 10
        shard.run()
        await skip(5)
        early_ms = shard.now_ms() - 300_000
        monkeypatch.setattr(LoopClock, "wall_ms", lambda clock: early_ms)
        assert shard.keeper.overdue_s() == 0
        await skip(30)
        counters = shard.counters
        assert (counters.delayed_delivered_records, counters.delayed_late_seconds.sum_s) == (1, 0)

    on_shard(work)
