"""Offsets at which a log may be trimmed: none separates two pointers of one batch, which a slow queue took twice."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from memq.compaction.plan import trim_offset
from memq.format.pointer import Location, Pointer, encode_pointer
from memq.notification import Publication
from memq.notification.memory import MemoryQueue
from memq.topic import ReadPartition
from tests.contract.manual_clock import ManualClock

LOG = ReadPartition("clicks", "0" * 31 + "1", 0)
DAMAGED, OPENED = "damaged", "opened"
Written = int | tuple[int, int, int] | str


def body_of(written: Written) -> bytes:
    """Return a pointer: of a batch by its number, or by writer, epoch and number."""
    if written == DAMAGED:
        return b"{"
    if isinstance(written, str):
        return encode_pointer(pointer(written, (0, 1, 0)))
    return encode_pointer(pointer("data", written if isinstance(written, tuple) else (0, 1, written)))


def pointer(kind: str, batch: tuple[int, int, int]) -> Pointer:
    writer, epoch, number = batch
    places = (Location(store="main", key="k", offset=0, length=1),) if kind == "data" else ()
    return Pointer(
        kind=kind,
        cluster="c",
        topic=LOG.topic,
        topic_id=LOG.topic_id,
        partition=writer,
        epoch=epoch,
        batch_sequence=number,
        locations=places,
        records=len(places),
    )


def trim_offsets(log: Sequence[Written], begin: int = 0) -> list[int]:
    """Return where a log that begins at an offset is trimmed, for each bound from there to two after its end."""

    async def work() -> list[int]:
        queue = MemoryQueue(ManualClock())
        await queue.create([LOG], 1_000)
        for written in log:
            await queue.publish(Publication(LOG, 0, 1, 0, body_of(written)))
        await queue.trim(LOG, begin)
        return [await trim_offset(queue, LOG, before) for before in range(begin, len(log) + 3)]

    return asyncio.run(work())


@pytest.mark.parametrize(
    ("log", "offsets"),
    [
        ([5, 6, 7], [0, 1, 2, 3]),
        ([5, 6, 7, 5, 8], [0, 0, 0, 0, 4, 5]),
        ([4, 5, 6, 5, 7], [0, 1, 1, 1, 4, 5]),
        ([5, 5, 5, 6], [0, 0, 0, 3, 4]),
        ([5, 6, 5, 7, 6, 8], [0, 0, 0, 0, 0, 5, 6]),
        ([5, 6, 5, 7, 8, 7, 9], [0, 0, 0, 3, 3, 3, 6, 7]),
        ([5, 9, 6, 6, 7], [0, 1, 2, 2, 4, 5]),
        ([0, 1, 0, 2], [0, 0, 0, 3, 4]),
    ],
)
def test_a_log_is_trimmed_before_the_first_pointer_of_a_batch_or_after_its_last(
    log: list[Written], offsets: list[int]
) -> None:
    assert trim_offsets(log) == [*offsets, len(log) + 1, len(log) + 2]


@pytest.mark.parametrize(
    "log",
    [
        [(0, 1, 5), (1, 1, 5), (0, 2, 5), (1, 2, 5)],
        [OPENED, 0, OPENED, 1, OPENED],
        [DAMAGED, 5, DAMAGED, 6],
    ],
)
def test_a_batch_of_another_writer_or_epoch_and_entries_without_one_allow_every_offset(log: list[Written]) -> None:
    assert trim_offsets(log) == list(range(len(log) + 3))


@pytest.mark.parametrize("between", [DAMAGED, OPENED, (1, 1, 5), (0, 2, 5)])
def test_entries_between_two_pointers_of_a_batch_stay_with_them(between: Written) -> None:
    assert trim_offsets([4, 5, between, 5, 6])[:6] == [0, 1, 1, 1, 4, 5]


def test_pointers_that_have_left_the_log_count_no_more() -> None:
    assert trim_offsets([5, 6, 5, 7], begin=1) == [1, 2, 3, 4, 5, 6]
    assert trim_offsets([4, 5, 6, 5, 7], begin=1) == [1, 1, 1, 4, 5, 6, 7]
