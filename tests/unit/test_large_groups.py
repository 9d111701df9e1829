"""Groups of 10,000 members: decisions in pieces, each of which takes effect with its last piece or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any, cast

import msgspec
import pytest

from memq.errors import CorruptDataError, GenerationFencedError, MovedError, TooLargeError
from memq.groups import coordinator as coordinator_module
from memq.groups import pieces as pieces_module
from memq.groups.coordinator import GroupCoordinator
from memq.groups.group import (
    GROUP_MEMBERS_MAX,
    SESSION_MS_PER_MEMBER,
    SESSION_WANTED_MS_MAX,
    Group,
    PlannedGroup,
)
from memq.groups.machine import (
    GROUPS_MACHINE,
    CommitDecision,
    DeleteDecision,
    GroupMachine,
    ImportDecision,
    MembersDecision,
    StalePlanError,
    copy_of,
    copying,
    decode_decision,
    difference,
    encode_decision,
    pack_positions,
    shared_wanted,
)
from memq.groups.pieces import PIECE_BYTES_MAX, PieceDecision, pieces_of
from memq.limits import POINTER_BYTES_MAX
from memq.runtime.logs import EventLog
from memq.runtime.tasks import TaskOwner
from memq.state_log.state_log import StateLog
from memq.topic import Committed, Covered, Position, ReadPartition
from tests.contract.manual_clock import ManualClock
from tests.contract.state_log_queue import SERVICE, StateLogQueue
from tests.skipping_loop import LoopClock, run_skipping
from tests.unit.instant_log import InstantLog

SESSION_MS = 8_000
LOGS = shared_wanted(ReadPartition("clicks", "0a" * 16, number) for number in range(4))
MANY = shared_wanted(ReadPartition("clicks", "0a" * 16, number) for number in range(10_000))
Change = Callable[[PlannedGroup], object]

# What the release before decisions in pieces wrote: two members join, and one of them commits.
FORMER_DECISIONS = (
    (
        "86a474797065a76d656d62657273a567726f7570a167a46261736500aa67656e65726174696f6e01a76368616e67656481a16195cd1f40010091"
        "93a174a23061920002919301009193a174a23061920002a4676f6e6590"
    ),
    (
        "86a474797065a76d656d62657273a567726f7570a167a46261736501aa67656e65726174696f6e02a76368616e67656482a16195cd1f40010091"
        "93a174a23061920002929301009193a174a230619201029301029193a174a23061920001a16295cd1f4002009193a174a2306192000290a4676f"
        "6e6590"
    ),
)
FORMER_STATE = (
    "83a776657273696f6e01a5666c6f6f7200a667726f75707381a16783aa67656e65726174696f6e02a76d656d6265727382a16195cd1f40010391"
    "93a174a23061920002929301009193a174a230619201029301029193a174a23061920001a16295cd1f4002009193a174a2306192000290a9706f"
    "736974696f6e739193a174a23061919700050106070890"
)


def planned(machine: GroupMachine, *changes: Change) -> bytes:
    """Return the bytes of the decision that makes changes of group "g"."""
    before = machine.membership("g")
    after = copy_of(before)
    for change in changes:
        change(after)
    return encode_decision(difference("g", before, after))


def join(name: str, wanted: tuple[ReadPartition, ...] = LOGS) -> Change:
    return lambda state: state.join(name, wanted, SESSION_MS, 0)


def decide(machine: GroupMachine, *changes: Change) -> list[PieceDecision]:
    """Make one decision in pieces."""
    pieces = list(pieces_of("g", [planned(machine, *changes)]))
    for piece in pieces:
        body = encode_decision(piece)
        assert len(body) < POINTER_BYTES_MAX - 200, "an entry takes the piece"
        assert machine.apply(body) is None
    return pieces


def holders(machine: GroupMachine) -> dict[ReadPartition, str]:
    found: dict[ReadPartition, str] = {}
    for name, member in machine.membership("g").members.items():
        for hold in member.holds:
            assert found.setdefault(hold.partition, name) == name, "one holder"
    return found


def released(machine: GroupMachine) -> list[Change]:
    """Return heartbeats of all members that release what is revoked."""
    state = machine.membership("g")

    def beat(name: str, given: list[ReadPartition]) -> Change:
        return lambda after: after.heartbeat(name, state.generation, given, 0)

    given = {name: [hold.partition for hold in member.holds if hold.revoking] for name, member in state.members.items()}
    return [beat(name, each) for name, each in given.items() if each]


def test_a_group_of_ten_thousand_members_balances_and_commits() -> None:
    machine = GroupMachine()
    names = [f"memq-{number:016x}" for number in range(GROUP_MEMBERS_MAX)]
    assert len(names) == 10_000
    early, late = names[:8_000], names[8_000:]
    assert len(decide(machine, *(join(name, MANY) for name in early))) > 10
    before = holders(machine)
    decide(machine, *(join(name, MANY) for name in late))
    decide(machine, *released(machine))
    after = holders(machine)
    moved = sum(before[each] != after[each] for each in MANY)
    assert len(after) == len(MANY)
    assert {len(member.holds) for member in machine.membership("g").members.values()} == {1}
    assert moved <= 1.2 * len(late), "each late member needs one"

    generation = machine.membership("g").generation
    for partition, name in [*after.items()][:1_000]:
        position = pack_positions({partition: Committed(Position(partition.partition, 7))})
        assert machine.apply(encode_decision(CommitDecision("g", name, generation, 1, position))) is None
    copy = GroupMachine()
    copy.restore(machine.snapshot())
    assert copy.groups == machine.groups

    sessions_ms = {member.session_timeout_ms for member in machine.membership("g").members.values()}
    assert sessions_ms == {int(8_000 * SESSION_MS_PER_MEMBER), SESSION_WANTED_MS_MAX}, "36 s are long enough"

    gone = set(names[:500])

    def silence(state: Group) -> None:
        for name, member in state.members.items():
            member.heard_ms = 0 if name in gone else SESSION_WANTED_MS_MAX
        state.expire(SESSION_WANTED_MS_MAX)

    decide(machine, silence)
    left = holders(machine)
    assert machine.membership("g").members.keys() == set(names) - gone
    assert len(left) == len(MANY)
    assert all(left[each] == name for each, name in after.items() if name not in gone), "only what is free moves"
    with pytest.raises(TooLargeError, match="at most 10000 members"):
        decide(machine, *(join(f"more-{number}") for number in range(501)))


def small_pieces(monkeypatch: pytest.MonkeyPatch, size: int = 40) -> None:
    monkeypatch.setattr(pieces_module, "PIECE_BYTES_MAX", size)
    monkeypatch.setattr(coordinator_module, "PIECE_BYTES_MAX", size)


def test_a_decision_takes_effect_with_its_last_piece_at_each_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    small_pieces(monkeypatch)
    machine = GroupMachine()
    decide(machine, join("a"))
    known = machine.membership("g").membership("a")
    body = planned(machine, join("b"), join("c"))
    *pieces, last = pieces_of("g", [body])
    assert len(pieces) > 2
    later: list[GroupMachine] = []  # owners that begin with a snapshot from between two pieces
    for piece in pieces:
        for each in (machine, *later):
            assert each.apply(encode_decision(piece)) is None
            assert each.membership("g").membership("a") == known
        later.append(GroupMachine())
        later[-1].restore(machine.snapshot())
    at = pack_positions({LOGS[0]: Committed(Position(0, 5))})
    commit = encode_decision(CommitDecision("g", "a", known.generation, 4, at))
    for each in (machine, *later):
        assert each.apply(commit) is None, "member a holds all until the decision counts"
        assert each.apply(encode_decision(last)) is None
        assert each.membership("g").members.keys() == {"a", "b", "c"}
        assert each.membership("g").members["a"].commits == 4
        assert each.snapshot() == machine.snapshot()
    assert not machine.gathered


def test_pieces_that_an_owner_left_behind_are_no_part_of_the_next_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    small_pieces(monkeypatch)
    machine = GroupMachine()
    left = list(pieces_of("g", [planned(machine, join("a"))]))
    for piece in left[:2]:
        machine.apply(encode_decision(piece))
    decide(machine, join("b"))
    assert machine.membership("g").members.keys() == {"b"}
    for piece in left[2:]:
        assert isinstance(machine.apply(encode_decision(piece)), StalePlanError)
    assert machine.membership("g").members.keys() == {"b"}


def test_a_piece_that_does_not_follow_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    small_pieces(monkeypatch)
    machine = GroupMachine()
    first, second, third, *_ = pieces_of("g", [planned(machine, join("a"))])
    other = list(pieces_of("g", [planned(machine, join("another-member"))]))
    assert isinstance(machine.apply(encode_decision(second)), StalePlanError)
    machine.apply(encode_decision(first))
    for wrong in (third, other[1]):
        assert isinstance(machine.apply(encode_decision(wrong)), StalePlanError)
    assert machine.apply(encode_decision(second)) is None
    assert machine.groups == {}


def test_a_decision_in_pieces_counts_only_on_the_state_that_it_was_made_on(monkeypatch: pytest.MonkeyPatch) -> None:
    small_pieces(monkeypatch)
    machine = GroupMachine()
    first, *others = pieces_of("g", [planned(machine, join("a"))])
    machine.apply(encode_decision(first))
    assert machine.apply(planned(machine, join("b"))) is None
    assert {type(machine.apply(encode_decision(piece))) for piece in others} == {StalePlanError}
    assert machine.membership("g").members.keys() == {"b"}
    pieces = list(pieces_of("g", [planned(machine, lambda state: state.leave("b", 0), join("a"))]))
    machine.apply(planned(machine, lambda state: state.leave("b", 0)))
    answers = [machine.apply(encode_decision(piece)) for piece in pieces]
    assert isinstance(answers[-1], StalePlanError)
    assert machine.membership("g").members.keys() == set()


def test_a_group_that_is_deleted_leaves_no_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    small_pieces(monkeypatch)
    machine = GroupMachine()
    machine.apply(planned(machine, join("a")))
    machine.apply(planned(machine, lambda state: state.leave("a", 0)))
    first, *_ = pieces_of("g", [planned(machine, join("b"))])
    machine.apply(encode_decision(first))
    assert machine.apply(encode_decision(DeleteDecision("g"))) is None
    assert machine.gathered == {}


def test_pieces_of_other_bytes_are_corrupt() -> None:
    whole = planned(GroupMachine(), join("a"))
    for body in (whole[:-1], encode_decision(DeleteDecision("g"))):
        (piece,) = pieces_of("g", [body])
        with pytest.raises(CorruptDataError):
            GroupMachine().apply(encode_decision(piece))
    later = encode_decision(msgspec.structs.replace(decode_decision(whole), generation=9))
    foreign = encode_decision(msgspec.structs.replace(decode_decision(whole), group="h"))
    (sound,) = pieces_of("g", [whole])
    wrong = [*pieces_of("g", [whole, later]), *pieces_of("g", [foreign]), *pieces_of("g", [])]
    changes: list[dict[str, Any]] = [{"checksum": 1}, {"piece": sound.piece + b"x"}, {"piece": sound.piece[:-1]}]
    wrong += [msgspec.structs.replace(sound, **change) for change in changes]
    for piece in wrong:
        with pytest.raises(CorruptDataError, match="group 'g'"):
            GroupMachine().apply(encode_decision(piece))


def test_a_group_changes_with_the_last_piece_of_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The members of a part are ready with the piece that completes it."""
    small_pieces(monkeypatch)
    machine = GroupMachine()
    machine.apply(planned(machine, join("a"), join("b")))
    whole = decode_decision(planned(machine, lambda state: state.leave("a", 0), join("c"), join("d")))
    assert isinstance(whole, MembersDecision)
    parts = [msgspec.structs.replace(whole, changed={})]
    parts += [msgspec.structs.replace(whole, changed={name: each}, gone=()) for name, each in whole.changed.items()]
    *pieces, last = pieces_of("g", [encode_decision(part) for part in parts])
    for piece in pieces:
        machine.apply(encode_decision(piece))
        assert machine.membership("g").members.keys() == {"a", "b"}
    restored = GroupMachine()
    restored.restore(machine.snapshot())
    assert len(restored.gathered["g"].members) == len(machine.gathered["g"].members) == len(whole.changed) - 1
    for each in (machine, restored):
        assert each.apply(encode_decision(last)) is None
        assert each.membership("g").members.keys() == {"b", "c", "d"}


def test_a_decision_of_too_many_bytes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces_module, "WHOLE_BYTES_MAX", 10)
    assert [piece.piece for piece in pieces_of("g", [b"x" * 6])] == [b"\0\0\0\6" + b"x" * 6]
    with pytest.raises(TooLargeError, match="11 bytes, at most 10"):
        next(pieces_of("g", [b"x" * 3, b""]))


@pytest.mark.parametrize("seed", range(5))
def test_a_plan_without_checks_of_all_members_ends_as_one_with_them(seed: int) -> None:
    draw = Random(seed)
    plain, plan = PlannedGroup(), PlannedGroup()
    now_ms = 0
    for _ in range(300):
        now_ms += draw.randrange(200)
        name, session_ms = f"m{draw.randrange(9)}", draw.choice((200, 500, 2_000))
        plain.ends_ms = 0  # checks all
        for group in (plain, plan):
            group.expire(now_ms)
        if draw.random() < 0.5:
            for group in (plain, plan):
                group.join(name, tuple(LOGS), session_ms, now_ms)
        elif name in plain.members:
            for group in (plain, plan):
                group.heartbeat(name, group.generation, (), now_ms)
        for group in (plain, plan):
            group.settle()
        assert (plan.generation, plan.members) == (plain.generation, plain.members)


# ---- of the release before ---------------------------------------------------------------------------


def test_a_log_and_a_snapshot_of_the_former_release_are_read() -> None:
    machine = GroupMachine()
    for body in FORMER_DECISIONS:
        assert machine.apply(bytes.fromhex(body)) is None
    at = pack_positions({ReadPartition("t", "0a", 0): Committed(Position(0, 5, 1), mark=8)})
    assert machine.apply(encode_decision(CommitDecision("g", "a", 2, 3, at))) is None
    former = GroupMachine()
    former.restore(bytes.fromhex(FORMER_STATE))
    assert former.membership("g") == machine.membership("g")
    plain = "9700050106070890"  # a position; it has tried records at its end now
    assert former.snapshot().hex() == FORMER_STATE.replace(plain, f"98{plain[2:]}90"), "without pieces as before"


def test_the_former_release_ignores_tried_records() -> None:
    class FormerPosition(msgspec.Struct, frozen=True, array_like=True):
        partition: int
        offset: int
        index: int
        records: int
        bytes: int
        mark: int
        covered: Covered = ()

    (packed,) = pack_positions({LOGS[0]: Committed(Position(0, 5, 1), mark=8, tried=((9 << 24, 2),))})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(packed.positions[0]), type=FormerPosition) == FormerPosition(
        0, 5, 1, 0, 0, 8
    )


# ---- the owner of a log ------------------------------------------------------------------------------


def test_a_coordinator_decides_about_many_members_in_several_entries() -> None:
    async def work() -> None:
        clock = ManualClock()
        queue = StateLogQueue(clock)
        coordinator = await queue.reopen(clock.monotonic())
        names = [f"memq-{number:016x}" for number in range(1_500)]
        await asyncio.gather(*(coordinator.join("g", name, LOGS, SESSION_MS) for name in names))
        entries = len(queue.log(SERVICE).entries)
        assert entries == 4  # `opened`, and three pieces
        coordinator = await queue.reopen(clock.monotonic())
        state = await coordinator.describe("g")
        assert state.members.keys() == set(names)
        assert state.generation == 1
        await queue.close()

    asyncio.run(work())


def test_other_work_runs_while_a_coordinator_plans_for_many_members(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_module, "SLICE_MEMBERS", 10)

    async def work() -> None:
        machine = GroupMachine()
        coordinator = coordinator_of(InstantLog({GROUPS_MACHINE: machine}), machine)
        joins = asyncio.gather(*(coordinator.join("g", f"m{number}", LOGS, SESSION_MS) for number in range(100)))
        turns = 0
        while not joins.done():
            turns += 1
            await asyncio.sleep(0)
        assert 40 <= turns <= 90, "ten slices for each of: changes, times, difference, answers"
        known = await joins
        assert {membership.generation for membership in known} == {1}

    run_skipping(work())


def test_a_commit_between_two_slices_of_a_plan_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_module, "SLICE_MEMBERS", 1)

    async def work() -> None:
        machine = GroupMachine()
        coordinator = coordinator_of(InstantLog({GROUPS_MACHINE: machine}), machine)
        known = await coordinator.join("g", "a", LOGS, SESSION_MS)
        joins = asyncio.gather(*(coordinator.join("g", f"m{number}", LOGS, SESSION_MS) for number in range(20)))
        for number in range(1, 9):
            await coordinator.commit("g", "a", known.generation, {LOGS[0]: Committed(Position(0, number))}, number)
        await joins
        assert machine.membership("g").members["a"].commits == 8
        with pytest.raises(GenerationFencedError, match="comes late"):
            await coordinator.commit("g", "a", known.generation, {LOGS[0]: Committed(Position(0, 1))}, 7)

    run_skipping(work())


def test_an_owner_that_ends_between_two_pieces_has_answered_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    small_pieces(monkeypatch)

    async def work() -> None:
        machine = GroupMachine()
        log = InstantLog({GROUPS_MACHINE: machine})
        log.before = lambda: log.errors.extend([MovedError("the log has another owner")] if log.applied else [])
        with pytest.raises(MovedError):
            await coordinator_of(log, machine).join("g", "a", LOGS, SESSION_MS)
        assert len(log.applied) == 2
        later = GroupMachine()
        later.restore(machine.snapshot())
        coordinator = coordinator_of(InstantLog({GROUPS_MACHINE: later}), later)
        assert await coordinator.groups() == []
        known = await coordinator.join("g", "b", LOGS, SESSION_MS)
        assert (known.generation, known.assigned) == (1, LOGS)
        assert later.membership("g").members.keys() == {"b"}

    run_skipping(work())


def test_a_coordinator_decides_again_if_its_pieces_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    small_pieces(monkeypatch)

    async def work() -> None:
        machine = GroupMachine()
        log = InstantLog({GROUPS_MACHINE: machine})
        imported = [encode_decision(ImportDecision("g", 7, ()))]

        def move() -> None:
            if len(log.applied) == 2 and imported:  # a former group moves in between two pieces
                machine.apply(imported.pop())

        log.before = move
        known = await coordinator_of(log, machine).join("g", "a", LOGS, SESSION_MS)
        assert (known.generation, known.assigned) == (8, LOGS)

    run_skipping(work())


def coordinator_of(log: InstantLog, machine: GroupMachine) -> GroupCoordinator:
    clock = LoopClock()
    tasks = TaskOwner(lambda error: None, EventLog(clock))
    return GroupCoordinator(cast(StateLog, log), machine, clock, tasks, 0.0)


def test_a_small_decision_is_one_entry() -> None:
    body = planned(GroupMachine(), join("a"))
    assert len(body) < PIECE_BYTES_MAX
    assert isinstance(decode_decision(body), MembersDecision)


def test_the_copy_and_the_assignment_of_a_large_group_have_many_steps() -> None:
    machine = GroupMachine()
    decide(machine, *(join(f"m{number}", MANY) for number in range(5_000)))
    before = machine.membership("g")
    *steps, after = copying(before)
    assert len(steps) == 4
    assert after is not None
    assert after.members == before.members
    for number in range(5_000):
        after.join(f"n{number}", MANY, SESSION_MS, 0)
    whole = copy_of(before)
    for number in range(5_000):
        whole.join(f"n{number}", MANY, SESSION_MS, 0)
    whole.settle()
    assert len(list(after.settling())) > len(MANY) // 1_024
    assert (after.generation, after.members) == (whole.generation, whole.members)
    small = PlannedGroup()
    small.join("a", tuple(LOGS), SESSION_MS, 0)
    assert list(small.settling()) == []
