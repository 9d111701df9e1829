"""Exact bounds of every queue, and the checks of a SQLite file before the first write."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from memq import notification
from memq.errors import EpochFencedError, InvalidRequestError, MemqError, QueueError, TooLargeError
from memq.limits import POINTER_BYTES_MAX
from memq.notification import Publication, Span, check_epoch, check_position, check_publication, checked_span
from memq.notification.sqlite import log
from memq.notification.sqlite.queue import SqliteQueue
from memq.runtime.clock import SystemClock
from memq.runtime.sqlite_file import is_sound
from memq.topic import Committed, Position, ReadPartition, Totals
from tests.contract.queues import check_close_ends_a_wait, part

PARTITION = ReadPartition("clicks", "0" * 32, 3)
EPOCH_END, TIME_MS_END = notification.EPOCH_END, notification.TIME_MS_END
OFFSET_END, INDEX_END, TOTAL_END = notification.OFFSET_END, notification.RECORD_INDEX_END, notification.TOTAL_END


def publication(epoch: int = 1, time_ms: int = 1, size: int = 1) -> Publication:
    return Publication(PARTITION, 0, epoch, time_ms, b"x" * size)


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        (publication(0, 0, 1), None),
        (publication(0, 0, 0), InvalidRequestError),
        (publication(EPOCH_END - 1, TIME_MS_END - 1, POINTER_BYTES_MAX), None),
        (publication(epoch=-1), InvalidRequestError),
        (publication(epoch=EPOCH_END), InvalidRequestError),
        (publication(time_ms=-1), InvalidRequestError),
        (publication(time_ms=TIME_MS_END), InvalidRequestError),
        (publication(size=POINTER_BYTES_MAX + 1), TooLargeError),
    ],
    ids=str,
)
def test_a_publication_has_numbers_that_every_queue_can_hold(asked: Publication, error: type[MemqError] | None) -> None:
    if error is None:
        check_publication(asked)
        return
    with pytest.raises(error):
        check_publication(asked)


def test_an_epoch_is_over_when_a_higher_one_has_published() -> None:
    check_epoch(publication(epoch=5), 5)
    with pytest.raises(EpochFencedError, match=r"epoch 5 of partition 0 of topic 'clicks' is over: .* epoch 6"):
        check_epoch(publication(epoch=5), 6)


def at(offset: int, index: int = 0, records: int = 0, size: int = 0, partition: int = 3) -> Committed:
    return Committed(Position(partition, offset, index), Totals(records, size))


@pytest.mark.parametrize("place", [at(0), at(OFFSET_END - 1, INDEX_END - 1, TOTAL_END - 1, TOTAL_END - 1)])
def test_the_least_and_the_greatest_position_can_be_committed(place: Committed) -> None:
    check_position(PARTITION, place)


@pytest.mark.parametrize(
    ("place", "wrong"),
    [
        (at(0, partition=4), "is not one of read partition 3"),
        (at(OFFSET_END), "is out of bounds"),
        (at(0, INDEX_END), "is out of bounds"),
        (at(0, 0, TOTAL_END), "are out of bounds"),
        (at(0, 0, 0, TOTAL_END), "are out of bounds"),
        (at(0, 0, -1), "are out of bounds"),
        (at(0, 0, 0, -1), "are out of bounds"),
        (at(-1), "is out of bounds"),
        (at(0, -1), "is out of bounds"),
    ],
)
def test_no_other_position_can(place: Committed, wrong: str) -> None:
    with pytest.raises(InvalidRequestError, match=wrong):
        check_position(PARTITION, place)


@pytest.mark.parametrize(("begin", "end", "sound"), [(0, 0, True), (3, 3, True), (-1, 0, False), (3, 2, False)])
def test_a_span_does_not_end_before_it_begins(begin: int, end: int, *, sound: bool) -> None:
    if sound:
        assert checked_span(PARTITION, begin, end) == Span(begin, end)
        return
    with pytest.raises(QueueError, match="begins at"):
        checked_span(PARTITION, begin, end)


# ---- a file of SQLite ----------------------------------------------------------------------------


def test_a_check_fails_while_nobody_can_write(tmp_path: Path) -> None:
    async def work() -> None:
        queue = SqliteQueue(tmp_path / "queue.sqlite", SystemClock(), busy_timeout_ms=1)
        await queue.check()
        with closing(sqlite3.connect(tmp_path / "queue.sqlite", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(QueueError, match="locked"):
                await queue.check()
        await queue.check()
        await queue.close()

    asyncio.run(work())


def test_positions_go_with_their_partition_and_a_closed_queue_holds_no_file(tmp_path: Path) -> None:
    async def work() -> None:
        queue = SqliteQueue(tmp_path / "queue.sqlite", SystemClock(), poll_interval_ms=1)
        other = ReadPartition("clicks", "0" * 32, 4)
        await queue.create([PARTITION, other], 1_000)
        await queue.former.store("g", {PARTITION: at(0), other: at(0, partition=4)})
        await queue.wait({PARTITION: 0}, 0.0)
        await queue.drop([PARTITION])
        assert list((await queue.former.read("g")).committed) == [other]
        await queue.create([PARTITION], 1_000)
        assert list((await queue.former.read("g")).committed) == [other], "the new one is another partition"
        await queue.close()
        await queue.close()

    asyncio.run(work())
    links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    assert not [link for link in links if os.path.lexists(link) and str(tmp_path) in os.readlink(link)]


def test_a_file_checks_few_rows_to_create_and_to_drop_many_partitions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each new partition cost a check of all rows: 2,000 at once held the file's lock for 17 s."""
    count, checks = 200, 0

    def counted(table: str, row: tuple[Any, ...], of: int = 0) -> bool:
        nonlocal checks
        checks += 1
        return is_sound(table, row, of)

    async def work() -> None:
        queue = SqliteQueue(tmp_path / "queue.sqlite", SystemClock())
        partitions = [ReadPartition("clicks", "0" * 32, number) for number in range(count)]
        await queue.create([*partitions, *partitions], 1_000)
        await queue.create([ReadPartition("views", "1" * 32, number) for number in range(count)], 1_000)
        await queue.drop(partitions)
        await queue.drop(partitions)
        assert len(await queue.partitions("views")) == count
        assert await queue.partitions("clicks") == []
        await queue.close()

    monkeypatch.setattr(log, "is_sound", counted)
    asyncio.run(work())
    assert checks < 20 * count


@pytest.mark.parametrize("steps", [0, 1, 2, 50])
@pytest.mark.parametrize("followed", [False, True])
def test_a_wait_ends_with_the_close_of_its_file(tmp_path: Path, steps: int, *, followed: bool) -> None:
    """It lasted for its whole time, or failed with an AssertionError, since it began a task after the stop."""

    async def work() -> None:
        queue = SqliteQueue(tmp_path / "queue.sqlite", SystemClock())
        await queue.create([part(0)], 1_000)
        await check_close_ends_a_wait(queue, steps, followed=followed)

    asyncio.run(work())
