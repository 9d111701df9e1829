"""Times at which entries are due. Pure."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

Entry = TypeVar("Entry", bound=tuple[Any, ...])
SPARE = 1_024  # stale entries of an agenda, beyond as many as are live


class Agenda(Generic[Entry]):
    """A heap of tuples that begin with a time.

    Stale entries are removed when they are due, or by `trim` when they are more than half of all. So the number of live
    entries bounds the memory, however far away their times are.
    """

    __slots__ = ("_entries", "_is_live")

    def __init__(self, is_live: Callable[[Entry], bool]) -> None:
        self._is_live = is_live
        self._entries: list[Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def next(self) -> float:
        """The time of the first entry; infinite without an entry."""
        return self._entries[0][0] if self._entries else math.inf

    def push(self, entry: Entry) -> None:
        """Add an entry."""
        heapq.heappush(self._entries, entry)

    def until(self, time: float) -> Iterator[Entry]:
        """Remove and yield the entries up to a time; some may be stale."""
        while self._entries and self._entries[0][0] <= time:
            yield heapq.heappop(self._entries)

    def trim(self, live_max: int) -> None:
        """Drop stale and repeated entries if there are many; `live_max` is an upper bound of live ones."""
        if len(self._entries) > 2 * live_max + SPARE:
            self.drop_stale()

    def drop_stale(self) -> None:
        """Drop stale and repeated entries."""
        if self._entries:
            self._entries = list({each for each in self._entries if self._is_live(each)})
            heapq.heapify(self._entries)
