"""The contract of consumer groups: membership, generations, commits, on a state log."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memq.errors import (
    GenerationFencedError,
    InvalidNameError,
    InvalidRequestError,
    NotFoundError,
    TooLargeError,
)
from memq.groups import GroupState, Membership
from memq.topic import Committed, Position, ReadPartition, Totals
from tests.contract.manual_clock import ManualClock
from tests.contract.queues import STALE_MS, GroupedQueue, committed, over_groups, part

SESSION_MS = 6_000
FOUR = [part(number) for number in range(4)]


async def prepare(groups: GroupedQueue) -> None:
    await groups.create(FOUR, STALE_MS)


async def join(groups: GroupedQueue, member: str, wanted: list[ReadPartition] | None = None) -> Membership:
    return await groups.join("report", member, FOUR if wanted is None else wanted, SESSION_MS)


async def beat(
    groups: GroupedQueue, member: str, known: Membership, released: tuple[ReadPartition, ...] = ()
) -> Membership:
    return await groups.heartbeat("report", member, known.generation, released)


async def two_members(groups: GroupedQueue) -> tuple[Membership, Membership]:
    """Let `a` and `b` share the four partitions, two each."""
    await prepare(groups)
    a = await join(groups, "a")
    await join(groups, "b")
    a = await beat(groups, "a", a)
    a = await beat(groups, "a", a, a.revoking)
    b = await join(groups, "b")
    assert (len(a.assigned), len(b.assigned), a.revoking, b.revoking) == (2, 2, (), ())
    return a, b


# ---- membership ------------------------------------------------------------------------------


@over_groups
async def test_one_member_gets_all(groups: GroupedQueue, clock: ManualClock) -> None:
    await prepare(groups)
    a = await join(groups, "a")
    assert (a.assigned, a.revoking) == (tuple(FOUR), ())
    assert a.generation > 0
    assert await beat(groups, "a", a) == a


@over_groups
async def test_a_member_gets_the_positions_with_its_partitions(groups: GroupedQueue, clock: ManualClock) -> None:
    a, b = await two_members(groups)
    assert (a.positions, b.positions) == ({}, {}), "nothing is stored"
    mine = {a.assigned[0]: committed(5, partition=a.assigned[0].partition)}
    others = {b.assigned[1]: committed(7, partition=b.assigned[1].partition)}
    await groups.commit("report", "a", a.generation, mine)
    await groups.commit("report", "b", b.generation, others)
    assert (await beat(groups, "a", a)).positions == {}, "it has had these partitions"
    await groups.leave("report", "b")
    known = await beat(groups, "a", a)
    assert known.assigned == tuple(FOUR)
    assert known.positions == others
    assert (await beat(groups, "a", a)).positions == others, "an answer may be lost"
    assert (await beat(groups, "a", known)).positions == {}
    again = await join(groups, "a")
    assert again.positions == {**mine, **others}
    await join(groups, "b")
    known = await beat(groups, "a", again)
    assert (len(known.revoking), known.positions) == (2, {})


@over_groups
async def test_a_partition_moves_only_after_it_was_released(groups: GroupedQueue, clock: ManualClock) -> None:
    await prepare(groups)
    a = await join(groups, "a")
    b = await join(groups, "b")
    assert (b.assigned, b.revoking) == ((), ())
    a2 = await beat(groups, "a", a)
    assert a2.generation > a.generation
    assert (len(a2.assigned), len(a2.revoking)) == (2, 2)
    assert set(a2.assigned + a2.revoking) == set(FOUR)
    assert (await beat(groups, "b", b)).assigned == ()
    first, second = a2.revoking
    a3 = await beat(groups, "a", a2, (first,))
    b = await beat(groups, "b", b)
    assert (a3.revoking, b.assigned) == ((second,), (first,))
    a4 = await beat(groups, "a", a3, (second,))
    b = await beat(groups, "b", b)
    assert (a4.assigned, a4.revoking, b.assigned) == (a2.assigned, (), tuple(sorted([first, second])))


@over_groups
async def test_releasing_what_is_not_revoked_changes_nothing(groups: GroupedQueue, clock: ManualClock) -> None:
    await prepare(groups)
    a = await join(groups, "a")
    assert await beat(groups, "a", a, tuple(FOUR)) == a
    assert await beat(groups, "a", a, (part(99),)) == a


@over_groups
async def test_a_late_copy_of_a_heartbeat_gives_nothing_away(groups: GroupedQueue, clock: ManualClock) -> None:
    """What was given away, came back, and is to be given away once more, waits for a release of its own."""
    await prepare(groups)
    wanted = [part(0)]
    before = await join(groups, "a", wanted)
    await join(groups, "a", [])
    known = await beat(groups, "a", await join(groups, "a", []))
    assert known.revoking == (part(0),)
    await beat(groups, "a", known, known.revoking)
    again = await join(groups, "a", wanted)
    assert again.assigned == (part(0),)
    now = await join(groups, "a", [])
    assert now.revoking == (part(0),)
    for old in (before, known, again):
        with pytest.raises(GenerationFencedError):
            await beat(groups, "a", old, (part(0),))
    assert (await beat(groups, "a", now)).revoking == (part(0),)


@over_groups
async def test_a_release_before_the_revocation_counts_for_nothing(groups: GroupedQueue, clock: ManualClock) -> None:
    """The partition went from `a` to `b`, came back without a new join, and shall go again."""
    await prepare(groups)
    a = await join(groups, "a")
    await join(groups, "b")
    old = await beat(groups, "a", a)
    a = await beat(groups, "a", old, old.revoking)
    await groups.leave("report", "b")
    assert (await beat(groups, "a", a)).assigned == tuple(FOUR)
    await join(groups, "c")
    now = await beat(groups, "a", a)
    assert now.revoking == old.revoking
    assert await beat(groups, "a", old, old.revoking) == now
    assert tuple(FOUR) in (await groups.describe("report")).members.values()


@over_groups
async def test_silence_for_the_session_timeout_loses_everything_at_once(
    groups: GroupedQueue, clock: ManualClock
) -> None:
    a, b = await two_members(groups)
    clock.advance(SESSION_MS - 1)
    b = await beat(groups, "b", b)
    assert len(b.assigned) == 2
    clock.advance(1)
    b = await beat(groups, "b", b)
    assert b.assigned == tuple(FOUR)
    with pytest.raises(GenerationFencedError, match="'a'"):
        await beat(groups, "a", a)
    assert list((await groups.describe("report")).members.values()) == [tuple(FOUR)]


@over_groups
async def test_a_heartbeat_in_time_keeps_everything(groups: GroupedQueue, clock: ManualClock) -> None:
    await prepare(groups)
    a = await join(groups, "a")
    for _ in range(5):
        clock.advance(SESSION_MS - 1)
        a = await beat(groups, "a", a)
    assert a.assigned == tuple(FOUR)


@over_groups
async def test_a_new_join_begins_the_session_time_out_again(groups: GroupedQueue, clock: ManualClock) -> None:
    await prepare(groups)
    a = await join(groups, "a")
    clock.advance(SESSION_MS // 2)
    await beat(groups, "a", a)
    clock.advance(SESSION_MS - 1)
    a = await join(groups, "a")
    clock.advance(SESSION_MS - 1)
    assert await beat(groups, "a", a) == a


@over_groups
async def test_a_clock_that_starts_again_ends_old_sessions(groups: GroupedQueue, clock: ManualClock) -> None:
    await prepare(groups)
    a = await join(groups, "a")
    clock.advance(-500_000)
    assert (await join(groups, "b")).assigned == tuple(FOUR)
    with pytest.raises(GenerationFencedError):
        await beat(groups, "a", a)


@over_groups
async def test_member_that_leaves_releases_all_partitions(groups: GroupedQueue, clock: ManualClock) -> None:
    a, b = await two_members(groups)
    await groups.leave("report", "a")
    await groups.leave("report", "a")
    await groups.leave("unheard-of", "a")
    assert (await beat(groups, "b", b)).assigned == tuple(FOUR)
    with pytest.raises(GenerationFencedError):
        await beat(groups, "a", a)


@over_groups
async def test_members_share_only_what_they_want(groups: GroupedQueue, clock: ManualClock) -> None:
    await prepare(groups)
    a = await join(groups, "a", [part(0), part(1)])
    b = await join(groups, "b", [part(1), part(2), part(2)])
    assert a.assigned == (part(0), part(1))
    assert b.assigned == (part(2),)
    a = await join(groups, "a", [part(3)])
    assert (a.assigned, a.revoking) == ((part(3),), (part(0), part(1)))
    a = await beat(groups, "a", a, a.revoking)
    assert a.revoking == ()
    assert (await beat(groups, "b", b)).assigned == (part(1), part(2))


@over_groups
async def test_many_members_get_about_the_same(groups: GroupedQueue, clock: ManualClock) -> None:
    partitions = [part(number) for number in range(64)]
    await groups.create(partitions, STALE_MS)
    known = {f"m{number}": await join(groups, f"m{number}", partitions) for number in range(7)}
    for _ in range(4):
        for name, membership in known.items():
            known[name] = await beat(groups, name, membership, membership.revoking)
    shares = [known[name].assigned for name in known]
    assert sorted(partition for share in shares for partition in share) == partitions
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    before = {name: set(known[name].assigned) for name in known}
    await groups.leave("report", "m3")
    after = {name: set((await beat(groups, name, known[name])).assigned) for name in known if name != "m3"}
    assert all(after[name] >= before[name] for name in after), "sticky: only the share of who left moves"


@over_groups
async def test_groups_are_apart(groups: GroupedQueue, clock: ManualClock) -> None:
    await prepare(groups)
    for group in ("one", "two"):
        assert (await groups.join(group, "a", FOUR, SESSION_MS)).assigned == tuple(FOUR)
    await groups.commit("one", "a", (await groups.describe("one")).generation, {part(0): committed(3)})
    assert await groups.committed("two", FOUR) == {}
    assert await groups.groups() == ["one", "two"]


# ---- commits ---------------------------------------------------------------------------------


@over_groups
async def test_positions_are_stored_with_totals_and_outlive_members(groups: GroupedQueue, clock: ManualClock) -> None:
    await prepare(groups)
    a = await join(groups, "a")
    stored = {
        part(0): Committed(Position(0, 17, 3), Totals(1_000, 123_456)),
        part(2): Committed(Position(2, (1 << 39) - 1, (1 << 24) - 1), Totals((1 << 63) - 1, (1 << 63) - 1)),
    }
    await groups.commit("report", "a", a.generation, stored)
    await groups.leave("report", "a")
    assert await groups.committed("report", FOUR) == stored
    assert await groups.committed("report", [part(2), part(3)]) == {part(2): stored[part(2)]}
    assert await groups.committed("unheard-of", FOUR) == {}
    a = await join(groups, "a")
    await groups.commit("report", "a", a.generation, {part(0): committed(4)})
    assert await groups.committed("report", [part(0)]) == {part(0): committed(4)}


@over_groups
async def test_a_mark_is_stored_or_unknown(groups: GroupedQueue, clock: ManualClock) -> None:
    """SQLite stores none: what loses its log loses the positions in it."""
    await prepare(groups)
    a = await join(groups, "a")
    marked = replace(committed(4, records=7), mark=(1 << 32) - 1)
    await groups.commit("report", "a", a.generation, {part(0): marked})
    (found,) = (await groups.committed("report", FOUR)).values()
    assert found in (marked, replace(marked, mark=0))
    with pytest.raises(InvalidRequestError, match="mark 4294967296 at 0:4:0 is out of bounds"):
        await groups.commit("report", "a", a.generation, {part(0): replace(marked, mark=1 << 32)})


@over_groups
async def test_a_member_that_has_joined_again_does_not_leave_by_an_older_generation(
    groups: GroupedQueue, clock: ManualClock
) -> None:
    await prepare(groups)
    older = await join(groups, "a")
    newer = await join(groups, "a")
    await groups.leave("report", "a", older.generation)
    assert (await beat(groups, "a", newer)).assigned == tuple(FOUR)
    await groups.leave("report", "a", newer.generation)
    await groups.leave("report", "a", newer.generation)
    with pytest.raises(GenerationFencedError):
        await beat(groups, "a", newer)
    await groups.delete_group("report")


@over_groups
async def test_tried_records_are_stored_with_their_position(groups: GroupedQueue, clock: ManualClock) -> None:
    await prepare(groups)
    a = await join(groups, "a")
    most = tuple((number, 0xFFFF) for number in range(16))
    for tried in ((), ((4 << 24, 1),), most):
        await groups.commit("report", "a", a.generation, {part(0): replace(committed(4, records=7), tried=tried)})
        assert (await groups.committed("report", [part(0)]))[part(0)].tried == tried
    for wrong in (((-1, 1),), ((0, 0),), ((0, 0x10000),), (*most, (99, 1))):
        with pytest.raises(InvalidRequestError, match="the tried records at 0:4:0 are out of bounds"):
            await groups.commit("report", "a", a.generation, {part(0): replace(committed(4), tried=wrong)})


@over_groups
async def test_a_holder_may_store_a_lower_position(groups: GroupedQueue, clock: ManualClock) -> None:
    """A member that seeks back and commits wants to begin there; Kafka stores what it is given, too."""
    await prepare(groups)
    a = await join(groups, "a")
    for offset in (9, 3, 5):
        await groups.commit("report", "a", a.generation, {part(0): committed(offset)})
        assert await groups.committed("report", [part(0)]) == {part(0): committed(offset)}


@over_groups
async def test_a_commit_that_comes_after_a_later_one_of_its_member_is_refused(
    groups: GroupedQueue, clock: ManualClock
) -> None:
    """A broker that was paused may serve a request whose connection its member has given up."""
    await prepare(groups)
    a = await join(groups, "a")
    for number, offset in ((1, 3), (3, 9), (3, 9)):
        await groups.commit("report", "a", a.generation, {part(0): committed(offset)}, number)
    with pytest.raises(GenerationFencedError, match=r"commit 2 of member 'a' comes late, after its commit 3"):
        await groups.commit("report", "a", a.generation, {part(0): committed(5)}, 2)
    assert await groups.committed("report", [part(0)]) == {part(0): committed(9)}
    await groups.commit("report", "a", a.generation, {part(0): committed(2)}, 4)  # after a seek
    assert await groups.committed("report", [part(0)]) == {part(0): committed(2)}
    a = await join(groups, "a")
    with pytest.raises(GenerationFencedError, match="comes late"):
        await groups.commit("report", "a", a.generation, {part(0): committed(9)}, 3)
    await groups.commit("report", "a", a.generation, {part(0): committed(9)}, 5)
    assert await groups.committed("report", [part(0)]) == {part(0): committed(9)}


@over_groups
async def test_a_refused_commit_leaves_its_number_free(groups: GroupedQueue, clock: ManualClock) -> None:
    a, b = await two_members(groups)
    mine, theirs = a.assigned[0], b.assigned[0]
    with pytest.raises(GenerationFencedError, match="does not hold"):
        await groups.commit("report", "a", a.generation, {theirs: committed(5, partition=theirs.partition)}, 2)
    await groups.commit("report", "a", a.generation, {mine: committed(5, partition=mine.partition)}, 1)
    assert mine in await groups.committed("report", FOUR)


@over_groups
async def test_a_commit_of_what_is_not_held_is_refused_whole(groups: GroupedQueue, clock: ManualClock) -> None:
    a, b = await two_members(groups)
    mine, theirs = a.assigned[0], b.assigned[0]
    positions = {mine: committed(5, partition=mine.partition), theirs: committed(5, partition=theirs.partition)}
    with pytest.raises(GenerationFencedError, match="does not hold"):
        await groups.commit("report", "a", a.generation, positions)
    assert await groups.committed("report", FOUR) == {}
    for member in ("stranger", ""):
        with pytest.raises(GenerationFencedError):
            await groups.commit("report", member, a.generation, {mine: positions[mine]})


@over_groups
async def test_revoked_partition_may_be_committed_until_its_release(groups: GroupedQueue, clock: ManualClock) -> None:
    await prepare(groups)
    a = await join(groups, "a")
    await join(groups, "b")
    a = await beat(groups, "a", a)
    last = a.revoking[0]
    await groups.commit("report", "a", a.generation, {last: committed(9, partition=last.partition)})
    known = await beat(groups, "a", a, (last,))
    for generation in (a.generation, known.generation):
        with pytest.raises(GenerationFencedError):
            await groups.commit("report", "a", generation, {last: committed(10, partition=last.partition)})
    assert await groups.committed("report", [last]) == {last: committed(9, partition=last.partition)}


@over_groups
async def test_a_generation_from_before_an_expiry_or_a_new_join_is_void(
    groups: GroupedQueue, clock: ManualClock
) -> None:
    await prepare(groups)
    first = await join(groups, "a")
    clock.advance(SESSION_MS)
    with pytest.raises(GenerationFencedError):
        await groups.commit("report", "a", first.generation, {part(0): committed(1)})
    second = await join(groups, "a")
    third = await join(groups, "a")
    for old in (first, second):
        with pytest.raises(GenerationFencedError):
            await groups.commit("report", "a", old.generation, {part(0): committed(1)})
        with pytest.raises(GenerationFencedError):
            await beat(groups, "a", old)
    with pytest.raises(GenerationFencedError):
        await groups.commit("report", "a", third.generation + 1, {part(0): committed(1)})
    await groups.commit("report", "a", third.generation, {part(0): committed(1)})


@over_groups
async def test_a_partition_that_went_and_came_back_needs_the_new_generation(
    groups: GroupedQueue, clock: ManualClock
) -> None:
    a, _ = await two_members(groups)
    await groups.leave("report", "b")
    now = await beat(groups, "a", a)
    assert now.assigned == tuple(FOUR)
    came = next(partition for partition in FOUR if partition not in a.assigned)
    position = {came: committed(2, partition=came.partition)}
    with pytest.raises(GenerationFencedError):
        await groups.commit("report", "a", a.generation, position)
    await groups.commit("report", "a", a.generation, {a.assigned[0]: committed(2, partition=a.assigned[0].partition)})
    await groups.commit("report", "a", now.generation, position)


@over_groups
async def test_positions_are_set_from_outside_only_without_members(groups: GroupedQueue, clock: ManualClock) -> None:
    await prepare(groups)
    await groups.commit("report", "", -1, {part(0): committed(7)})
    assert await groups.groups() == ["report"]
    a = await join(groups, "a")
    with pytest.raises(InvalidRequestError, match="1 active members"):
        await groups.commit("report", "", -1, {part(0): committed(8)})
    assert (await groups.committed("report", FOUR)) == {part(0): committed(7)}
    assert a.assigned == tuple(FOUR)
    clock.advance(SESSION_MS)
    await groups.commit("report", "", -1, {part(0): committed(8)})


@over_groups
async def test_bad_commits_are_refused_whole(groups: GroupedQueue, clock: ManualClock) -> None:
    await prepare(groups)
    a = await join(groups, "a", [*FOUR, part(9)])
    good = {part(1): committed(5, partition=1)}
    for bad in (
        {part(0): committed(5, partition=1)},
        {part(0): committed(-1)},
        {part(0): committed(1 << 39)},
        {part(0): committed(1, index=1 << 24)},
        {part(0): committed(1, records=-1)},
        {part(0): committed(1, size=1 << 63)},
        {part(9): committed(1, partition=9)},
    ):
        with pytest.raises(InvalidRequestError):
            await groups.commit("report", "a", a.generation, good | bad)
    assert await groups.committed("report", FOUR) == {}


# ---- what people see and do ------------------------------------------------------------------


@over_groups
async def test_a_group_is_described(groups: GroupedQueue, clock: ManualClock) -> None:
    a, b = await two_members(groups)
    await groups.commit("report", "a", a.generation, {a.assigned[0]: committed(3, partition=a.assigned[0].partition)})
    state = await groups.describe("report")
    assert state == GroupState(
        "report",
        b.generation,
        state.members,
        {a.assigned[0]: committed(3, partition=a.assigned[0].partition)},
    )
    assert sorted(state.members.values(), key=str) == sorted([a.assigned, b.assigned], key=str)
    with pytest.raises(NotFoundError, match="unheard-of"):
        await groups.describe("unheard-of")


@over_groups
async def test_only_a_group_without_members_is_deleted(groups: GroupedQueue, clock: ManualClock) -> None:
    await prepare(groups)
    a = await join(groups, "a")
    await groups.commit("report", "a", a.generation, {part(0): committed(3)})
    with pytest.raises(InvalidRequestError, match="active"):
        await groups.delete_group("report")
    clock.advance(SESSION_MS)
    await groups.delete_group("report")
    assert (await groups.groups(), await groups.committed("report", FOUR)) == ([], {})
    for call in (groups.delete_group("report"), groups.describe("report"), beat(groups, "a", a)):
        with pytest.raises((NotFoundError, GenerationFencedError)):
            await call


@over_groups
async def test_a_dropped_topic_leaves_its_groups_without_a_trace(groups: GroupedQueue, clock: ManualClock) -> None:
    again = part(0, topic_id="0b" * 16)
    await prepare(groups)
    a = await join(groups, "a")
    await groups.commit("report", "a", a.generation, {part(0): committed(3), part(1): committed(4, partition=1)})
    await groups.drop([part(0)])
    await groups.create([again], STALE_MS)
    assert await groups.committed("report", [part(0), again, part(1)]) == {part(1): committed(4, partition=1)}
    assert (await beat(groups, "a", a)).assigned == tuple(FOUR[1:])
    await groups.commit("report", "a", a.generation, {part(1): committed(5, partition=1)})  # still held as before


@over_groups
async def test_names_and_numbers_out_of_bounds_are_refused(groups: GroupedQueue, clock: ManualClock) -> None:
    await prepare(groups)
    for name in ("", "..", "a/b/c", "x" * 250, "a\0", "_memq-x", "_memq_auditors", "е"):
        for call in (
            groups.join(name, "a", FOUR, SESSION_MS),
            groups.join("report", name, FOUR, SESSION_MS),
            groups.heartbeat(name, "a", 1),
            groups.leave(name, "a"),
            groups.commit(name, "a", 1, {}),
            groups.committed(name, FOUR),
            groups.describe(name),
            groups.delete_group(name),
        ):
            with pytest.raises(InvalidNameError):
                await call
    for timeout_ms in (-1, 0, 99, 3_600_001):
        with pytest.raises(InvalidRequestError, match="session timeout"):
            await groups.join("report", "a", FOUR, timeout_ms)
    with pytest.raises(TooLargeError):
        await groups.join("report", "a", [part(number) for number in range(65_537)], SESSION_MS)
    assert await groups.groups() == []
