"""Finds the positions of groups in a restored log, whose pointers have other offsets. Pure.

Theory (G5). A position names the batches that it covers: for each write partition an epoch below which all batches are
covered, and the next batch of each epoch from there on. Reading begins at the first restored pointer that the position
does not cover. Covered batches behind it are read again; no position is too late.

One kind of batch needs care: batches of a lower epoch that never got a pointer. A restore names them, because nothing
tells them from others. It then leaves out the same blocks of later batches, for two dedup windows. The producers sent
these blocks again, and perhaps they were published after the position. So a batch below the covered epochs counts as
covered only if it was sealed earlier than this time before the last covered batch.

A broker may forward blocks acked with 1 much later, when their first batch had no pointer. Then the restored log names
both. A reader behind the first one would drop the second one as a copy. So reading begins at the first one, if the
second one is behind the position.

A restore gives staged batches other numbers, because nothing in the store says after which batch they were published.
So a staged batch is never covered, and its number tells nothing about others.

A position that names no batches becomes the beginning. A position in the middle of a batch stays there, if its mark is
that of the batch. The new positions name the same batches, so a second search finds the same.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec.structs import replace

from memq.format.pointer import Pointer, pointer_mark
from memq.topic import CLOCK_ERROR_MS, Committed, Position, TopicSettings, Totals

Batch = tuple[int, int, int]  # write partition, epoch, batch sequence


@dataclass(slots=True)
class _Search:
    """One position: what it covers, by write partition, and where reading begins."""

    floors: dict[int, int]
    next_: dict[tuple[int, int], int]  # by write partition and epoch
    last: dict[int, Batch]  # the last covered batch of the highest epoch
    begin: Committed | None = None

    @classmethod
    def of(cls, committed: Committed) -> _Search:
        """Return the search for a position."""
        floors = {writer: floor for writer, floor, _ in committed.covered}
        next_ = {
            (writer, epoch): number
            for writer, _, numbers in committed.covered
            for epoch, number in zip(numbers[::2], numbers[1::2], strict=True)
        }
        last: dict[int, Batch] = {}
        for (writer, epoch), number in next_.items():
            if number:
                last[writer] = max(last.get(writer, (writer, 0, 0)), (writer, epoch, number - 1))
        return cls(floors, next_, last)


@dataclass(slots=True)
class _Copies:
    """The sequences that a log names more than once.

    `pairs` has for each pointer with such sequences its offset, and that of the first pointer with one of them.
    """

    pairs: list[tuple[int, int]] = field(default_factory=list)
    _known: dict[int, tuple[list[int], list[tuple[int, int]]]] = field(default_factory=dict)

    def add(self, offset: int, pointer: Pointer) -> None:
        """Compare the next pointer with all before it."""
        before = [
            found
            for named in pointer.producers
            for each in named.ranges
            if (found := self._first(named.producer, *each)) is not None
        ]
        if before:
            self.pairs.append((offset, min(before)))
        for named in pointer.producers:
            for first, next_ in named.ranges:
                self._note(named.producer, first, next_, offset)

    def _first(self, producer: int, first: int, next_: int) -> int | None:
        """Return the offset of the first pointer with one of these sequences."""
        firsts, rest = self._known.get(producer, ([], []))
        at = max(bisect_right(firsts, first) - 1, 0)
        found: list[int] = []
        while at < len(firsts) and firsts[at] < next_:
            if rest[at][0] > first:
                found.append(rest[at][1])
            at += 1
        return min(found, default=None)

    def _note(self, producer: int, first: int, next_: int, offset: int) -> None:
        """Note those of these sequences that no pointer before has."""
        firsts, rest = self._known.setdefault(producer, ([], []))
        while first < next_:
            at = bisect_right(firsts, first)
            if at and rest[at - 1][0] > first:
                first = rest[at - 1][0]
                continue
            end = min(next_, firsts[at]) if at < len(firsts) else next_
            firsts.insert(at, first)
            rest.insert(at, (end, offset))
            first = end


@dataclass(slots=True)
class PositionSearch:
    """Searches for positions of one read partition: call `look` for each pointer, then `place` for each.

    `begin` is the first offset of the restored log.
    """

    settings: TopicSettings
    begin: Position
    _searches: dict[Committed, _Search] = field(default_factory=dict)
    _sealed_ms: dict[Batch, int] = field(default_factory=dict)
    _copies: _Copies = field(default_factory=_Copies)
    _places: dict[int, tuple[Totals, int]] = field(default_factory=dict)  # by offset: totals and mark before it
    _before: Totals = field(default_factory=Totals)  # of all pointers that were placed
    _mark: int = 0  # of the last one
    _end: int = 0

    def want(self, wanted: Iterable[Committed]) -> None:
        """Add positions."""
        self._searches |= {each: _Search.of(each) for each in wanted if each.covered}

    def look(self, offset: int, pointer: Pointer) -> None:
        """Note when the last covered batches were sealed."""
        batch = _batch_of(pointer)
        if not _is_staged(pointer) and any(
            search.last.get(pointer.partition) == batch for search in self._searches.values()
        ):
            self._sealed_ms[batch] = pointer.sealed_ms

    def place(self, offset: int, pointer: Pointer) -> None:
        """Compare the next pointer, from the first on again, with all positions."""
        for committed, search in self._searches.items():
            if search.begin is None and not self._is_covered(search, pointer):
                search.begin = self._at(committed, offset, pointer)
        self._copies.add(offset, pointer)
        self._places[offset] = self._before, self._mark
        self._before = self._before.plus(pointer.records, pointer.stored_bytes)
        self._mark, self._end = pointer_mark(pointer), offset + 1

    def result(self, committed: Committed) -> Committed:
        """Return the position in the restored log."""
        search = self._searches.get(committed)
        if search is None:
            return Committed(self.begin, Totals())
        end = Position(self.begin.read_partition, max(self._end, self.begin.pointer_offset))
        found = search.begin or Committed(end, self._before, self._mark, committed.covered)
        begin = found.position.pointer_offset
        copied = min((first for offset, first in self._copies.pairs if first < begin <= offset), default=None)
        if copied is None:
            return found
        totals, mark = self._places[copied]
        return Committed(Position(self.begin.read_partition, copied), totals, mark, committed.covered)

    def _is_covered(self, search: _Search, pointer: Pointer) -> bool:
        if _is_staged(pointer):
            return False
        writer, epoch, batch = _batch_of(pointer)
        if batch < search.next_.get((writer, epoch), 0):
            return True
        if epoch >= search.floors.get(writer, 0):
            return False
        last = search.last.get(writer)
        last_ms = self._sealed_ms.get(last) if last is not None else None
        return last_ms is not None and pointer.sealed_ms < last_ms - self._copies_ms

    @property
    def _copies_ms(self) -> int:
        """How long before the last covered batch a batch without a pointer may have blocks that come after it."""
        settings = self.settings
        return 2 * settings.dedup_window_ms + 2 * (settings.stale_publish_ms + CLOCK_ERROR_MS)

    def _at(self, committed: Committed, offset: int, pointer: Pointer) -> Committed:
        """Return the position at a pointer, or in its batch if it was there."""
        index, mark = committed.position.record_index, self._mark
        if index and pointer_mark(replace(pointer, totals=committed.totals)) == committed.mark:
            mark = pointer_mark(pointer)
        else:
            index = 0
        position = Position(self.begin.read_partition, offset, index)
        return Committed(position, self._before, mark, committed.covered)


def _batch_of(pointer: Pointer) -> Batch:
    return pointer.partition, pointer.epoch, pointer.batch_sequence


def _is_staged(pointer: Pointer) -> bool:
    return pointer.kind == "data" and any(each.batch_id for each in pointer.named)
