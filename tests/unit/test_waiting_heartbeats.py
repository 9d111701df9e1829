"""Heartbeats that wait at the owner of a group: when they are answered, and with which proof. On virtual time."""

from __future__ import annotations

from typing import Any, cast

import pytest

from memq.errors import GenerationFencedError, MemqError, NotReadyError, ThrottledError
from memq.groups import Membership
from memq.groups.coordinator import WAIT_SLACK_MS, GroupCoordinator
from memq.groups.waiting import TICK_MS, WaitingHeartbeat, WaitingHeartbeats
from memq.state_log.state_log import StateLog
from memq.topic import Committed, Position
from tests.skipping_loop import LoopClock, now_s, skip
from tests.unit.test_group_coordinator import F_S, LOGS, SESSION_MS, SESSION_S, Hosted, at, hosted

WAIT_MS = SESSION_MS // 3
WAIT_S = (WAIT_MS - WAIT_SLACK_MS) / 1_000
TICK_S = TICK_MS / 1_000
Found = Membership | MemqError | None


class Waits:
    """The heartbeats of some members of one group, with their answers and the times of these."""

    def __init__(self, made: Hosted) -> None:
        self.made = made
        self.answers: list[tuple[str, float, Found]] = []
        self.worker = made.tasks.start(made.coordinator.run(), "groups")

    def keep(self, member: str, generation: int | None = None, wait_ms: int = WAIT_MS) -> bool:
        known = self.made.generation() if generation is None else generation

        def answer(found: Found) -> None:
            self.answers.append((member, now_s(), found))

        return self.made.coordinator.keep_heartbeat("g", member, known, wait_ms, answer)

    def of(self, member: str) -> list[Found]:
        return [found for name, _, found in self.answers if name == member]


def test_a_heartbeat_waits_for_a_part_of_the_session_and_all_that_end_share_one_proof() -> None:
    async def work(made: Hosted) -> None:
        waits = Waits(made)
        await made.joins("abc")
        await skip(F_S + 1)
        began_s, proofs = now_s(), made.log.proofs
        assert all(waits.keep(member) for member in "abc")
        await skip(WAIT_S - 0.01)
        assert waits.answers == []
        await skip(WAIT_MS / 1_000 - WAIT_S)
        assert [(name, found) for name, _, found in waits.answers] == [("a", None), ("b", None), ("c", None)]
        assert all(time_s - began_s <= WAIT_MS / 1_000 for _, time_s, _ in waits.answers)
        assert made.log.proofs == proofs + 1
        assert waits.keep("a", wait_ms=WAIT_SLACK_MS + 1)
        await skip(3 * TICK_S)
        assert len(waits.of("a")) == 2
        assert made.log.proofs == proofs + 1, "younger than F"

    hosted(work)


def test_a_change_of_a_member_answers_its_heartbeat_at_once_and_no_other_one() -> None:
    async def work(made: Hosted) -> None:
        waits = Waits(made)
        for member in "abcd":
            await made.join(member)
        for member in "abcd":
            known = await made.beat(member)
            await made.beat(member, *known.revoking)
        before = made.generation()
        (given,) = made.machine.membership("g").membership("a").assigned
        await made.coordinator.commit("g", "a", before, at(7, given), 1)
        assert all(waits.keep(member) for member in "bcd")
        began_s = now_s()
        await made.coordinator.leave("g", "a")
        assert made.generation() == before + 1
        ((member, time_s, found),) = waits.answers
        assert time_s == began_s, "without a tick"
        assert isinstance(found, Membership)
        assert found == made.machine.membership("g").membership(member)
        assert (found.generation, given in found.assigned) == (before + 1, True)
        assert found.positions == {given: Committed(Position(given.partition, 7))}
        assert waits.keep(member, before) is False, "it must learn of the change first"
        others = [each for each in "bcd" if each != member]
        assert all(waits.keep(each, before) for each in others), "nothing has changed for them"

    hosted(work)


def test_only_a_heartbeat_of_a_known_member_that_is_heard_in_time_waits() -> None:
    async def work(made: Hosted) -> None:
        waits = Waits(made)
        await made.join("a")
        generation = made.generation()
        assert not waits.keep("b")
        assert not made.coordinator.keep_heartbeat("other", "a", generation, WAIT_MS, cast(Any, None))
        assert not waits.keep("a", generation + 1)
        assert not waits.keep("a", generation - 1), "of a former membership"
        assert not waits.keep("a", wait_ms=WAIT_SLACK_MS)
        made.log.is_owner = False
        assert not waits.keep("a")
        made.log.is_owner = True
        waits.worker.cancel()
        await skip(SESSION_S)
        assert not waits.keep("a"), "it may be dropped by the next decision"
        await made.join("a")
        assert waits.keep("a")
        await made.tasks.stop()
        assert not waits.keep("a")

    hosted(work)


def test_a_heartbeat_counts_as_heard_when_it_comes_and_not_when_it_is_answered() -> None:
    """Its connection may be dead meanwhile: a member that is killed is dropped one session after its last heartbeat."""

    async def work(made: Hosted) -> None:
        waits = Waits(made)
        await made.join("a")
        await skip(1)
        began_s = now_s()
        assert waits.keep("a")
        await skip(SESSION_S - 0.1)
        assert waits.of("a") == [None]
        assert made.members() == ["a"]
        while made.members():
            await skip(0.05)
        assert SESSION_S <= now_s() - began_s <= SESSION_S + 2 * TICK_S

    hosted(work)


def test_a_member_that_waits_again_and_again_stays() -> None:
    async def work(made: Hosted) -> None:
        waits = Waits(made)
        await made.join("a")
        for number in range(20):
            assert waits.keep("a")
            await skip(WAIT_MS / 1_000)
            assert waits.of("a") == [None] * (number + 1)
        assert made.members() == ["a"]

    hosted(work)


def test_a_later_heartbeat_of_a_member_ends_the_wait_of_the_former_one() -> None:
    async def work(made: Hosted) -> None:
        waits = Waits(made)
        await made.join("a")
        assert waits.keep("a")
        await skip(1)
        assert waits.keep("a")
        (found,) = waits.of("a")
        assert isinstance(found, NotReadyError), "the client that still waits asks again; it proves nothing"
        await skip(WAIT_S - 0.5)
        assert len(waits.of("a")) == 1, "the later one has its own end"

    hosted(work)


def test_a_member_that_is_dropped_while_it_waits_learns_of_it() -> None:
    async def work(made: Hosted) -> None:
        waits = Waits(made)
        await made.join("a")
        assert waits.keep("a")
        await made.coordinator.leave("g", "a")
        assert waits.keep("a") is False
        (found,) = waits.of("a")
        assert isinstance(found, GenerationFencedError)

    hosted(work)


@pytest.mark.parametrize("ends", ["log", "stop"])
def test_the_end_of_the_coordinator_answers_all_heartbeats(ends: str) -> None:
    async def work(made: Hosted) -> None:
        waits = Waits(made)
        await made.joins("ab")
        await skip(0.1)
        assert all(waits.keep(member) for member in "ab")
        if ends == "stop":
            await made.tasks.stop()
        else:
            made.log.is_owner = False
            with pytest.raises(NotReadyError):
                await waits.worker
        assert [type(found) for _, _, found in waits.answers] == [NotReadyError, NotReadyError]

    try:
        hosted(work)
    except NotReadyError:
        assert ends == "log", "the host ends the coordinator with it"


def test_without_a_proof_no_heartbeat_is_answered_as_unchanged() -> None:
    async def work(made: Hosted) -> None:
        waits = Waits(made)
        await made.join("a")
        await skip(F_S + 1)
        assert waits.keep("a")
        made.log.errors = [ThrottledError("full")]
        await skip(WAIT_MS / 1_000)
        (found,) = waits.of("a")
        assert isinstance(found, ThrottledError)
        assert waits.keep("a"), "the coordinator works on"
        made.log.delay_s = 5
        await skip(WAIT_MS / 1_000)
        assert len(waits.of("a")) == 1, "the proof is on its way"
        await made.tasks.stop()
        assert isinstance(waits.of("a")[1], NotReadyError)

    hosted(work)


def test_a_change_whose_entry_was_on_its_way_for_over_f_waits_for_another_proof() -> None:
    async def work(made: Hosted) -> None:
        waits = Waits(made)
        await made.join("b")
        await skip(0.1)
        assert waits.keep("b")
        made.log.delay_s, proofs = F_S + 0.05, made.log.proofs

        def at_once() -> None:
            made.log.delay_s = 0

        made.log.before = at_once
        await made.join("c")
        assert waits.answers == []
        await skip(2 * TICK_S)
        (found,) = waits.of("b")
        assert isinstance(found, Membership)
        assert len(found.revoking) == 2
        assert made.log.proofs > proofs

    hosted(work)


def test_each_member_knows_of_the_removal_of_a_deleted_topic() -> None:
    """No hold shows it, so the next heartbeat of each member is answered at once."""

    async def work(made: Hosted) -> None:
        waits = Waits(made)
        await made.join("a")
        before = made.generation()
        assert waits.keep("a")
        await made.coordinator.forget(LOGS[:1])
        (found,) = waits.of("a")
        assert isinstance(found, Membership)
        assert found.assigned == tuple(LOGS[1:])
        assert not waits.keep("a", before)
        assert waits.keep("a", found.generation)

    hosted(work)


def test_members_of_a_former_owner_get_their_assignment_once() -> None:
    async def work(made: Hosted) -> None:
        await made.joins("ab")
        await skip(0.1)
        before = made.generation()
        await made.join("c")
        later = Hosted()
        later.machine.groups = made.machine.groups
        parts = cast(StateLog, later.log), later.machine, LoopClock(), later.tasks
        later.coordinator = GroupCoordinator(*parts, now_s())
        waits = Waits(later)
        assert not waits.keep("a", before)
        assert waits.keep("a")
        await later.tasks.stop()

    hosted(work)


def test_the_waiting_heartbeats_are_one_for_each_member_and_end_in_order() -> None:
    def beat(member: str, until_ms: int) -> WaitingHeartbeat:
        return WaitingHeartbeat("g", member, 1, until_ms, 1, cast(Any, None))

    beats = WaitingHeartbeats()
    first, later, last = beat("a", 100), beat("b", 900), beat("c", 400)
    assert [beats.add(each) for each in (first, later, last)] == [None, None, None]
    replaced = beat("a", 1_000)
    assert beats.add(replaced) is first
    assert (len(beats), beats.take("h", "a"), beats.take_due(499)) == (3, None, [])
    assert beats.take_due(500) == [last]
    assert beats.take_members("g", ["a", "c"]) == [replaced]
    assert (len(beats), beats.take_all(), len(beats), beats.take_due(10_000)) == (1, [later], 0, [])
