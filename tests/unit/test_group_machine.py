"""The groups of a service partition as a machine: decisions, snapshots, and what a new owner may assume."""

from __future__ import annotations

import asyncio
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memq.errors import (
    CorruptDataError,
    GenerationFencedError,
    InvalidRequestError,
    MovedError,
    NotFoundError,
    NotReadyError,
    OutcomeUnknownError,
    UnsupportedFormatError,
)
from memq.groups import OUTSIDE_GENERATION
from memq.groups import machine as machine_module
from memq.groups.coordinator import GroupCoordinator
from memq.groups.group import Group
from memq.groups.machine import (
    CommitDecision,
    Decision,
    DeleteDecision,
    ForgetDecision,
    GroupMachine,
    ImportDecision,
    MembersDecision,
    PackedPositions,
    RestoredDecision,
    StalePlanError,
    StoredMember,
    copy_of,
    difference,
    encode_decision,
    pack,
    pack_positions,
    portions,
    shared_wanted,
    unpack,
    unpack_positions,
)
from memq.limits import COVERED_MAX
from memq.notification import check_position
from memq.runtime.logs import EventLog
from memq.runtime.tasks import TaskOwner
from memq.topic import Committed, Covered, Position, ReadPartition, Totals
from tests.contract.manual_clock import ManualClock
from tests.contract.state_log_queue import StateLogQueue

SESSION_MS = 8_000
F_MS = 2_000
LOGS = [ReadPartition("clicks", "0a" * 16, number) for number in range(4)]
OTHER = ReadPartition("views", "0b" * 16, 0)


def positions(*offsets: tuple[ReadPartition, int]) -> tuple[PackedPositions, ...]:
    return pack_positions(
        {each: Committed(Position(each.partition, at, 3), Totals(at, 7), mark=9) for each, at in offsets}
    )


def join(machine: GroupMachine, member: str, group: str = "g") -> MembersDecision:
    """Return the decision that lets a member join."""
    before = machine.membership(group)
    after = copy_of(before)
    after.join(member, [*LOGS, OTHER], SESSION_MS, 0)
    return difference(group, before, after)


def commit(machine: GroupMachine, member: str, offset: int, number: int = 0, group: str = "g") -> CommitDecision:
    generation = machine.membership(group).generation
    return CommitDecision(group, member, generation, number, positions((LOGS[0], offset)))


def stored(machine: GroupMachine, group: str = "g") -> dict[ReadPartition, int]:
    return {each: found.position.pointer_offset for each, found in machine.groups[group].positions.items()}


def test_a_machine_applies_a_decision_only_on_the_state_that_it_was_made_on() -> None:
    machine = GroupMachine()
    first, second = join(machine, "a"), join(machine, "b")
    assert machine.apply(encode_decision(first)) is None
    assert isinstance(machine.apply(encode_decision(second)), StalePlanError)
    assert list(machine.membership("g").members) == ["a"]
    assert machine.apply(encode_decision(join(machine, "b"))) is None
    assert list(machine.membership("g").members) == ["a", "b"]


def test_a_machine_stores_a_commit_of_the_holder_in_its_generation_alone() -> None:
    machine = GroupMachine()
    machine.apply(encode_decision(join(machine, "a")))
    assert machine.apply(encode_decision(commit(machine, "a", 5, 1))) is None
    assert stored(machine) == {LOGS[0]: 5}
    old = commit(machine, "a", 6, 2)
    machine.apply(encode_decision(join(machine, "a")))
    for refused in (old, commit(machine, "b", 7), commit(machine, "a", 4, 0, group="unknown")):
        assert isinstance(machine.apply(encode_decision(refused)), GenerationFencedError)
    assert isinstance(machine.apply(encode_decision(commit(machine, "", 8))), GenerationFencedError)
    outside = CommitDecision("g", "", -1, 0, positions((LOGS[0], 8)))
    assert isinstance(machine.apply(encode_decision(outside)), InvalidRequestError)
    assert stored(machine) == {LOGS[0]: 5}
    assert "unknown" not in machine.groups


def test_a_machine_imports_positions_that_are_above_its_own_and_no_lower_generation() -> None:
    machine = GroupMachine()
    low = ImportDecision("g", 7, positions((LOGS[0], 5), (LOGS[1], 6)))
    assert machine.apply(encode_decision(low)) is None
    machine.apply(encode_decision(CommitDecision("g", "", -1, 0, positions((LOGS[0], 8)))))
    for _ in range(2):
        assert machine.apply(encode_decision(low)) is None
        assert (stored(machine), machine.membership("g").generation) == ({LOGS[0]: 8, LOGS[1]: 6}, 7)
    assert machine.apply(encode_decision(ImportDecision("g", 3, positions((LOGS[1], 9))))) is None
    assert (stored(machine), machine.membership("g").generation) == ({LOGS[0]: 8, LOGS[1]: 9}, 7)


def test_a_machine_imports_nothing_into_a_group_with_members() -> None:
    machine = GroupMachine()
    machine.apply(encode_decision(join(machine, "a")))
    refused = machine.apply(encode_decision(ImportDecision("g", 9, positions((LOGS[0], 5)))))
    assert isinstance(refused, InvalidRequestError)
    assert (stored(machine), machine.membership("g").generation) == ({}, 1)


def test_a_machine_keeps_the_number_of_a_commit_that_came_before_a_change_of_members() -> None:
    machine = GroupMachine()
    machine.apply(encode_decision(join(machine, "a")))
    planned = join(machine, "b")  # before the commit, which changes no generation
    assert machine.apply(encode_decision(commit(machine, "a", 5, 7))) is None
    assert machine.apply(encode_decision(planned)) is None
    late = machine.apply(encode_decision(commit(machine, "a", 4, 6)))
    assert isinstance(late, GenerationFencedError)
    assert stored(machine) == {LOGS[0]: 5}


def test_a_group_that_is_made_again_continues_the_generations() -> None:
    machine = GroupMachine()
    for member in "abc":
        machine.apply(encode_decision(join(machine, member)))
    before, after = machine.membership("g"), copy_of(machine.membership("g"))
    assert isinstance(machine.apply(encode_decision(DeleteDecision("g"))), InvalidRequestError)
    for member in "abc":
        after.leave(member, 0)
    machine.apply(encode_decision(difference("g", before, after)))
    last = machine.membership("g").generation
    assert machine.apply(encode_decision(DeleteDecision("g"))) is None
    assert isinstance(machine.apply(encode_decision(DeleteDecision("g"))), NotFoundError)
    machine.apply(encode_decision(join(machine, "a")))
    assert machine.membership("g").generation > last


def test_positions_in_a_deleted_topic_are_forgotten() -> None:
    machine = GroupMachine()
    machine.apply(encode_decision(join(machine, "a")))
    both = CommitDecision("g", "a", machine.membership("g").generation, 1, positions((LOGS[0], 1), (OTHER, 2)))
    machine.apply(encode_decision(both))
    machine.apply(encode_decision(ForgetDecision(pack(LOGS))))
    assert stored(machine) == {OTHER: 2}


@pytest.mark.parametrize("seed", range(20))
def test_a_machine_that_is_restored_answers_and_ends_like_the_one_that_was_saved(seed: int) -> None:
    draw, machine = Random(seed), GroupMachine()
    copies: list[GroupMachine] = []
    for step in range(120):
        if draw.random() < 0.05:
            copy = GroupMachine()
            copy.restore(machine.snapshot())
            copies.append(copy)
        group = draw.choice("gh")
        decisions: list[Decision] = [
            join(machine, draw.choice("abc"), group),
            commit(machine, draw.choice("abc"), step, draw.choice((0, step)), group),
            DeleteDecision(group),
            _left(machine, draw.choice("abc"), group),
            ForgetDecision(pack([draw.choice(LOGS)])),
        ]
        decision = draw.choice(decisions)
        answer = machine.apply(encode_decision(decision))
        for copy in copies:
            assert repr(copy.apply(encode_decision(decision))) == repr(answer)
            assert copy.snapshot() == machine.snapshot()


def _left(machine: GroupMachine, member: str, group: str) -> MembersDecision:
    before: Group = machine.membership(group)
    after = copy_of(before)
    after.leave(member, 0)
    return difference(group, before, after)


def test_a_machine_refuses_bytes_that_are_no_decision_and_states_of_a_newer_memq() -> None:
    machine = GroupMachine()
    for body in (b"", b"\x00", b"{}", encode_decision(DeleteDecision("g"))[:-1]):
        with pytest.raises(CorruptDataError):
            machine.apply(body)
    saved = machine.snapshot()
    with pytest.raises(CorruptDataError):
        machine.restore(saved[:-1])
    newer = saved.replace(b"version\x01", b"version\x03")
    assert newer != saved
    with pytest.raises(UnsupportedFormatError, match="version 3"):
        machine.restore(newer)


# ---- the owner of a log -------------------------------------------------------------------------------


async def opened(queue: StateLogQueue, clock: ManualClock) -> GroupCoordinator:
    return await queue.reopen(clock.monotonic())


def test_a_new_owner_expires_no_member_before_its_session_and_a_quarter() -> None:
    async def work() -> None:
        clock = ManualClock()
        queue = StateLogQueue(clock)
        coordinator = await opened(queue, clock)
        for member in ("silent", "heard", "early"):
            await coordinator.join("g", member, LOGS, SESSION_MS)
        clock.advance(SESSION_MS - 1)
        coordinator = await opened(queue, clock)
        members = (await coordinator.describe("g")).members
        assert sorted(members) == ["early", "heard", "silent"]
        generation = (await coordinator.describe("g")).generation
        clock.advance(100)
        await coordinator.heartbeat("g", "early", generation)  # within F: it does not shorten the first session
        clock.advance(SESSION_MS + F_MS - 101)
        await coordinator.expire()
        assert sorted((await coordinator.describe("g")).members) == ["early", "heard", "silent"]
        await coordinator.heartbeat("g", "heard", generation)
        clock.advance(1)
        await coordinator.expire()
        assert list((await coordinator.describe("g")).members) == ["heard"]
        await queue.close()

    asyncio.run(work())


def test_a_former_owner_answers_no_heartbeat_when_its_proof_is_old() -> None:
    async def work() -> None:
        clock = ManualClock()
        queue = StateLogQueue(clock)
        former = await opened(queue, clock)
        known = await former.join("g", "a", LOGS, SESSION_MS)
        await opened(queue, clock)
        assert await former.heartbeat("g", "a", known.generation) == known  # within F
        clock.advance(F_MS + 1)
        with pytest.raises(MovedError):
            await former.heartbeat("g", "a", known.generation)
        with pytest.raises(MovedError):
            await former.commit("g", "a", known.generation, {LOGS[0]: Committed(Position(0, 1))})
        await queue.close()

    asyncio.run(work())


def test_members_of_a_topic_with_very_many_partitions_fit_into_the_log() -> None:
    async def work() -> None:
        clock = ManualClock()
        queue = StateLogQueue(clock)
        coordinator = await opened(queue, clock)
        logs = [ReadPartition("clicks" * 40, "0a" * 16, number) for number in range(10_000)]
        alone = await coordinator.join("g", "a", logs, SESSION_MS)
        assert alone.assigned == tuple(logs)
        every = {each: Committed(Position(each.partition, (1 << 39) - 1, (1 << 24) - 1)) for each in logs}
        await coordinator.commit("g", "a", alone.generation, every, 1)
        await coordinator.join("g", "b", logs, SESSION_MS)
        known = await coordinator.heartbeat("g", "a", alone.generation)
        assert (len(known.assigned), len(known.revoking)) == (5_000, 5_000)
        assert await coordinator.committed("g", logs) == every
        await queue.close()

    asyncio.run(work())


@given(st.sets(st.tuples(st.sampled_from("ab"), st.integers(0, 20))))
def test_partitions_and_positions_are_packed_without_a_loss(numbers: set[tuple[str, int]]) -> None:
    logs = sorted(ReadPartition("t", topic_id, number) for topic_id, number in numbers)
    assert unpack(pack(reversed(logs))) == logs
    stored = {each: Committed(Position(each.partition, 7, 1), Totals(2, 3), mark=4) for each in logs}
    found = unpack_positions(pack_positions(stored))
    assert found == stored
    assert [each.mark for each in found.values()] == [4] * len(logs)


def test_members_with_the_same_wishes_share_them() -> None:
    machine = GroupMachine()
    for number, name in enumerate(("a", "b")):
        members = {name: StoredMember(SESSION_MS, number + 1, 0, pack(LOGS), ())}
        assert machine.apply(encode_decision(MembersDecision("g", number, number + 1, members))) is None
    copy = GroupMachine()
    copy.restore(machine.snapshot())
    first, second = (each.membership("g").members["a" if each is machine else "b"].wanted for each in (machine, copy))
    assert first is second
    assert first == tuple(LOGS) == shared_wanted([*reversed(LOGS), LOGS[0]])


def test_restored_positions_end_the_generations_of_their_groups() -> None:
    machine = GroupMachine()
    for group in ("g", "h"):
        members = {"m": StoredMember(SESSION_MS, 1, 0, (), ())}
        assert machine.apply(encode_decision(MembersDecision(group, 0, 1, members))) is None
        assert machine.apply(encode_decision(CommitDecision(group, "m", 1, 1, ()))) is None
    moved = {LOGS[0]: Committed(Position(LOGS[0].partition, 3), covered=((0, 1, (1, 2)),))}
    machine.apply(encode_decision(RestoredDecision({"g": pack_positions(moved)})))
    assert (machine.groups["g"].membership, machine.groups["g"].positions) == (Group(2), moved)
    assert machine.membership("h").members.keys() == {"m"}
    machine.apply(encode_decision(RestoredDecision({}, 100, all=True)))
    assert [machine.membership(group) for group in ("g", "h", "new")] == [Group(102), Group(101), Group(100)]
    copy = GroupMachine()
    copy.restore(machine.snapshot())
    assert copy.groups == machine.groups


def test_positions_that_name_many_batches_are_committed_in_several_decisions() -> None:
    async def work() -> None:
        clock = ManualClock()
        queue = StateLogQueue(clock)
        coordinator = await opened(queue, clock)
        logs = [ReadPartition("clicks", "0a" * 16, number) for number in range(300)]
        alone = await coordinator.join("g", "a", logs, SESSION_MS)
        last = (1 << 63) - 1
        covered = tuple((last - writer, last, (last, last) * COVERED_MAX) for writer in range(COVERED_MAX))
        every = {each: Committed(Position(each.partition, 1), covered=covered) for each in logs}
        await coordinator.commit("g", "a", alone.generation, every, 1)
        assert await coordinator.committed("g", logs) == every
        await queue.close()

    asyncio.run(work())


def test_a_portion_of_positions_takes_as_many_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = {each: Committed(Position(each.partition, 1)) for each in LOGS}
    size = 43  # bytes of a position, at most; 27 more for a writer, and 9 for each number
    for room, sizes in ((2 * size, [2, 2]), (2 * size - 1, [1, 1, 1, 1]), (3 * size, [3, 1]), (1, [1, 1, 1, 1])):
        monkeypatch.setattr(machine_module, "PORTION_BYTES_MAX", room)
        found = list(portions(plain))
        assert [len(each) for each in found] == sizes
        assert {partition: at for each in found for partition, at in each.items()} == plain
    covered = {each: Committed(Position(each.partition, 1), covered=((7, 1, (2, 3)),)) for each in LOGS}
    for room, sizes in ((2 * (size + 45), [2, 2]), (2 * (size + 45) - 1, [1, 1, 1, 1])):
        monkeypatch.setattr(machine_module, "PORTION_BYTES_MAX", room)
        assert [len(each) for each in portions(covered)] == sizes
    assert list(portions({})) == [{}]


def test_a_decision_names_only_the_members_that_it_changes() -> None:
    machine = GroupMachine()
    names = []
    for number, partition in enumerate((*LOGS, OTHER)):
        before = machine.membership("g")
        after = copy_of(before)
        after.join(f"m{number}", shared_wanted([partition]), SESSION_MS, SESSION_MS - 1)
        decision = difference("g", before, after)
        names.append(sorted(decision.changed))
        machine.apply(encode_decision(decision))
    assert names == [[f"m{number}"] for number in range(5)]


def test_a_position_that_is_imported_again_changes_nothing() -> None:
    machine = GroupMachine()
    for mark in (7, 8):
        imported = {LOGS[0]: Committed(Position(LOGS[0].partition, 5), mark=mark)}
        machine.apply(encode_decision(ImportDecision("g", 3, pack_positions(imported))))
    assert machine.groups["g"].positions[LOGS[0]].mark == 7


def test_a_snapshot_has_the_tried_records() -> None:
    tried = {
        each: Committed(Position(each.partition, 3), tried=((each.partition, 1),) * each.partition) for each in LOGS
    }
    machine, copy = GroupMachine(), GroupMachine()
    machine.apply(encode_decision(CommitDecision("g", "", OUTSIDE_GENERATION, 0, pack_positions(tried))))
    copy.restore(machine.snapshot())
    assert copy.groups["g"].positions == tried


def test_a_new_member_has_made_no_commit() -> None:
    machine = GroupMachine()
    machine.apply(encode_decision(join(machine, "a")))
    assert machine.membership("g").members["a"].commits == 0
    assert isinstance(machine.apply(encode_decision(DeleteDecision("missing"))), NotFoundError)


@pytest.mark.parametrize(
    "covered",
    [((0, 0, (1,)),), ((-1, 0, ()),), ((0, 0, (1, 1 << 63)),), ((0, 0, (1, 2) * 9),), ((0, 0, ()),) * 9],
)
def test_a_member_can_not_commit_covered_batches_that_are_out_of_bounds(covered: Covered) -> None:
    with pytest.raises(InvalidRequestError, match="covered batches"):
        check_position(LOGS[0], Committed(Position(LOGS[0].partition, 1), covered=covered))


def test_members_that_join_at_once_need_few_decisions() -> None:
    async def work() -> None:
        clock = ManualClock()
        queue = StateLogQueue(clock)
        coordinator = await opened(queue, clock)
        joins = (coordinator.join("g", f"m{number}", LOGS, SESSION_MS) for number in range(40))
        await asyncio.gather(*joins)
        (log,) = queue.logs.values()
        assert len(log.entries) <= 4  # `opened`, the first join, all others
        state = await coordinator.describe("g")
        assert len(state.members) == 40
        assert state.generation <= 3
        await queue.close()

    asyncio.run(work())


def test_a_coordinator_lets_its_client_ask_again_when_an_outcome_is_unknown() -> None:
    """A consumer would end by OutcomeUnknownError, and each request about a group may be repeated."""

    async def unknown(*_: object) -> None:
        raise OutcomeUnknownError("the decision may count, or not")

    async def work() -> None:
        clock = ManualClock()
        log = SimpleNamespace(propose=unknown, fresh=unknown, proved_s=0.0)
        tasks = TaskOwner(lambda error: None, EventLog(clock))
        coordinator = GroupCoordinator(cast(Any, log), GroupMachine(), clock, tasks, 0.0)
        for asked in (
            coordinator.join("g", "a", LOGS, SESSION_MS),
            coordinator.heartbeat("g", "a", 1),
            coordinator.commit("g", "a", 1, {LOGS[0]: Committed(Position(0, 1))}),
            coordinator.committed("g", LOGS),
            coordinator.leave("g", "a"),
            coordinator.delete_group("g"),
        ):
            with pytest.raises(NotReadyError, match="the outcome is unknown"):
                await asked
        await tasks.stop()

    asyncio.run(work())
