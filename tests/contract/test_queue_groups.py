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


async def prepare(queue: GroupedQueue) -> None:
    await queue.create(FOUR, STALE_MS)


async def join(queue: GroupedQueue, member: str, wanted: list[ReadPartition] | None = None) -> Membership:
    return await queue.join("report", member, FOUR if wanted is None else wanted, SESSION_MS)


async def beat(
    queue: GroupedQueue, member: str, known: Membership, released: tuple[ReadPartition, ...] = ()
) -> Membership:
    return await queue.heartbeat("report", member, known.generation, released)


async def two_members(queue: GroupedQueue) -> tuple[Membership, Membership]:
    """Let `a` and `b` share the four partitions, two each."""
    await prepare(queue)
    a = await join(queue, "a")
    await join(queue, "b")
    a = await beat(queue, "a", a)
    a = await beat(queue, "a", a, a.revoking)
    b = await join(queue, "b")
    assert (len(a.assigned), len(b.assigned), a.revoking, b.revoking) == (2, 2, (), ())
    return a, b


# ---- membership ------------------------------------------------------------------------------


@over_groups
async def test_one_member_gets_all(queue: GroupedQueue, clock: ManualClock) -> None:
    await prepare(queue)
    a = await join(queue, "a")
    assert (a.assigned, a.revoking) == (tuple(FOUR), ())
    assert a.generation > 0
    assert await beat(queue, "a", a) == a


@over_groups
async def test_a_partition_moves_only_after_it_was_released(queue: GroupedQueue, clock: ManualClock) -> None:
    await prepare(queue)
    a = await join(queue, "a")
    b = await join(queue, "b")
    assert (b.assigned, b.revoking) == ((), ())
    a2 = await beat(queue, "a", a)
    assert a2.generation > a.generation
    assert (len(a2.assigned), len(a2.revoking)) == (2, 2)
    assert set(a2.assigned + a2.revoking) == set(FOUR)
    assert (await beat(queue, "b", b)).assigned == ()
    first, second = a2.revoking
    a3 = await beat(queue, "a", a2, (first,))
    b = await beat(queue, "b", b)
    assert (a3.revoking, b.assigned) == ((second,), (first,))
    a4 = await beat(queue, "a", a3, (second,))
    b = await beat(queue, "b", b)
    assert (a4.assigned, a4.revoking, b.assigned) == (a2.assigned, (), tuple(sorted([first, second])))


@over_groups
async def test_releasing_what_is_not_revoked_changes_nothing(queue: GroupedQueue, clock: ManualClock) -> None:
    await prepare(queue)
    a = await join(queue, "a")
    assert await beat(queue, "a", a, tuple(FOUR)) == a
    assert await beat(queue, "a", a, (part(99),)) == a


@over_groups
async def test_a_late_copy_of_a_heartbeat_gives_nothing_away(queue: GroupedQueue, clock: ManualClock) -> None:
    """What was given away, came back, and is to be given away once more, waits for a release of its own."""
    await prepare(queue)
    wanted = [part(0)]
    before = await join(queue, "a", wanted)
    await join(queue, "a", [])
    known = await beat(queue, "a", await join(queue, "a", []))
    assert known.revoking == (part(0),)
    await beat(queue, "a", known, known.revoking)
    again = await join(queue, "a", wanted)
    assert again.assigned == (part(0),)
    now = await join(queue, "a", [])
    assert now.revoking == (part(0),)
    for old in (before, known, again):
        with pytest.raises(GenerationFencedError):
            await beat(queue, "a", old, (part(0),))
    assert (await beat(queue, "a", now)).revoking == (part(0),)


@over_groups
async def test_a_release_from_before_the_revocation_counts_for_nothing(queue: GroupedQueue, clock: ManualClock) -> None:
    """The partition went from `a` to `b`, came back without a new join, and shall go again."""
    await prepare(queue)
    a = await join(queue, "a")
    await join(queue, "b")
    old = await beat(queue, "a", a)
    a = await beat(queue, "a", old, old.revoking)
    await queue.leave("report", "b")
    assert (await beat(queue, "a", a)).assigned == tuple(FOUR)
    await join(queue, "c")
    now = await beat(queue, "a", a)
    assert now.revoking == old.revoking
    assert await beat(queue, "a", old, old.revoking) == now
    assert (await queue.describe("report")).members["a"] == tuple(FOUR)


@over_groups
async def test_silence_for_the_session_timeout_loses_everything_at_once(
    queue: GroupedQueue, clock: ManualClock
) -> None:
    a, b = await two_members(queue)
    clock.advance(SESSION_MS - 1)
    b = await beat(queue, "b", b)
    assert len(b.assigned) == 2
    clock.advance(1)
    b = await beat(queue, "b", b)
    assert b.assigned == tuple(FOUR)
    with pytest.raises(GenerationFencedError, match="'a'"):
        await beat(queue, "a", a)
    assert (await queue.describe("report")).members == {"b": tuple(FOUR)}


@over_groups
async def test_a_heartbeat_in_time_keeps_everything(queue: GroupedQueue, clock: ManualClock) -> None:
    await prepare(queue)
    a = await join(queue, "a")
    for _ in range(5):
        clock.advance(SESSION_MS - 1)
        a = await beat(queue, "a", a)
    assert a.assigned == tuple(FOUR)


@over_groups
async def test_a_new_join_begins_the_session_time_out_again(queue: GroupedQueue, clock: ManualClock) -> None:
    await prepare(queue)
    a = await join(queue, "a")
    clock.advance(SESSION_MS // 2)
    await beat(queue, "a", a)
    clock.advance(SESSION_MS - 1)
    a = await join(queue, "a")
    clock.advance(SESSION_MS - 1)
    assert await beat(queue, "a", a) == a


@over_groups
async def test_a_clock_that_starts_again_ends_old_sessions(queue: GroupedQueue, clock: ManualClock) -> None:
    await prepare(queue)
    a = await join(queue, "a")
    clock.advance(-500_000)
    assert (await join(queue, "b")).assigned == tuple(FOUR)
    with pytest.raises(GenerationFencedError):
        await beat(queue, "a", a)


@over_groups
async def test_member_that_leaves_releases_all_partitions(queue: GroupedQueue, clock: ManualClock) -> None:
    a, b = await two_members(queue)
    await queue.leave("report", "a")
    await queue.leave("report", "a")
    await queue.leave("unheard-of", "a")
    assert (await beat(queue, "b", b)).assigned == tuple(FOUR)
    with pytest.raises(GenerationFencedError):
        await beat(queue, "a", a)


@over_groups
async def test_members_share_only_what_they_want(queue: GroupedQueue, clock: ManualClock) -> None:
    await prepare(queue)
    a = await join(queue, "a", [part(0), part(1)])
    b = await join(queue, "b", [part(1), part(2), part(2)])
    assert a.assigned == (part(0), part(1))
    assert b.assigned == (part(2),)
    a = await join(queue, "a", [part(3)])
    assert (a.assigned, a.revoking) == ((part(3),), (part(0), part(1)))
    a = await beat(queue, "a", a, a.revoking)
    assert a.revoking == ()
    assert (await beat(queue, "b", b)).assigned == (part(1), part(2))


@over_groups
async def test_many_members_get_about_the_same(queue: GroupedQueue, clock: ManualClock) -> None:
    partitions = [part(number) for number in range(64)]
    await queue.create(partitions, STALE_MS)
    known = {f"m{number}": await join(queue, f"m{number}", partitions) for number in range(7)}
    for _ in range(4):
        for name, membership in known.items():
            known[name] = await beat(queue, name, membership, membership.revoking)
    shares = [known[name].assigned for name in known]
    assert sorted(partition for share in shares for partition in share) == partitions
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    before = {name: set(known[name].assigned) for name in known}
    await queue.leave("report", "m3")
    after = {name: set((await beat(queue, name, known[name])).assigned) for name in known if name != "m3"}
    assert all(after[name] >= before[name] for name in after), "sticky: only the share of who left moves"


@over_groups
async def test_groups_are_apart(queue: GroupedQueue, clock: ManualClock) -> None:
    await prepare(queue)
    for group in ("one", "two"):
        assert (await queue.join(group, "a", FOUR, SESSION_MS)).assigned == tuple(FOUR)
    await queue.commit("one", "a", (await queue.describe("one")).generation, {part(0): committed(3)})
    assert await queue.committed("two", FOUR) == {}
    assert await queue.groups() == ["one", "two"]


# ---- commits ---------------------------------------------------------------------------------


@over_groups
async def test_positions_are_stored_with_totals_and_outlive_members(queue: GroupedQueue, clock: ManualClock) -> None:
    await prepare(queue)
    a = await join(queue, "a")
    stored = {
        part(0): Committed(Position(0, 17, 3), Totals(1_000, 123_456)),
        part(2): Committed(Position(2, (1 << 39) - 1, (1 << 24) - 1), Totals((1 << 63) - 1, (1 << 63) - 1)),
    }
    await queue.commit("report", "a", a.generation, stored)
    await queue.leave("report", "a")
    assert await queue.committed("report", FOUR) == stored
    assert await queue.committed("report", [part(2), part(3)]) == {part(2): stored[part(2)]}
    assert await queue.committed("unheard-of", FOUR) == {}
    a = await join(queue, "a")
    await queue.commit("report", "a", a.generation, {part(0): committed(4)})
    assert await queue.committed("report", [part(0)]) == {part(0): committed(4)}


@over_groups
async def test_a_mark_is_stored_or_unknown(queue: GroupedQueue, clock: ManualClock) -> None:
    """SQLite stores none: what loses its log loses the positions in it."""
    await prepare(queue)
    a = await join(queue, "a")
    marked = replace(committed(4, records=7), mark=(1 << 32) - 1)
    await queue.commit("report", "a", a.generation, {part(0): marked})
    (found,) = (await queue.committed("report", FOUR)).values()
    assert found in (marked, replace(marked, mark=0))
    with pytest.raises(InvalidRequestError, match="mark 4294967296 at 0:4:0 is out of bounds"):
        await queue.commit("report", "a", a.generation, {part(0): replace(marked, mark=1 << 32)})


@over_groups
async def test_a_holder_may_store_a_lower_position(queue: GroupedQueue, clock: ManualClock) -> None:
    """A member that seeks back and commits wants to begin there; Kafka stores what it is given, too."""
    await prepare(queue)
    a = await join(queue, "a")
    for offset in (9, 3, 5):
        await queue.commit("report", "a", a.generation, {part(0): committed(offset)})
        assert await queue.committed("report", [part(0)]) == {part(0): committed(offset)}


@over_groups
async def test_a_commit_that_comes_after_a_later_one_of_its_member_is_refused(
    queue: GroupedQueue, clock: ManualClock
) -> None:
    """A broker that was paused may serve a request whose connection its member has given up."""
    await prepare(queue)
    a = await join(queue, "a")
    for number, offset in ((1, 3), (3, 9), (3, 9)):
        await queue.commit("report", "a", a.generation, {part(0): committed(offset)}, number)
    with pytest.raises(GenerationFencedError, match=r"commit 2 of member 'a' comes late, after its commit 3"):
        await queue.commit("report", "a", a.generation, {part(0): committed(5)}, 2)
    assert await queue.committed("report", [part(0)]) == {part(0): committed(9)}
    await queue.commit("report", "a", a.generation, {part(0): committed(2)}, 4)  # after a seek
    assert await queue.committed("report", [part(0)]) == {part(0): committed(2)}
    a = await join(queue, "a")
    with pytest.raises(GenerationFencedError, match="comes late"):
        await queue.commit("report", "a", a.generation, {part(0): committed(9)}, 3)
    await queue.commit("report", "a", a.generation, {part(0): committed(9)}, 5)
    assert await queue.committed("report", [part(0)]) == {part(0): committed(9)}


@over_groups
async def test_a_refused_commit_leaves_its_number_free(queue: GroupedQueue, clock: ManualClock) -> None:
    a, b = await two_members(queue)
    mine, theirs = a.assigned[0], b.assigned[0]
    with pytest.raises(GenerationFencedError, match="does not hold"):
        await queue.commit("report", "a", a.generation, {theirs: committed(5, partition=theirs.partition)}, 2)
    await queue.commit("report", "a", a.generation, {mine: committed(5, partition=mine.partition)}, 1)
    assert mine in await queue.committed("report", FOUR)


@over_groups
async def test_a_commit_of_what_is_not_held_is_refused_whole(queue: GroupedQueue, clock: ManualClock) -> None:
    a, b = await two_members(queue)
    mine, theirs = a.assigned[0], b.assigned[0]
    positions = {mine: committed(5, partition=mine.partition), theirs: committed(5, partition=theirs.partition)}
    with pytest.raises(GenerationFencedError, match="does not hold"):
        await queue.commit("report", "a", a.generation, positions)
    assert await queue.committed("report", FOUR) == {}
    for member in ("stranger", ""):
        with pytest.raises(GenerationFencedError):
            await queue.commit("report", member, a.generation, {mine: positions[mine]})


@over_groups
async def test_revoked_partition_may_be_committed_until_its_release(queue: GroupedQueue, clock: ManualClock) -> None:
    await prepare(queue)
    a = await join(queue, "a")
    await join(queue, "b")
    a = await beat(queue, "a", a)
    last = a.revoking[0]
    await queue.commit("report", "a", a.generation, {last: committed(9, partition=last.partition)})
    known = await beat(queue, "a", a, (last,))
    for generation in (a.generation, known.generation):
        with pytest.raises(GenerationFencedError):
            await queue.commit("report", "a", generation, {last: committed(10, partition=last.partition)})
    assert await queue.committed("report", [last]) == {last: committed(9, partition=last.partition)}


@over_groups
async def test_a_generation_from_before_an_expiry_or_a_new_join_is_void(
    queue: GroupedQueue, clock: ManualClock
) -> None:
    await prepare(queue)
    first = await join(queue, "a")
    clock.advance(SESSION_MS)
    with pytest.raises(GenerationFencedError):
        await queue.commit("report", "a", first.generation, {part(0): committed(1)})
    second = await join(queue, "a")
    third = await join(queue, "a")
    for old in (first, second):
        with pytest.raises(GenerationFencedError):
            await queue.commit("report", "a", old.generation, {part(0): committed(1)})
        with pytest.raises(GenerationFencedError):
            await beat(queue, "a", old)
    with pytest.raises(GenerationFencedError):
        await queue.commit("report", "a", third.generation + 1, {part(0): committed(1)})
    await queue.commit("report", "a", third.generation, {part(0): committed(1)})


@over_groups
async def test_a_partition_that_went_and_came_back_needs_the_new_generation(
    queue: GroupedQueue, clock: ManualClock
) -> None:
    a, _ = await two_members(queue)
    await queue.leave("report", "b")
    now = await beat(queue, "a", a)
    assert now.assigned == tuple(FOUR)
    came = next(partition for partition in FOUR if partition not in a.assigned)
    position = {came: committed(2, partition=came.partition)}
    with pytest.raises(GenerationFencedError):
        await queue.commit("report", "a", a.generation, position)
    await queue.commit("report", "a", a.generation, {a.assigned[0]: committed(2, partition=a.assigned[0].partition)})
    await queue.commit("report", "a", now.generation, position)


@over_groups
async def test_positions_are_set_from_outside_only_without_members(queue: GroupedQueue, clock: ManualClock) -> None:
    await prepare(queue)
    await queue.commit("report", "", -1, {part(0): committed(7)})
    assert await queue.groups() == ["report"]
    a = await join(queue, "a")
    with pytest.raises(InvalidRequestError, match="1 active members"):
        await queue.commit("report", "", -1, {part(0): committed(8)})
    assert (await queue.committed("report", FOUR)) == {part(0): committed(7)}
    assert a.assigned == tuple(FOUR)
    clock.advance(SESSION_MS)
    await queue.commit("report", "", -1, {part(0): committed(8)})


@over_groups
async def test_bad_commits_are_refused_whole(queue: GroupedQueue, clock: ManualClock) -> None:
    await prepare(queue)
    a = await join(queue, "a", [*FOUR, part(9)])
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
            await queue.commit("report", "a", a.generation, good | bad)
    assert await queue.committed("report", FOUR) == {}


# ---- what people see and do ------------------------------------------------------------------


@over_groups
async def test_a_group_is_described(queue: GroupedQueue, clock: ManualClock) -> None:
    a, b = await two_members(queue)
    await queue.commit("report", "a", a.generation, {a.assigned[0]: committed(3, partition=a.assigned[0].partition)})
    state = await queue.describe("report")
    assert state == GroupState(
        "report",
        b.generation,
        {"a": a.assigned, "b": b.assigned},
        {a.assigned[0]: committed(3, partition=a.assigned[0].partition)},
    )
    with pytest.raises(NotFoundError, match="unheard-of"):
        await queue.describe("unheard-of")


@over_groups
async def test_only_a_group_without_members_is_deleted(queue: GroupedQueue, clock: ManualClock) -> None:
    await prepare(queue)
    a = await join(queue, "a")
    await queue.commit("report", "a", a.generation, {part(0): committed(3)})
    with pytest.raises(InvalidRequestError, match="active"):
        await queue.delete_group("report")
    clock.advance(SESSION_MS)
    await queue.delete_group("report")
    assert (await queue.groups(), await queue.committed("report", FOUR)) == ([], {})
    for call in (queue.delete_group("report"), queue.describe("report"), beat(queue, "a", a)):
        with pytest.raises((NotFoundError, GenerationFencedError)):
            await call


@over_groups
async def test_a_dropped_topic_leaves_its_groups_without_a_trace(queue: GroupedQueue, clock: ManualClock) -> None:
    again = part(0, topic_id="0b" * 16)
    await prepare(queue)
    a = await join(queue, "a")
    await queue.commit("report", "a", a.generation, {part(0): committed(3), part(1): committed(4, partition=1)})
    await queue.drop([part(0)])
    await queue.create([again], STALE_MS)
    assert await queue.committed("report", [part(0), again, part(1)]) == {part(1): committed(4, partition=1)}
    assert (await beat(queue, "a", a)).assigned == tuple(FOUR[1:])
    await queue.commit("report", "a", a.generation, {part(1): committed(5, partition=1)})  # still held as before


@over_groups
async def test_names_and_numbers_out_of_bounds_are_refused(queue: GroupedQueue, clock: ManualClock) -> None:
    await prepare(queue)
    for name in ("", "..", "a/b", "x" * 250, "a\0", "_memq-x", "_memq_auditors", "е"):
        for call in (
            queue.join(name, "a", FOUR, SESSION_MS),
            queue.join("report", name, FOUR, SESSION_MS),
            queue.heartbeat(name, "a", 1),
            queue.leave(name, "a"),
            queue.commit(name, "a", 1, {}),
            queue.committed(name, FOUR),
            queue.describe(name),
            queue.delete_group(name),
        ):
            with pytest.raises(InvalidNameError):
                await call
    for timeout_ms in (-1, 0, 99, 3_600_001):
        with pytest.raises(InvalidRequestError, match="session timeout"):
            await queue.join("report", "a", FOUR, timeout_ms)
    with pytest.raises(TooLargeError):
        await queue.join("report", "a", [part(0)] * 65_537, SESSION_MS)
    assert await queue.groups() == []
