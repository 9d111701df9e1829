"""Pages of a log: entries that one answer omits are requested again before a reader passes them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from memq.errors import QueueError
from memq.notification import Entries, Entry, PointerReader, Publication, Span
from memq.notification.log_reader import all_entries, entries_between, page_before, valid_seek
from memq.notification.memory import MemoryQueue
from memq.runtime.clock import SystemClock
from memq.topic import ReadPartition

LOG = ReadPartition("clicks", "0a" * 16, 0)
END = 6


class Omitting(MemoryQueue):
    """A queue whose answers, in turn, leave out some offsets, or end before some offset; then it answers right."""

    def __init__(self) -> None:
        super().__init__(SystemClock())
        self.omits: list[Sequence[int]] = []
        self.asked: list[int] = []

    async def read(self, partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
        self.asked.append(offset)
        found = await super().read(partition, offset, bytes_max)
        omitted = self.omits.pop(0) if self.omits else ()
        return Entries([entry for entry in found if entry.offset not in omitted], found.next)


async def filled() -> Omitting:
    queue = Omitting()
    await queue.create([LOG], 30_000)
    for number in range(END):
        await queue.publish(Publication(LOG, 0, 1, 1_000 + number, b"%d" % number))
    return queue


def offsets(entries: Sequence[Entry]) -> list[int]:
    return [entry.offset for entry in entries]


@pytest.mark.parametrize("omitted", [[0], [1], [2, 3], [5], [4, 5], [0, 1, 2, 3, 4], [0, 2, 5]])
@pytest.mark.parametrize("first", [0, 1])
def test_entries_that_one_answer_omits_are_in_the_next_page(omitted: list[int], first: int) -> None:
    async def work() -> None:
        queue = await filled()
        queue.omits = [omitted]
        found = [entry async for page in entries_between(queue, LOG, first, END) for entry in page]
        assert offsets(found) == list(range(first, END))

    asyncio.run(work())


@pytest.mark.parametrize(
    ("gone", "pages"), [([2], [[0, 1], [3, 4, 5]]), ([0], [[1, 2, 3, 4, 5]]), ([1, 2, 4], [[0], [3], [5]])]
)
def test_entries_that_no_answer_has_are_skipped(gone: list[int], pages: list[list[int]]) -> None:
    async def work() -> None:
        queue = await filled()
        queue.omits = [gone] * 20
        found = [offsets(page) async for page in all_entries(queue, LOG)]
        assert found == pages
        assert sum(map(len, found)) == END - len(gone)

    asyncio.run(work())


def test_a_page_ends_at_its_first_hole_and_says_where_reading_continues() -> None:
    async def work() -> None:
        queue = await filled()
        whole = await page_before(queue, LOG, 0, END)
        assert (offsets(whole), whole.next, queue.asked) == ([0, 1, 2, 3, 4, 5], END, [0]), "one question suffices"
        queue.omits = [[3]]
        cut = await page_before(queue, LOG, 1, END)
        assert (offsets(cut), cut.next) == ([1, 2], 3)
        queue.omits = [[5]]
        short = await page_before(queue, LOG, 4, END)
        assert (offsets(short), short.next) == ([4], 5)
        assert (await page_before(queue, LOG, END, END)).next == END
        ends = [offsets(page) async for page in entries_between(queue, LOG, 0, 3)]
        assert ends == [[0, 1, 2]], "up to an end below that of the log"
        assert [page async for page in entries_between(queue, LOG, 3, 3)] == []

    asyncio.run(work())


class Silent(MemoryQueue):
    """A queue that shows nothing, and where reading continues."""

    def __init__(self, next_: int) -> None:
        super().__init__(SystemClock())
        self._next = next_

    async def read(self, partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
        return Entries((), self._next)


@pytest.mark.parametrize("next_", [0, 2, 5])
def test_an_empty_answer_before_the_end_is_an_error_that_may_pass(next_: int) -> None:
    with pytest.raises(QueueError, match="shows nothing at offset 2, and its end was 6 before"):
        asyncio.run(page_before(Silent(next_), LOG, 2, END))


def test_an_empty_answer_at_the_end_or_behind_it_is_the_end() -> None:
    for next_ in (END, END + 2):
        assert asyncio.run(page_before(Silent(next_), LOG, 2, END)).next == next_


class Seeking(MemoryQueue):
    """A queue that answers every question for a time with one offset."""

    def __init__(self, queue: MemoryQueue, offset: int) -> None:
        super().__init__(SystemClock())
        self.logs = queue.logs
        self._offset = offset

    async def seek_time(self, partition: ReadPartition, time_ms: int) -> int:
        return self._offset


@pytest.mark.parametrize(("offset", "valid"), [(0, True), (2, True), (3, True), (4, False), (END, False)])
def test_an_offset_for_a_time_is_refused_where_the_entry_before_it_is_not_older(offset: int, *, valid: bool) -> None:
    """Entry 3 is of the time that is asked for."""

    async def work() -> None:
        queue: PointerReader = Seeking(await filled(), offset)
        assert await queue.span(LOG) == Span(0, END)
        if valid:
            assert await valid_seek(queue, LOG, 1_003) == offset
            return
        with pytest.raises(QueueError, match=f"shows offset {offset} for time 1003, and the entry before it is of"):
            await valid_seek(queue, LOG, 1_003)

    asyncio.run(work())
