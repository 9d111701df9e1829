"""The keeper of held records releases what is due, and carries units out in their order. On virtual time."""

from __future__ import annotations

import pytest

from memq.errors import (
    MovedError,
    NotReadyError,
    ThrottledError,
    UnreachableError,
)
from memq.format.held_object import HoldId, Target
from memq.holds import keeper as keeper_module
from memq.holds.decisions import DoneDecision, HoldDecision, HoldState, ReleaseDecision, Unit, encode_decision
from memq.holds.keeper import (
    HOLD_COST,
    THROTTLE_RETRY_S,
    TIMER_S_MAX,
)
from memq.holds.machine import HoldMachine
from memq.holds.storing import PLACE_COST
from memq.runtime.clock import backoff_s
from tests.skipping_loop import LongestWait, LoopClock, run_skipping, skip
from tests.unit.hold_shard import A, B, Shard, held, on_shard


def test_a_record_is_released_at_its_time_and_one_that_comes_later_may_be_due_earlier() -> None:
    async def work(shard: Shard) -> None:
        shard.run()
        await shard.keeper.hold([shard.new(1, due_s=50)])
        await skip(10)
        await shard.keeper.hold([shard.new(2, due_s=5)])
        await skip(60)
        assert shard.appended == [(15, A, 1, [2]), (50, A, 2, [1])]
        assert [(at_s, decision.units) for at_s, decision in shard.decisions(DoneDecision)] == [
            (15, ((A, 1),)),
            (50, ((A, 2),)),
        ]
        assert shard.machine.units == {}
        assert await shard.keeper.cancel([HoldId(1, 0)], A) == [HoldState.RELEASED]
        counters = shard.counters
        assert (counters.delayed_delivered_records, counters.delayed_cancelled_records) == (2, 0)

    on_shard(work)


@pytest.mark.parametrize("others", [0, 1])
def test_a_record_is_released_soon_after_the_wall_clock_was_set_forward(
    monkeypatch: pytest.MonkeyPatch, *, others: int
) -> None:
    """As after the sleep of a machine: its monotonic clock stands still meanwhile."""
    wall_ms, ahead_ms = LoopClock.wall_ms, [0]
    monkeypatch.setattr(LoopClock, "wall_ms", lambda clock: wall_ms(clock) + ahead_ms[0])

    async def work(shard: Shard) -> None:
        shard.run()
        await shard.keeper.hold([shard.new(1, due_s=3_000), *(shard.new(2, B, due_s=9_000) for _ in range(others))])
        await skip(1_000)
        assert shard.appended == []
        ahead_ms[0] = 2_500_000
        await skip(TIMER_S_MAX)
        assert [(target, producers) for _, target, _, producers in shard.appended] == [(A, [1])]

    on_shard(work)


def test_a_new_owner_releases_what_waits_and_carries_out_the_units_of_the_former_one() -> None:
    machine = HoldMachine()

    async def work(_: Shard) -> None:
        shard = Shard(machine)
        now_ms = shard.now_ms()
        held(machine, (1, A, now_ms), (2, A, now_ms), (3, B, now_ms), (4, B, now_ms + 2_000), (5, B, 0))
        units = (Unit(A, 1, (HoldId(1, 0),)), Unit(A, 2, (HoldId(2, 0),)), Unit(B, 1, (HoldId(3, 0),)))
        machine.apply(encode_decision(ReleaseDecision(units)))
        next_owner = Shard(machine)
        next_owner.append_s = 0.5
        next_owner.run()
        await skip(5)
        assert next_owner.appended == [(0, A, 1, [1]), (0, B, 1, [3]), (0.5, A, 2, [2]), (2, B, 2, [4])]
        assert list(machine.open) == [HoldId(5, 0)]
        await next_owner.tasks.stop()

    on_shard(work)


def test_records_of_several_targets_become_one_decision_with_a_unit_for_each() -> None:
    async def work(shard: Shard) -> None:
        await shard.keeper.hold([shard.new(3, B, due_s=2), shard.new(1, due_s=3), shard.new(2, due_s=1)])
        await skip(3)
        shard.run()
        await skip(1)
        assert shard.units() == [(B, 1, [3]), (A, 1, [2, 1])]
        assert len(shard.decisions(ReleaseDecision)) == 1

    on_shard(work)


def test_a_unit_takes_so_many_blocks_and_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_module, "UNIT_BLOCKS_MAX", 4)
    monkeypatch.setattr(keeper_module, "UNIT_BYTES_MAX", 10)

    async def work(shard: Shard) -> None:
        sizes = [1, 1, 1, 1, 5, 5, 20, 1]
        await shard.keeper.hold([shard.new(at, due_s=1 + at, data=b"x" * size) for at, size in enumerate(sizes)])
        await skip(20)
        shard.run()
        await skip(1)
        assert shard.units() == [(A, 1, [0, 1, 2, 3]), (A, 2, [4, 5]), (A, 3, [6]), (A, 4, [7])]
        assert [number for _, _, number, _ in shard.appended] == [1, 2, 3, 4]
        assert len(shard.decisions(ReleaseDecision)) == 1

    on_shard(work)


PLACE = PLACE_COST + len(A.topic) + len(A.topic_id)


@pytest.mark.parametrize(
    ("room", "first"),
    [(3 * HOLD_COST + PLACE, [(A, 3)]), (3 * HOLD_COST + PLACE + 1, [(A, 3), (B, 1)]), (2 * HOLD_COST, [(A, 2)])],
)
def test_a_decision_releases_as_much_as_fits_into_an_entry(
    room: int, first: list[tuple[Target, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "DECISION_BYTES", room)

    async def work(shard: Shard) -> None:
        for target in (A, B):
            await shard.keeper.hold([shard.new(each + 10 * target.partition, target, due_s=1) for each in range(3)])
        await skip(1)
        shard.run()
        await skip(1)
        decisions = [decision.units for _, decision in shard.decisions(ReleaseDecision)]
        assert [(unit.target, len(unit.holds)) for unit in decisions[0]] == first
        assert sorted(producer for _, _, producers in shard.units() for producer in producers) == [0, 1, 2, 10, 11, 12]

    on_shard(work)


def test_a_hold_that_comes_again_with_another_time_is_released_at_that_time() -> None:
    async def work(shard: Shard) -> None:
        shard.run()
        await shard.keeper.hold([shard.new(1, due_s=5)])
        await shard.keeper.cancel([HoldId(1, 0)], A)
        await skip(1)
        await shard.keeper.hold([shard.new(2, due_s=9)])
        shard.machine.apply(encode_decision(HoldDecision("k", shard.now_ms() + 1, ())))  # forgets the end
        await shard.keeper.hold([shard.new(1, due_s=29)])
        await skip(60)
        assert [(at_s, producers) for at_s, _, _, producers in shard.appended] == [(10, [2]), (30, [1])]

    on_shard(work)


def test_a_throttled_release_is_tried_again_soon() -> None:
    async def work(shard: Shard) -> None:
        shard.run()
        await shard.keeper.hold([shard.new(1, due_s=5), shard.new(2, B, due_s=5), shard.new(3, due_s=6)])
        await skip(4)
        shard.log.errors = [ThrottledError("full")] * 2
        await skip(3)
        taken = [(round(at_s, 2), target, number, producers) for at_s, target, number, producers in shard.appended]
        assert taken == [(5 + 2 * THROTTLE_RETRY_S, A, 1, [1]), (5 + 2 * THROTTLE_RETRY_S, B, 1, [2]), (6, A, 2, [3])]

    on_shard(work)


def test_a_record_that_is_cancelled_while_a_release_is_throttled_is_not_expected_again() -> None:
    async def work(shard: Shard) -> None:
        shard.run()
        await shard.keeper.hold([shard.new(1, due_s=5), shard.new(2, due_s=5)])
        await skip(4.95)
        shard.log.errors = [ThrottledError("full")]
        await skip(0.1)
        assert await shard.keeper.cancel([HoldId(1, 0)], A) == [HoldState.DROPPED]
        await skip(1)
        assert shard.units() == [(A, 1, [2])]

    on_shard(work)


def test_a_release_whose_number_a_transaction_took_meanwhile_is_decided_again() -> None:
    """Units of delayed records and of transactions for one target share its numbers."""

    async def work(shard: Shard) -> None:
        shard.run()
        await shard.keeper.hold([shard.new(1, due_s=5), shard.new(2, lane="1.1")])
        await skip(4)
        shard.log.delay_s = 2
        await skip(2)
        shard.machine.release_lane("1.1")  # its decision is before that of the delayed record in the log
        shard.keeper.carry_out()
        await skip(20)
        assert [(number, producers) for _, _, number, producers in shard.appended] == [(1, [2]), (2, [1])]

    on_shard(work)


def test_a_release_whose_number_was_taken_keeps_the_order_of_due_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second unit of the decision counted, and its records came before those of the first one."""
    monkeypatch.setattr(keeper_module, "UNIT_BLOCKS_MAX", 2)

    async def work(shard: Shard) -> None:
        shard.run()
        delayed = [shard.new(producer, due_s=5) for producer in (1, 2, 3, 4, 5)]
        await shard.keeper.hold([*delayed, shard.new(9, lane="7.1")])
        await skip(4)
        shard.log.delay_s = 2
        await skip(2)
        shard.machine.release_lane("7.1")  # its decision is before that of the delayed records in the log
        shard.keeper.carry_out()
        await skip(20)
        assert [(number, producers) for _, _, number, producers in shard.appended] == [
            (1, [9]),
            (2, [1, 2]),
            (3, [3, 4]),
            (4, [5]),
        ]

    on_shard(work)


def test_an_owner_ends_with_its_log() -> None:
    async def run() -> None:
        shard = Shard()
        shard.run()
        await shard.keeper.hold([shard.new(1, due_s=5)])
        shard.log.errors = [MovedError("another owner")]
        await skip(10)
        assert [type(error) for error in shard.failures] == [MovedError]
        await shard.tasks.stop()

    run_skipping(run())


# ---- carrying out --------------------------------------------------------------------------------


def test_the_units_of_a_target_go_one_after_the_other_and_those_of_others_at_once() -> None:
    async def work(shard: Shard) -> None:
        shard.append_s = 10
        shard.run()
        await shard.keeper.hold(
            [shard.new(1, due_s=1), shard.new(2, due_s=2), shard.new(3, due_s=3), shard.new(4, B, due_s=3)]
        )
        await skip(60)
        assert shard.appended == [(1, A, 1, [1]), (3, B, 1, [4]), (11, A, 2, [2]), (21, A, 3, [3])]
        assert [
            (at_s, decision.now_ms - shard.now_ms() + 60_000, decision.units)
            for at_s, decision in shard.decisions(DoneDecision)
        ] == [
            (at_s, at_s * 1_000, ((target, number),))
            for at_s, target, number in ((11, A, 1), (13, B, 1), (21, A, 2), (31, A, 3))
        ]

    on_shard(work)


def test_a_unit_that_its_target_does_not_take_is_tried_again_with_a_growing_pause() -> None:
    async def work(shard: Shard) -> None:
        chance = shard.runtime.random
        shard.runtime.random.__class__ = LongestWait
        shard.refusals = [UnreachableError("away"), TimeoutError(), *[NotReadyError("opens")] * 8]
        shard.run()
        await shard.keeper.hold([shard.new(1, due_s=1)])
        await skip(100)
        times = [at_s for at_s, _, number, _ in shard.appended if number == 1]
        pauses = [backoff_s(chance, tries, base_s=0.05, most_s=2.0) for tries in range(1, 11)]
        assert times == pytest.approx([1 + sum(pauses[:count]) for count in range(11)])
        assert shard.events[0] == (
            "release-retry",
            "unit 1 of topic 'clicks' partition 0, try 1: UnreachableError('away')",
        )
        assert shard.events[-1][1].startswith("unit 1 of topic 'clicks' partition 0, try 10: ")
        assert shard.machine.units == {}

    on_shard(work)


def test_an_error_that_no_target_answers_ends_the_keeper() -> None:
    async def run() -> None:
        shard = Shard()
        shard.refusals = [PermissionError("a fault of the program")]
        shard.run()
        await shard.keeper.hold([shard.new(1, due_s=1)])
        await skip(2)
        assert [type(error) for error in shard.failures] == [PermissionError]
        await shard.tasks.stop()

    run_skipping(run())


def test_units_that_another_machine_released_are_carried_out() -> None:
    async def work(shard: Shard) -> None:
        shard.run()
        await shard.keeper.hold([shard.new(1, lane="1.1"), shard.new(2, B, lane="1.1")])
        await skip(1)
        shard.machine.release_lane("1.1")
        shard.keeper.carry_out()
        shard.keeper.carry_out()
        await skip(1)
        assert shard.appended == [(1, A, 1, [1]), (1, B, 1, [2])]
        assert shard.machine.units == {}

    on_shard(work)


def test_many_units_are_done_by_one_decision_which_is_repeated_when_it_is_throttled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keeper_module, "UNIT_BLOCKS_MAX", 3)
    targets = [Target("clicks", "ab" * 16, number) for number in range(4)]

    async def work(shard: Shard) -> None:
        held(shard.machine, *((number, target, 0) for number, target in enumerate(targets)), lane="1.1")
        shard.machine.release_lane("1.1")
        shard.log.errors = [ThrottledError("full")]
        shard.run()
        await skip(1)
        found = shard.decisions(DoneDecision)
        assert [at_s for at_s, _ in found] == pytest.approx([THROTTLE_RETRY_S] * 2)
        assert [len(decision.units) for _, decision in found] in ([1, 3], [3, 1])
        assert sorted((target.partition, number) for _, decision in found for target, number in decision.units) == [
            (number, 1) for number in range(4)
        ]
        assert shard.machine.units == {}

    on_shard(work)


def test_a_target_whose_units_are_done_begins_with_the_next_number() -> None:
    async def work(shard: Shard) -> None:
        shard.run()
        for producer in range(1, 4):
            await shard.keeper.hold([shard.new(producer, due_s=1)])
            await skip(2)
        assert [(number, producers) for _, _, number, producers in shard.appended] == [(1, [1]), (2, [2]), (3, [3])]

    on_shard(work)


def test_an_owner_whose_log_has_ended_says_done_no_more() -> None:
    async def work(shard: Shard) -> None:
        held(shard.machine, (1, A, 0), lane="1.1")
        shard.machine.release_lane("1.1")
        shard.log.errors = [MovedError("another owner")]
        shard.run()
        await skip(1)
        assert shard.appended == [(0, A, 1, [1])]
        assert shard.decisions(DoneDecision) == []

    on_shard(work)


def test_a_unit_that_is_not_done_yet_is_not_brought_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_module, "UNIT_BLOCKS_MAX", 1)

    async def work(shard: Shard) -> None:
        held(shard.machine, *((producer, A, 0) for producer in range(1, 4)), lane="1.1")
        units = tuple(Unit(A, producer, (HoldId(producer, 0),)) for producer in range(1, 4))
        shard.machine.apply(encode_decision(ReleaseDecision(units[:2])))
        shard.log.delay_s = 1.0
        shard.run()
        await skip(1.5)  # the first is done, and the second on its way to it
        assert list(shard.machine.units[A]) == [2]
        shard.machine.apply(encode_decision(ReleaseDecision(units[2:])))
        shard.keeper.carry_out()
        await skip(20)
        assert [(at_s, number) for at_s, _, number, _ in shard.appended] == [(0, 1), (0, 2), (1.5, 3)]
        assert shard.machine.units == {}

    on_shard(work)


def test_units_are_done_in_their_order_also_after_a_throttled_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Audits take the count of a target as that of all units up to a number."""
    monkeypatch.setattr(keeper_module, "UNIT_BLOCKS_MAX", 3)

    async def work(shard: Shard) -> None:
        for number in range(1, 8):
            held(shard.machine, (number, A, 0), lane=f"1.{number}")
            shard.machine.release_lane(f"1.{number}")
        shard.log.errors = [ThrottledError("full")]
        shard.run()
        await skip(1)
        done = [number for _, decision in shard.decisions(DoneDecision) for _, number in decision.units]
        assert done == list(range(1, 8))

    on_shard(work)


def test_a_unit_that_its_target_has_is_not_overdue_although_it_is_not_done_yet() -> None:
    async def work(shard: Shard) -> None:
        shard.run()
        shard.append_s = 2
        await shard.keeper.hold([shard.new(1, due_s=1)])
        await skip(2.5)
        assert shard.keeper.overdue_s() == 1.5
        shard.log.delay_s = 60
        await skip(1.5)
        assert shard.machine.units[A], "'done' is on its way"
        assert shard.keeper.overdue_s() == 0

    on_shard(work)
