"""The contract of groups that an earlier release kept in the queue: read, set and removed, over every queue."""

from __future__ import annotations

import pytest

from memq.errors import InvalidNameError, InvalidRequestError, NotFoundError
from memq.notification import FormerGroup, NotificationQueue
from memq.notification.memory import MemoryQueue
from memq.notification.sqlite.former_groups import FormerMember
from memq.topic import Committed, Position, Totals
from tests.contract.manual_clock import ManualClock
from tests.contract.queues import STALE_MS, committed, over_queues, part

TWO = {part(0): committed(17, index=3, records=1_000, size=123_456), part(1): committed(9, partition=1)}
WRONG = {
    "another partition": Committed(Position(1, 3)),
    "negative offset": Committed(Position(0, -1)),
    "offset": Committed(Position(0, 1 << 39)),
    "record index": Committed(Position(0, 3, 1 << 24)),
    "totals": Committed(Position(0, 3), Totals(1 << 63, 0)),
}


async def prepare(queue: NotificationQueue) -> None:
    await queue.create([part(0), part(1)], STALE_MS)
    await queue.former.store("report", TWO)


@over_queues
async def test_a_group_is_read_as_it_was_stored(queue: NotificationQueue, clock: ManualClock) -> None:
    assert await queue.former.names() == []
    await prepare(queue)
    found = await queue.former.read("report")
    assert found == FormerGroup("report", found.generation, (), TWO)
    assert await queue.former.read("report") == found
    await queue.former.store("audit", {part(1): committed(1, partition=1)})
    assert await queue.former.names() == ["audit", "report"]
    assert (await queue.former.read("report")).committed == TWO


@over_queues
async def test_a_position_replaces_a_higher_one_and_no_other(queue: NotificationQueue, clock: ManualClock) -> None:
    await prepare(queue)
    begin = {part(0): committed(0)}
    await queue.former.store("report", begin)
    assert (await queue.former.read("report")).committed == TWO | begin


@over_queues
async def test_a_group_that_is_removed_leaves_no_position(queue: NotificationQueue, clock: ManualClock) -> None:
    await prepare(queue)
    await queue.former.store("audit", {part(0): committed(2)})
    await queue.former.remove("report")
    assert await queue.former.names() == ["audit"]
    with pytest.raises(NotFoundError, match="report"):
        await queue.former.read("report")
    begin = {part(0): committed(0)}
    await queue.former.store("report", begin)
    assert (await queue.former.read("report")).committed == begin


@over_queues
async def test_a_group_that_is_not_there_is_not_found(queue: NotificationQueue, clock: ManualClock) -> None:
    for call in (queue.former.read("report"), queue.former.remove("report")):
        with pytest.raises(NotFoundError, match="report"):
            await call


@over_queues
async def test_a_dropped_topic_leaves_no_position(queue: NotificationQueue, clock: ManualClock) -> None:
    await prepare(queue)
    other, again = part(0, "views"), part(0, topic_id="0b" * 16)
    await queue.create([other, again], STALE_MS)
    await queue.former.store("report", {other: committed(4)})
    await queue.drop([part(0), part(1)])
    assert (await queue.former.read("report")).committed == {other: committed(4)}


@over_queues
async def test_names_and_positions_out_of_bounds_are_refused(queue: NotificationQueue, clock: ManualClock) -> None:
    await prepare(queue)
    for name in ("", "..", "a/b/c", "x" * 250, "a\0", "_memq-x"):
        for call in (queue.former.read(name), queue.former.store(name, TWO), queue.former.remove(name)):
            with pytest.raises(InvalidNameError):
                await call
    for what, wrong in WRONG.items():
        with pytest.raises(InvalidRequestError):
            await queue.former.store("report", {part(1): committed(1, partition=1), part(0): wrong})
        assert (await queue.former.read("report")).committed == TWO, what


@pytest.mark.anyio
async def test_a_group_with_members_takes_no_position() -> None:
    queue = MemoryQueue(ManualClock())
    await prepare(queue)
    queue.former.groups["report"] = former = FormerGroup("report", 3, ("m", "n"), TWO)
    with pytest.raises(InvalidRequestError, match="2"):
        await queue.former.store("report", {part(0): committed(1)})
    assert await queue.former.read("report") == former
    await queue.former.store("audit", {part(0): committed(1)})
    assert (await queue.former.read("audit")).members == ()


@pytest.mark.parametrize(("now_ms", "active"), [(5_000, True), (5_999, True), (6_000, False)])
@pytest.mark.parametrize("sign", [1, -1])  # -1: the machine was started again, and its clock is behind
def test_a_member_in_a_file_is_active_for_its_session_time_out(now_ms: int, sign: int, *, active: bool) -> None:
    member = FormerMember(session_timeout_ms=1_000, heard_ms=sign * 5_000)
    assert member.is_active(sign * now_ms) is active
    assert FormerMember(session_timeout_ms=1_000, heard_ms=now_ms).is_active(5_000) is active
