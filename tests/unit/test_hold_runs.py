"""The keeper of held records moves those that are due late into runs, and brings them back (H6). On virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from memq.errors import CorruptDataError, NotFoundError, NotReadyError, StoreError, ThrottledError
from memq.format.blocks.header import Buffer
from memq.format.held_object import HoldId, Target
from memq.format.held_sequences import delayed_sequence
from memq.format.state_log.held_run import HELD_ROWS
from memq.format.state_log.run import open_run
from memq.holds import keeper as keeper_module
from memq.holds import run_keeper
from memq.holds.decisions import HOLDS_MACHINE, HoldState
from memq.holds.machine import HoldMachine
from memq.holds.spilled_holds import BringDecision, MergeDecision, RunDecision
from memq.holds.storing import NewHold
from memq.state_log import run_store
from tests.skipping_loop import run_skipping, skip
from tests.unit.hold_shard import KEY_S, A, B, Shard, on_shard
from tests.unit.instant_log import InstantLog

NEAR_S, FAR_S = 100, 125


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_keeper, "NEAR_S", float(NEAR_S))
    monkeypatch.setattr(run_keeper, "SPILL_HOLDS", 3)
    monkeypatch.setattr(run_keeper, "FANOUT", 3)
    monkeypatch.setattr(run_keeper, "DROPPED_MAX", 3)
    monkeypatch.setattr(run_store, "RUN_BLOCK_HOLDS", 2)


def delayed(shard: Shard, producer: int, due_s: float, target: Target = A) -> NewHold:
    made = shard.new(producer, target, due_s=due_s)
    first = delayed_sequence(made.due_ms)
    return replace(made, id=HoldId(producer, first), next=first + 1)


async def cancel(shard: Shard, *holds: tuple[int, int]) -> list[HoldState | None]:
    """Cancel holds by their producers and due times."""
    return await shard.keeper.cancel([HoldId(producer, delayed_sequence(due_ms)) for producer, due_ms in holds], A)


async def hold(shard: Shard, *dues_s: float, first: int = 1) -> list[int]:
    """Hold a block for each due time, with the next producers; return their due times in Unix ms."""
    new = [delayed(shard, first + number, due_s) for number, due_s in enumerate(dues_s)]
    assert await shard.keeper.hold(new) == [HoldState.HELD] * len(new)
    await skip(0)
    return [each.due_ms for each in new]


def stored_runs(shard: Shard) -> dict[str, list[int]]:
    """Return the producers in the runs that were put, by key."""
    return {
        key: [each.block.id.producer for each in open_run(HELD_ROWS, data)]
        for key, data in shard.store.puts
        if key[:5] == "runs/"
    }


def in_memory(shard: Shard) -> list[int]:
    return sorted(hold.producer for hold in shard.machine.open)


def next_shard(shard: Shard) -> Shard:
    """Return the keeper of the next owner, with the state of a snapshot."""
    machine = HoldMachine()
    machine.restore(shard.machine.snapshot())
    other = Shard(machine, InstantLog({HOLDS_MACHINE: machine}))
    other.store.objects = shard.store.objects
    other.runtime.random.seed(2)  # else its keys are those of the first owner
    return other


def test_holds_that_are_due_late_leave_the_memory_and_come_back_in_time() -> None:
    async def work(shard: Shard) -> None:
        shard.run()
        await hold(shard, 10, 1_000, 300, 400)
        await skip(1)
        assert (in_memory(shard), list(stored_runs(shard).values())) == ([1], [[3, 4, 2]])
        assert shard.keeper.waiting_count == 4
        await skip(190)
        assert in_memory(shard) == [], "the first comes back 100 s before it is due"
        await skip(15)
        assert in_memory(shard) == [3]
        await skip(1_000)
        assert [(target, r, holds) for target, r, holds in shard.units()] == [
            (A, 1, [1]),
            (A, 2, [3]),
            (A, 3, [4]),
            (A, 4, [2]),
        ]
        assert [at_s for at_s, *_ in shard.appended] == [10, 300, 400, 1_000]
        assert (shard.machine.spilled.runs, shard.keeper.waiting_count) == ({}, 0)

    on_shard(work)


def test_few_holds_that_are_due_late_cost_no_object() -> None:
    async def work(shard: Shard) -> None:
        shard.run()
        await hold(shard, 300, FAR_S + 1, FAR_S - 1, 10, 20)
        await skip(1)
        assert (stored_runs(shard), in_memory(shard)) == ({}, [1, 2, 3, 4, 5])
        await hold(shard, 500, first=6)
        await skip(1)
        assert list(stored_runs(shard).values()) == [[2, 1, 6]]
        assert in_memory(shard) == [3, 4, 5]

    on_shard(work)


def test_holds_whose_ids_do_not_say_when_they_are_due_stay_in_memory() -> None:
    """A client of an earlier release counts from 0: no cancel would find its hold in a run."""

    async def work(shard: Shard) -> None:
        shard.run()
        decided = len(shard.log.applied)
        new = [shard.new(producer, A, due_s=500) for producer in range(1, 6)]
        assert await shard.keeper.hold(new) == [HoldState.HELD] * 5
        await skip(20)
        assert (stored_runs(shard), in_memory(shard)) == ({}, [1, 2, 3, 4, 5])
        assert len(shard.log.applied) == decided + 1, "nothing but the holds is decided"

    on_shard(work)


def test_a_cancel_reaches_neither_other_targets_nor_transactions() -> None:
    async def work(shard: Shard) -> None:
        shard.run()
        late = [delayed(shard, producer, 500, B) for producer in (4, 5, 6)]
        new = [shard.new(1), shard.new(2, B), shard.new(3, A, lane="transaction 1"), *late]
        assert await shard.keeper.hold(new) == [HoldState.HELD] * 6
        await skip(1)
        assert len(stored_runs(shard)) == 1
        ids = [each.id for each in new]
        assert await shard.keeper.cancel(ids[1:], A) == [None] * 5
        assert await shard.keeper.cancel(ids[:2], A) == [HoldState.DROPPED, None]
        assert await shard.keeper.cancel(ids[1:2] + ids[3:], B) == [HoldState.DROPPED] * 4

    on_shard(work)


def test_an_operator_learns_the_state_of_a_hold_in_memory_and_in_a_run() -> None:
    async def work(shard: Shard) -> None:
        shard.run()
        dues_ms = await hold(shard, 5, 300, 400, 500)
        await skip(1)
        assert in_memory(shard) == [1]
        ids = [HoldId(producer, delayed_sequence(due_ms)) for producer, due_ms in enumerate(dues_ms, 1)]
        await cancel(shard, (3, dues_ms[2]))
        await shard.keeper.hold([delayed(shard, 9, 2_000)])
        states = [HoldState.HELD, HoldState.HELD, HoldState.DROPPED, HoldState.HELD, None]
        assert [await shard.keeper.state_of(each) for each in (*ids, HoldId(77, ids[0].first))] == states
        held = [HoldState.HELD, HoldState.HELD, None, HoldState.HELD]  # the topic of an ended one is not known
        assert [await shard.keeper.state_of(each, A.topic_id) for each in ids] == held
        assert [await shard.keeper.state_of(each, B.topic_id) for each in ids] == [None] * 4
        await skip(10)
        assert await shard.keeper.state_of(ids[0]) is HoldState.RELEASED
        await skip(100)
        await shard.keeper.hold([delayed(shard, 10, 2_000)])  # forgets what has ended
        assert [await shard.keeper.state_of(each) for each in ids[:3]] == [None, HoldState.HELD, None]

    on_shard(work)


def test_a_hold_in_a_run_is_cancelled() -> None:
    async def work(shard: Shard) -> None:
        shard.run()
        dues_ms = await hold(shard, 300, 400, 500)
        await skip(1)
        one, other = (1, dues_ms[0]), (9, dues_ms[0])
        assert await cancel(shard, one, other, (1, dues_ms[1])) == [HoldState.DROPPED, None, None]
        assert await cancel(shard, (2, dues_ms[1])) == [HoldState.DROPPED]
        assert await cancel(shard, one) == [HoldState.DROPPED]
        assert (shard.keeper.waiting_count, shard.counters.delayed_cancelled_records) == (1, 2)
        await skip(600)
        assert shard.units() == [(A, 1, [3])]

    on_shard(work)


def test_a_cancel_finds_a_hold_whose_run_is_merged_meanwhile() -> None:
    async def work(shard: Shard) -> None:
        shard.run()
        dues_ms = await hold(shard, 300, 400, 500)
        await skip(1)
        await hold(shard, 310, 410, 510, first=4)
        await skip(1)
        shard.log.delay_s = 1
        await hold(shard, 320, 420, 520, first=7)  # the third run: all become one
        shard.log.delay_s = 0.3
        asked = asyncio.create_task(cancel(shard, (1, dues_ms[0])))
        await skip(10)
        assert await asked == [HoldState.DROPPED]
        assert [run.run.level for run in shard.machine.spilled.runs.values()] == [1]
        await skip(600)
        assert sorted(each for _, _, holds in shard.units() for each in holds) == [2, 3, 4, 5, 6, 7, 8, 9]

    on_shard(work)


def test_a_block_in_a_run_that_comes_again_is_not_held_again() -> None:
    async def work(shard: Shard) -> None:
        shard.run()
        await hold(shard, 300, 400, 500)
        await skip(1)
        puts = len(shard.store.puts)
        assert await shard.keeper.hold([delayed(shard, 1, 299)]) == [HoldState.HELD]
        assert (len(shard.store.puts), shard.keeper.waiting_count) == (puts, 3)

    on_shard(work)


def test_runs_of_a_level_become_one_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_store, "OBJECT_HOLDS", 4)

    async def work(shard: Shard) -> None:
        shard.run()
        dues_ms: list[int] = []
        for number in range(3):
            dues_ms = await hold(shard, 300 + number, 400 - 3 * number, 500 + number, first=1 + 3 * number)
            await skip(1)
        assert await cancel(shard, (9, dues_ms[2])) == [HoldState.DROPPED]
        await skip(1)
        found = shard.machine.spilled.runs
        assert [(each.run.level, each.run.count) for each in found.values()] == [(1, 4), (1, 4), (1, 1)]
        written = stored_runs(shard)
        assert [producer for key in found for producer in written[key]] == [1, 4, 7, 8, 5, 2, 3, 6, 9]
        await skip(600)
        assert [holds for _, _, holds in shard.units()] == [[each] for each in (1, 4, 7, 8, 5, 2, 3, 6)]

    on_shard(work)


def test_a_merge_waits_for_that_of_another_service_partition_and_nothing_else_does() -> None:
    async def work(shard: Shard) -> None:
        shard.run()
        await shard.merging.acquire()
        for number in range(3):
            await hold(shard, 130, 140 + number, 500 + number, first=1 + 3 * number)
            await skip(1)
        assert [each.run.level for each in shard.machine.spilled.runs.values()] == [0, 0, 0]
        await skip(30)
        assert in_memory(shard) != []  # those that come due soon are brought meanwhile
        shard.merging.release()
        await skip(run_keeper.TURN_S)
        assert {each.run.level for each in shard.machine.spilled.runs.values()} == {1}
        assert not shard.merging.locked()
        await skip(600)
        assert sum(len(holds) for _, _, holds in shard.units()) == 9

    on_shard(work)


def test_the_next_owner_merges_what_is_left_to_merge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_keeper, "FANOUT", 9)

    async def work() -> None:
        shard = Shard()
        shard.run()
        for number in range(5):
            await hold(shard, 300 + number, 400 - 3 * number, 500 + number, first=1 + 3 * number)
            await skip(1)
        await shard.tasks.stop()
        monkeypatch.setattr(run_keeper, "FANOUT", 2)
        other = next_shard(shard)
        other.run()
        await skip(1)
        found = [each.run for each in other.machine.spilled.runs.values()]
        assert sorted((run.level, run.count) for run in found) == [(0, 3), (2, 12)]
        await skip(600)
        assert sorted(hold for _, _, holds in other.units() for hold in holds) == list(range(1, 16))
        await other.tasks.stop()
        assert (shard.failures, other.failures) == ([], [])

    run_skipping(work())


def test_a_run_with_many_dropped_holds_is_written_without_them() -> None:
    async def work(shard: Shard) -> None:
        shard.run()
        dues_ms = await hold(shard, 300, 400, 500, 600)
        await skip(1)
        await cancel(shard, (1, dues_ms[0]), (2, dues_ms[1]))
        await skip(1)
        assert len(stored_runs(shard)) == 1
        await cancel(shard, (3, dues_ms[2]))
        await skip(1)
        assert list(stored_runs(shard).values()) == [[1, 2, 3, 4], [4]]
        ((key, state),) = shard.machine.spilled.runs.items()
        assert (stored_runs(shard)[key], state.dropped) == ([4], {})
        await cancel(shard, (4, dues_ms[3]))
        assert (shard.keeper.waiting_count, shard.machine.waiting) == (0, {})
        await skip(700)
        assert (shard.units(), shard.machine.spilled.runs) == ([], {})

    on_shard(work)


@pytest.mark.parametrize("error", [NotFoundError("no such key"), StoreError("no answer")])
def test_holds_of_a_run_that_can_not_be_read_wait_and_others_do_not(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(shard: Shard) -> None:
        shard.run()
        dues_ms = await hold(shard, 300, 310, 320)
        await skip(1)
        (lost,) = shard.machine.spilled.runs
        await hold(shard, 330, 340, 350, first=4)
        await skip(1)
        usual = shard.store.get_range

        async def get_range(key: str, first: int, length: int, **more: bool) -> bytes:
            if key == lost:
                raise error
            return await usual(key, first, length, **more)

        monkeypatch.setattr(shard.store, "get_range", get_range)
        await skip(398)
        assert [holds for _, _, holds in shard.units()] == [[4], [5], [6]]
        assert shard.keeper.overdue_s() >= 99
        with pytest.raises(NotReadyError, match="can't be read now"):
            await cancel(shard, (1, dues_ms[0]))
        monkeypatch.setattr(shard.store, "get_range", usual)
        await skip(100)
        assert [hold for _, _, holds in shard.units()[3:] for hold in holds] == [1, 2, 3]
        assert {event for event, _ in shard.events} == {"held-run-retry"}
        assert shard.keeper.overdue_s() == 0

    on_shard(work)


def test_the_next_owner_brings_holds_from_the_runs_that_a_snapshot_names() -> None:
    async def work() -> None:
        shard = Shard()
        shard.run()
        dues_ms = await hold(shard, 300, 400, 500)
        await skip(1)
        await cancel(shard, (1, dues_ms[0]))
        await shard.tasks.stop()
        other = next_shard(shard)
        other.run()
        assert await other.keeper.all_waiting() == {A: (2, dues_ms[1])}
        await skip(600)
        assert other.units() == [(A, 1, [2]), (A, 2, [3])]
        await other.tasks.stop()
        assert (shard.failures, other.failures) == ([], [])

    run_skipping(work())


def test_no_more_holds_are_brought_than_are_released_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_keeper, "AHEAD_HOLDS", 4)

    async def work(shard: Shard) -> None:
        shard.run()
        await hold(shard, *[300 + number for number in range(12)])
        await skip(1)
        assert in_memory(shard) == []
        for _ in range(250):
            await skip(1)
            assert len(shard.machine.open) <= 6, "four, and one block more"
        assert len(shard.machine.open) >= 4
        await skip(100)
        assert [at_s for at_s, *_ in shard.appended] == [300 + number for number in range(12)]

    on_shard(work)


def test_blocks_of_transactions_do_not_keep_holds_in_their_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have no due time, and may stay in memory for long."""
    monkeypatch.setattr(run_keeper, "AHEAD_HOLDS", 4)

    async def work(shard: Shard) -> None:
        shard.run()
        await hold(shard, 300, 301, 302)
        await skip(1)
        await shard.keeper.hold([shard.new(number, lane="1.1") for number in range(11, 16)])
        await skip(310)
        assert [at_s for at_s, *_ in shard.appended] == [300, 301, 302]

    on_shard(work)


def test_a_run_with_fewer_holds_than_its_state_names_is_damaged() -> None:
    async def work(shard: Shard) -> None:
        shard.run()
        await hold(shard, 300, 400, 500)
        await skip(1)
        ((_, state),) = shard.machine.spilled.runs.items()
        await run_store.check_run(run_store.RunReader(shard.store, HELD_ROWS), state.run)
        more = msgspec.structs.replace(state.run, count=4)
        with pytest.raises(CorruptDataError, match="has 3 entries, and its state names 4"):
            await run_store.check_run(run_store.RunReader(shard.store, HELD_ROWS), more)

    on_shard(work)


def test_the_next_due_time_counts_holds_in_runs() -> None:
    async def work(shard: Shard) -> None:
        shard.run()
        dues_ms = await hold(shard, 300, 400, 500)
        other = delayed(shard, 7, 350, B)
        await shard.keeper.hold([other])
        await skip(1)
        assert await shard.keeper.all_waiting() == {A: (3, dues_ms[0]), B: (1, other.due_ms)}
        await cancel(shard, (1, dues_ms[0]))
        assert await shard.keeper.waiting(A.topic_id) == {A: (2, dues_ms[1])}
        (late_ms,) = await hold(shard, 600, first=8)
        assert await shard.keeper.all_waiting() == {A: (3, dues_ms[1]), B: (1, other.due_ms)}
        await cancel(shard, (2, dues_ms[1]), (3, dues_ms[2]))
        assert (await shard.keeper.all_waiting())[A] == (1, late_ms)

    on_shard(work)


def test_holds_stay_in_memory_while_the_store_takes_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(shard: Shard) -> None:
        shard.run()
        usual, errors = shard.store.put, [StoreError("full"), StoreError("full")]

        async def put(key: str, buffers: Sequence[Buffer], checksum: int) -> None:
            await usual(key, buffers, checksum)
            if key.startswith("runs/") and errors:
                raise errors.pop()

        monkeypatch.setattr(shard.store, "put", put)
        await hold(shard, 300, 400, 500)
        await skip(0.1)
        assert in_memory(shard) == [1, 2, 3]
        await skip(30)
        assert (in_memory(shard), len(stored_runs(shard))) == ([], 3)
        assert [event for event, _ in shard.events] == ["held-run-retry"] * 2
        assert len(shard.decisions(RunDecision)) == 1

    on_shard(work)


@pytest.mark.parametrize("wrong", [lambda data: b"other", lambda data: bytes([data[0] ^ 1]) + data[1:]])
def test_a_run_that_is_stored_with_other_bytes_is_not_named(
    wrong: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(shard: Shard) -> None:
        shard.run()
        usual, lies = shard.store.get, [wrong]

        async def get(key: str, **more: bool) -> bytes:
            data = await usual(key, **more)
            return lies.pop()(data) if lies else data

        monkeypatch.setattr(shard.store, "get", get)
        await hold(shard, 300, 400, 500)
        await skip(30)
        first, second = stored_runs(shard)
        assert list(shard.machine.spilled.runs) == [second]
        assert first != second

    on_shard(work)


def test_a_run_that_was_named_late_is_written_again() -> None:
    async def work(shard: Shard) -> None:
        shard.run()
        await hold(shard, 300, 400, 500)
        shard.log.delay_s = KEY_S + 1
        await skip(KEY_S + 1)
        shard.log.delay_s = 0
        await skip(KEY_S + 2)
        first, second = stored_runs(shard)
        assert list(shard.machine.spilled.runs) == [second]
        assert len(shard.decisions(MergeDecision)) == 1
        assert ("held-run-late", f"run '{first}' was named late, and is written again") in shard.events

    on_shard(work)


def test_a_merge_that_takes_too_long_is_tried_again_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(shard: Shard) -> None:
        shard.run()
        put, tries = shard.store.put, 0

        async def slow(key: str, *arguments: Any) -> Any:
            nonlocal tries
            if key.startswith("runs/") and len(shard.machine.spilled.runs) == 3:
                tries += 1
                await skip(KEY_S + 1)
            return await put(key, *arguments)

        monkeypatch.setattr(shard.store, "put", slow)
        for number in range(3):
            await hold(shard, 3_000, 3_001, 3_002, first=1 + 3 * number)
            await skip(1)
        await skip(KEY_S)
        assert (tries, shard.decisions(MergeDecision)) == (1, [])
        await hold(shard, 5, first=20)
        await skip(0)
        assert tries == 1, "each try costs PUTs"
        await skip(1)
        assert tries == 2
        expected = f"3 runs can't be merged, try 1: the store took over {KEY_S:g} s for them"
        assert ("held-run-retry", expected) in shard.events

    on_shard(work)


def test_all_waiting_holds_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_module, "WAITING_MAX", 4)

    async def work(shard: Shard) -> None:
        shard.run()
        await hold(shard, 300, 400, 500, 5)
        await skip(1)
        with pytest.raises(ThrottledError, match="4 delayed records of this service partition wait, 4 are allowed"):
            await hold(shard, 6, first=5)
        await skip(5)
        await hold(shard, 6, first=5)

    on_shard(work)


def test_a_bring_fits_into_a_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_keeper, "DECISION_BYTES", 300)
    monkeypatch.setattr(run_store, "RUN_BLOCK_HOLDS", 8)

    async def work(shard: Shard) -> None:
        shard.run()
        await hold(shard, *[300 + number / 10 for number in range(6)])
        await skip(210)
        brought = [
            sum(len(lane.blocks) for _, lanes in each.objects for lane in lanes)
            for _, each in shard.decisions(BringDecision)
        ]
        assert (max(brought), sum(brought)) == (2, 6)

    on_shard(work)


def test_a_hold_that_moves_into_a_run_while_another_one_is_searched_for_is_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The request has two holds: it finds the first in memory, and reads a run for the second."""

    async def work(shard: Shard) -> None:
        shard.run()
        dues_ms = await hold(shard, 300, 400, 500)
        await skip(1)
        usual = shard.store.get_range

        async def slow(key: str, first: int, length: int, **more: bool) -> bytes:
            await skip(5)
            return await usual(key, first, length, **more)

        monkeypatch.setattr(shard.store, "get_range", slow)
        (due_ms,) = await hold(shard, 600, first=4)
        asked = asyncio.create_task(cancel(shard, (4, due_ms), (1, dues_ms[0])))
        await skip(1)
        await hold(shard, 700, 800, first=5)
        await skip(1)
        assert in_memory(shard) == [], "the first one has moved"
        await skip(60)
        assert await asked == [HoldState.DROPPED, HoldState.DROPPED]
        await skip(1_000)
        assert sorted(each for _, _, holds in shard.units() for each in holds) == [2, 3, 5, 6]

    on_shard(work)


def test_holds_whose_run_was_stored_too_slowly_stay_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(shard: Shard) -> None:
        shard.run()
        put, slow = shard.store.put, [KEY_S + 1]

        async def slowly(key: str, *arguments: Any) -> None:
            if key.startswith("runs/") and slow:
                await skip(slow.pop())
            await put(key, *arguments)

        monkeypatch.setattr(shard.store, "put", slowly)
        await hold(shard, 3_000, 3_001, 3_002)
        await skip(KEY_S + 1.1)
        assert (in_memory(shard), shard.decisions(RunDecision)) == ([1, 2, 3], [])
        text = f"holds that are due late stay in memory, try 1: the store took over {KEY_S:g} s for them"
        assert shard.events == [("held-run-retry", text)]
        await skip(2)
        assert (in_memory(shard), len(shard.decisions(RunDecision))) == ([], 1)

    on_shard(work)
