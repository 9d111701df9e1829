"""The contract of the notification queue's log: publish, read, span, seek, wait, trim, drop, over every queue."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from memq.errors import (
    EpochFencedError,
    InvalidRequestError,
    NotFoundError,
    QueueError,
    QueueRefusedError,
    TooLargeError,
)
from memq.limits import POINTER_BYTES_MAX
from memq.notification import FROM_THE_LOG, Entry, NotificationQueue, Span
from memq.notification.log_reader import all_entries, entries_between
from tests.contract.manual_clock import ManualClock
from tests.contract.queues import STALE_MS, over_queues, over_queues_that_refuse, part, publication
from tests.soak import repetitions

ALL = 1 << 30
LONG = repetitions(few=1_100, many=11_000)  # entries; SQLite deletes 5,000 in a transaction


async def fill(queue: NotificationQueue, clock: ManualClock, count: int, partition: int = 0) -> None:
    for number in range(count):
        await queue.publish(publication(clock, b"%d" % number, partition=part(partition)))


async def bodies(queue: NotificationQueue, offset: int = 0, partition: int = 0) -> list[bytes]:
    return [entry.body for entry in await queue.read(part(partition), offset, ALL)]


@over_queues
async def test_published_entries_are_read_in_order(queue: NotificationQueue, clock: ManualClock) -> None:
    await queue.create([part()], STALE_MS)
    assert await queue.span(part()) == Span(0, 0)
    expected = []
    for number in range(5):
        body = bytes([number]) * (number + 1)
        offset = await queue.publish(publication(clock, body))
        expected.append(Entry(offset, clock.wall_ms(), body))
        clock.advance(7)
    assert [entry.offset for entry in expected] == [0, 1, 2, 3, 4]
    assert list(await queue.read(part(), 0, ALL)) == expected
    assert list(await queue.read(part(), 3, ALL)) == expected[3:]
    assert list(await queue.read(part(), 5, ALL)) == []
    assert list(await queue.read(part(), 99, ALL)) == []
    assert await queue.span(part()) == Span(0, 5)


@over_queues
async def test_topics_with_similar_names_have_logs_of_their_own(queue: NotificationQueue, clock: ManualClock) -> None:
    names = ["a/b", "a.b", "a_b", "a-b", "b", "a/b.b", "a.b/b"]
    logs = [part(topic=name, topic_id=f"{number:032x}") for number, name in enumerate(names, 1)]
    await queue.create(logs, STALE_MS)
    for log in logs:
        await queue.publish(publication(clock, log.topic.encode(), partition=log))
    for log in logs:
        assert [entry.body for entry in await queue.read(log, 0, ALL)] == [log.topic.encode()]
    await queue.drop(logs[:1])
    with pytest.raises(NotFoundError):
        await queue.span(logs[0])
    for log in logs[1:]:
        assert await queue.span(log) == Span(0, 1)


@over_queues
async def test_one_entry_can_be_read_from_the_log_itself(queue: NotificationQueue, clock: ManualClock) -> None:
    await queue.create([part()], STALE_MS)
    await fill(queue, clock, 4)
    await queue.trim(part(), 1)
    found = [await queue.read(part(), offset, FROM_THE_LOG) for offset in range(5)]
    assert [[entry.body for entry in entries] for entries in found] == [[b"1"], [b"1"], [b"2"], [b"3"], []]


@over_queues
async def test_a_pointer_without_bytes_is_refused_since_it_would_be_a_lost_one(
    queue: NotificationQueue, clock: ManualClock
) -> None:
    await queue.create([part()], STALE_MS)
    with pytest.raises(InvalidRequestError):
        await queue.publish(publication(clock, b""))
    assert await queue.span(part()) == Span(0, 0)


@over_queues
async def test_a_read_is_about_as_large_as_asked_for_and_never_stuck(
    queue: NotificationQueue, clock: ManualClock
) -> None:
    await queue.create([part()], STALE_MS)
    for size in (100, 100, 100, 5_000, 100):
        await queue.publish(publication(clock, bytes(size)))
    assert [len(await queue.read(part(), 0, limit)) for limit in (0, 1, 100, 199, 200, 300, 5_299, 5_300)] == [
        *(1, 1, 1, 1, 2, 3, 3, 4)
    ]
    assert [entry.offset for entry in await queue.read(part(), 3, 1)] == [3]


@over_queues
async def test_a_read_says_where_reading_continues_and_only_the_end_is_empty(
    queue: NotificationQueue, clock: ManualClock
) -> None:
    """Whatever a read leaves out, nothing else lies before `next`; without entries `next` is at or behind the end."""
    await queue.create([part(0), part(1)], STALE_MS)
    assert (await queue.read(part(1), 0, ALL)).next == 0
    await fill(queue, clock, 6)
    for offset in range(9):
        for bytes_max in (1, 3, ALL):
            end = (await queue.span(part())).end
            entries = await queue.read(part(), offset, bytes_max)
            assert entries.next == (entries[-1].offset + 1 if entries else max(offset, end))
            assert bool(entries) == (offset < end)
    await queue.trim(part(), 6)
    for offset in range(7):
        assert ((await queue.read(part(), offset, ALL)).next, (await queue.span(part())).end) == (6, 6)
    assert [page async for page in all_entries(queue, part())] == []
    await fill(queue, clock, 2)
    assert [entry.offset async for page in all_entries(queue, part()) for entry in page] == [6, 7]


@over_queues
async def test_nothing_before_an_end_that_was_read_is_taken_for_the_end(
    queue: NotificationQueue, clock: ManualClock
) -> None:
    await queue.create([part()], STALE_MS)
    await fill(queue, clock, 3)
    with pytest.raises(QueueError, match="shows nothing at offset 3, and its end was 4 before"):
        _ = [page async for page in entries_between(queue, part(), 1, 4)]


@over_queues
async def test_partitions_are_apart(queue: NotificationQueue, clock: ManualClock) -> None:
    await queue.create([part(0), part(1)], STALE_MS)
    await fill(queue, clock, 3, partition=0)
    await fill(queue, clock, 1, partition=1)
    assert (await queue.span(part(0)), await queue.span(part(1))) == (Span(0, 3), Span(0, 1))
    assert await bodies(queue, partition=1) == [b"0"]


@over_queues
async def test_many_publishes_at_once_get_one_offset_each(queue: NotificationQueue, clock: ManualClock) -> None:
    await queue.create([part()], STALE_MS)
    offsets = await asyncio.gather(*(queue.publish(publication(clock, b"%d" % number)) for number in range(300)))
    assert sorted(offsets) == list(range(300))
    found = await bodies(queue)
    assert [found[offset] for offset in offsets] == [b"%d" % number for number in range(300)]


@over_queues
async def test_missing_name_is_not_found(queue: NotificationQueue, clock: ManualClock) -> None:
    await queue.create([part(0)], STALE_MS)
    absent = part(0, topic_id="ff" * 16)
    for call in (
        queue.publish(publication(clock, partition=absent)),
        queue.read(absent, 0, ALL),
        queue.span(absent),
        queue.seek_time(absent, 0),
        queue.wait({part(0): 0, absent: 0}, 0.001),
        queue.trim(absent, 1),
    ):
        with pytest.raises(NotFoundError, match="clicks"):
            await call


@over_queues
async def test_bad_publications_are_refused(queue: NotificationQueue, clock: ManualClock) -> None:
    await queue.create([part()], STALE_MS)
    await queue.publish(publication(clock, bytes(POINTER_BYTES_MAX), epoch=0))
    with pytest.raises(TooLargeError, match="65537"):
        await queue.publish(publication(clock, bytes(POINTER_BYTES_MAX + 1)))
    for odd in (publication(clock, epoch=-1), publication(clock, epoch=1 << 70), publication(clock, age_ms=-(1 << 70))):
        with pytest.raises(InvalidRequestError):
            await queue.publish(odd)
    assert await queue.span(part()) == Span(0, 1)


# ---- staleness -------------------------------------------------------------------------------


@over_queues_that_refuse("epoch")
async def test_a_lower_epoch_is_fenced(queue: NotificationQueue, clock: ManualClock) -> None:
    assert not queue.refuses_by_age
    await queue.create([part()], STALE_MS)
    await queue.publish(publication(clock, b"1", epoch=3))
    await queue.publish(publication(clock, b"2", epoch=3))
    with pytest.raises(EpochFencedError, match="epoch 2 of partition 0"):
        await queue.publish(publication(clock, b"late", epoch=2))
    await queue.publish(publication(clock, b"3", write=1, epoch=1))
    await queue.publish(publication(clock, b"4", epoch=5))
    with pytest.raises(EpochFencedError):
        await queue.publish(publication(clock, b"late", epoch=3))
    assert await bodies(queue) == [b"1", b"2", b"3", b"4"]


@over_queues_that_refuse("epoch")
async def test_a_fence_outlives_the_entries_that_raised_it(queue: NotificationQueue, clock: ManualClock) -> None:
    await queue.create([part()], STALE_MS)
    await queue.publish(publication(clock, epoch=7))
    await queue.trim(part(), 1)
    with pytest.raises(EpochFencedError):
        await queue.publish(publication(clock, epoch=6))


@over_queues_that_refuse("epoch")
async def test_age_does_not_matter_where_epochs_fence(queue: NotificationQueue, clock: ManualClock) -> None:
    await queue.create([part()], STALE_MS)
    await queue.publish(publication(clock, age_ms=10 * STALE_MS))
    await queue.publish(publication(clock, age_ms=-STALE_MS))
    assert await queue.span(part()) == Span(0, 2)


@over_queues_that_refuse("epoch")
async def test_one_fenced_publish_does_not_fail_the_others(queue: NotificationQueue, clock: ManualClock) -> None:
    await queue.create([part()], STALE_MS)
    await queue.publish(publication(clock, b"first", epoch=2))
    epochs = [2, 1, 2, 1, 1, 2, 3, 2, 3]
    results = await asyncio.gather(
        *(queue.publish(publication(clock, b"%d" % number, epoch=epoch)) for number, epoch in enumerate(epochs)),
        return_exceptions=True,
    )
    assert [isinstance(result, EpochFencedError) for result in results] == [
        *(False, True, False, True, True, False, False, True, False)
    ]
    assert [result for result in results if isinstance(result, int)] == [1, 2, 3, 4, 5]
    assert await bodies(queue) == [b"first", b"0", b"2", b"5", b"6", b"8"]


@over_queues_that_refuse("age")
async def test_publications_that_are_too_old_or_ahead_are_refused(queue: NotificationQueue, clock: ManualClock) -> None:
    assert queue.refuses_by_age
    await queue.create([part()], STALE_MS)
    for age_ms in (0, STALE_MS, -10_000):
        await queue.publish(publication(clock, age_ms=age_ms))
    for age_ms in (STALE_MS + 1, -10_001):
        with pytest.raises(QueueRefusedError, match=f"{age_ms} ms old"):
            await queue.publish(publication(clock, age_ms=age_ms))
    assert await queue.span(part()) == Span(0, 3)


@over_queues_that_refuse("age")
async def test_epochs_do_not_matter_where_age_refuses(queue: NotificationQueue, clock: ManualClock) -> None:
    await queue.create([part()], STALE_MS)
    await queue.publish(publication(clock, epoch=5))
    assert await queue.publish(publication(clock, epoch=1)) == 1


@over_queues_that_refuse("age")
async def test_the_age_that_is_refused_can_be_altered(queue: NotificationQueue, clock: ManualClock) -> None:
    await queue.create([part()], STALE_MS)
    await queue.create([part()], 2 * STALE_MS)
    assert await queue.publish(publication(clock, age_ms=2 * STALE_MS)) == 0


# ---- create, trim, drop ----------------------------------------------------------------------


@over_queues
async def test_making_a_partition_twice_keeps_it(queue: NotificationQueue, clock: ManualClock) -> None:
    await queue.create([part()], STALE_MS)
    await fill(queue, clock, 2)
    await queue.create([part(), part(1), part(1)], STALE_MS)
    assert (await queue.span(part()), await queue.span(part(1))) == (Span(0, 2), Span(0, 0))


@over_queues
async def test_trimming_takes_the_front_and_no_offset_comes_twice(queue: NotificationQueue, clock: ManualClock) -> None:
    await queue.create([part()], STALE_MS)
    await fill(queue, clock, 5)
    await queue.trim(part(), 3)
    assert await queue.span(part()) == Span(3, 5)
    assert [entry.offset for entry in await queue.read(part(), 0, ALL)] == [3, 4]
    await queue.trim(part(), 2)
    await queue.trim(part(), -1)
    assert await queue.span(part()) == Span(3, 5)
    await queue.trim(part(), 99)
    assert await queue.span(part()) == Span(5, 5)
    assert list(await queue.read(part(), 0, ALL)) == []
    assert await queue.publish(publication(clock)) == 5


@over_queues
async def test_a_long_trim_takes_all(queue: NotificationQueue, clock: ManualClock) -> None:
    other = part(topic="others")
    await queue.create([part(), other], 20 * STALE_MS)  # so many take their time
    await asyncio.gather(*(queue.publish(publication(clock, write=number % 100)) for number in range(LONG)))
    await queue.publish(publication(clock, b"0", partition=other))
    await queue.trim(part(), LONG - 1)
    assert await queue.span(part()) == Span(LONG - 1, LONG)
    await queue.drop([part()])
    assert [entry.body for entry in await queue.read(other, 0, ALL)] == [b"0"]


@over_queues
async def test_a_dropped_partition_is_gone_and_a_new_topic_of_the_name_sees_nothing(
    queue: NotificationQueue, clock: ManualClock
) -> None:
    again = part(0, topic_id="0b" * 16)
    await queue.create([part(0), part(1)], STALE_MS)
    await queue.publish(publication(clock, epoch=9))
    await queue.drop([part(0), part(1), part(7)])
    await queue.drop([part(0)])
    await queue.create([again], STALE_MS)
    for gone in (part(0), part(1)):
        with pytest.raises(NotFoundError):
            await queue.span(gone)
    assert await queue.publish(publication(clock, b"new", partition=again, epoch=1)) == 0
    assert [entry.body for entry in await queue.read(again, 0, ALL)] == [b"new"]


# ---- time ------------------------------------------------------------------------------------


@over_queues
async def test_seeking_a_time_finds_the_first_entry_at_or_after_it(
    queue: NotificationQueue, clock: ManualClock
) -> None:
    """Against a scan of all entries, with times out of order, before and after trims."""
    draw = Random(7)
    clock.advance(-150_000)  # where the queue's clock is a real one, none of these times may lie ahead of it
    await queue.create([part()], 10 * STALE_MS)
    assert await queue.seek_time(part(), 0) == 0
    for _ in range(60):
        await queue.publish(publication(clock, age_ms=draw.randrange(-9_000, 9_000)))
        clock.advance(draw.randrange(2_000))
    for begin in (0, 1, 17, 18, 40, 59, 60):
        await queue.trim(part(), begin)
        entries = await queue.read(part(), 0, ALL)
        for time_ms in {entry.time_ms + step for entry in entries for step in (-1, 0, 1)} | {0, clock.wall_ms() * 2}:
            expected = next((entry.offset for entry in entries if entry.time_ms >= time_ms), 60)
            assert await queue.seek_time(part(), time_ms) == expected


@over_queues
async def test_seeking_a_time_in_a_log_that_is_empty_or_trimmed_to_its_end_finds_the_end(
    queue: NotificationQueue, clock: ManualClock
) -> None:
    await queue.create([part(0), part(1)], STALE_MS)
    await fill(queue, clock, 3)
    await fill(queue, clock, 1, partition=1)
    times = (0, clock.wall_ms(), clock.wall_ms() * 2)
    await queue.trim(part(), 3)
    assert [await queue.seek_time(part(), time_ms) for time_ms in times] == [3, 3, 3]
    clock.advance(5)
    offset = await queue.publish(publication(clock, b"new"))
    assert [await queue.seek_time(part(), time_ms) for time_ms in times] == [offset, offset, offset + 1]
    assert await queue.seek_time(part(1), 0) == 0


@over_queues
async def test_seek_returns_the_first_entry_that_a_read_returns(queue: NotificationQueue, clock: ManualClock) -> None:
    """Whether offsets are dense or not: nothing from there on is older, but by a queue time that went back."""
    await queue.create([part()], 10 * STALE_MS)
    clock.advance(-100_000)
    times = []
    for number in range(20):
        await queue.publish(publication(clock, b"%d" % number))
        times.append(clock.wall_ms())
        clock.advance(1_000)
    for number, time_ms in enumerate(times):
        for asked_ms, first in ((time_ms, number), (time_ms + 1, number + 1)):
            offset = await queue.seek_time(part(), asked_ms)
            assert [entry.body for entry in await queue.read(part(), offset, 1)] == [b"%d" % first][: 20 - first]


# ---- waiting ---------------------------------------------------------------------------------


@over_queues
async def test_waiting_for_what_is_there_returns(queue: NotificationQueue, clock: ManualClock) -> None:
    await queue.create([part(0), part(1)], STALE_MS)
    await fill(queue, clock, 2)
    for _ in range(3):
        await queue.wait({part(1): 0, part(0): 1}, 3_600)
    await queue.trim(part(0), 2)
    await queue.wait({part(0): 0, part(1): 5}, 3_600)


@over_queues
async def test_waiting_in_vain_ends_with_the_timeout(queue: NotificationQueue, clock: ManualClock) -> None:
    await queue.create([part()], STALE_MS)
    await fill(queue, clock, 2)
    await queue.wait({part(): 2}, 0.005)
    await queue.wait({}, 0.005)
    await queue.wait({part(): 2}, 0)


@over_queues
async def test_a_publish_wakes_only_the_readers_that_wait_for_it(queue: NotificationQueue, clock: ManualClock) -> None:
    await queue.create([part(0), part(1)], STALE_MS)
    either = asyncio.create_task(queue.wait({part(0): 0, part(1): 0}, 3_600))
    second = asyncio.create_task(queue.wait({part(1): 1}, 3_600))
    other = asyncio.create_task(queue.wait({part(0): 0}, 3_600))
    await queue.span(part())
    await queue.publish(publication(clock, partition=part(1)))
    await either
    for _ in range(5):  # after all that the publish has woken
        await asyncio.sleep(0)
    assert not second.done()
    await queue.publish(publication(clock, partition=part(1)))
    await second
    assert not other.done()
    other.cancel()
    with pytest.raises(asyncio.CancelledError):
        await other


@over_queues
async def test_a_drop_wakes_waiting_readers(queue: NotificationQueue, clock: ManualClock) -> None:
    await queue.create([part()], STALE_MS)
    waiting = asyncio.create_task(queue.wait({part(): 0}, 3_600))
    await queue.span(part())
    await queue.drop([part()])
    await asyncio.gather(waiting, return_exceptions=True)
    with pytest.raises(NotFoundError):
        await queue.read(part(), 0, ALL)


@over_queues
async def test_readers_that_follow_see_every_entry_once(queue: NotificationQueue, clock: ManualClock) -> None:
    await queue.create([part()], STALE_MS)

    async def follow() -> list[bytes]:
        found: list[bytes] = []
        while len(found) < 200:
            await queue.wait({part(): len(found)}, 3_600)
            found.extend(entry.body for entry in await queue.read(part(), len(found), 50))
        return found

    readers = [asyncio.create_task(follow()) for _ in range(3)]
    await fill(queue, clock, 200)
    assert await asyncio.gather(*readers) == [[b"%d" % number for number in range(200)]] * 3


@over_queues
async def test_check_passes_and_closing_twice_is_fine(queue: NotificationQueue, clock: ManualClock) -> None:
    await queue.check()
    await queue.close()
