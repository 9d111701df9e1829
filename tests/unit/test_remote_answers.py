"""A client checks a broker's answers about its queue: an older broker may pass on impossible ones."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec
import pytest

from memq.errors import QueueError
from memq.notification.log_reader import entries_between
from memq.notification.remote import RemoteQueue, ref_of
from memq.protocol.frames import Api
from memq.protocol.messages import PartitionEntries, PollAnswer, WireEntry
from memq.topic import ReadPartition

PARTITION = ReadPartition("clicks", "0a" * 16, 0)
T = TypeVar("T")


def queue_of(made: PollAnswer) -> RemoteQueue:
    """Return a queue whose broker always answers so."""

    async def ask(api: Api, message: msgspec.Struct, answer: type[Any], *, timeout_s: float) -> Any:
        return made

    return RemoteQueue(ask)


def answered(begin: int, end: int, offsets: tuple[int, ...] = (), **more: Any) -> PollAnswer:
    entries = [WireEntry(offset=offset, time_ms=1, pointer=msgspec.Raw(b"{}")) for offset in offsets]
    part = PartitionEntries(partition=ref_of(PARTITION), begin=begin, end=end, entries=entries, **more)
    return PollAnswer(partitions=[part])


def result(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


@pytest.mark.parametrize(("begin", "end"), [(0, -1001), (-1001, 5), (6, 5), (-1, -1)])
def test_a_span_that_can_not_be_is_an_error_that_may_pass(begin: int, end: int) -> None:
    queue = queue_of(answered(begin, end))
    for call in (queue.span(PARTITION), queue.read(PARTITION, 0, 1)):
        with pytest.raises(QueueError, match=f"begins at {begin} and ends at {end}"):
            result(call)


def test_an_offset_of_a_time_that_can_not_be_is_an_error_that_may_pass() -> None:
    with pytest.raises(QueueError, match="answered offset -1001 for time 7"):
        result(queue_of(PollAnswer(offset=-1001)).seek_time(PARTITION, 7))


def test_a_partition_that_is_left_out_is_not_at_its_end() -> None:
    with pytest.raises(QueueError, match="left partition 0 of 'clicks' out"):
        result(queue_of(PollAnswer()).read(PARTITION, 0, 1))


@pytest.mark.parametrize(
    ("offsets", "next_", "found"),
    [((3, 4), None, 5), ((3, 4), 7, 7), ((3, 4), 0, 5), ((), None, 3), ((), 9, 9), ((), 0, 3)],
)
def test_reading_continues_where_the_broker_says_or_behind_what_it_showed(
    offsets: tuple[int, ...], next_: int | None, found: int
) -> None:
    more = {} if next_ is None else {"next": next_}
    entries = result(queue_of(answered(0, 9, offsets, **more)).read(PARTITION, 3, 1))
    assert (tuple(entry.offset for entry in entries), entries.next) == (offsets, found)


def test_an_older_broker_that_shows_nothing_has_not_shown_the_end() -> None:
    async def work() -> None:
        queue = queue_of(answered(0, 9))
        with pytest.raises(QueueError, match="shows nothing at offset 3, and its end was 9 before"):
            _ = [page async for page in entries_between(queue, PARTITION, 3, 9)]

    result(work())
