"""Entries in the order of their times, some of them stale. Pure."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

Entry = TypeVar("Entry", bound=tuple[Any, ...])
SPARE = 1_024  # stale entries beyond as many as are live


class Agenda(Generic[Entry]):
    """A heap of tuples that begin with a time.

    Stale entries go when they are due, or in `trim` when they are more than half of all. So memory is bounded by what
    is live, however far away the times are.
    """

    __slots__ = ("_entries", "_is_live")

    def __init__(self, is_live: Callable[[Entry], bool]) -> None:
        self._is_live = is_live
        self._entries: list[Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def next(self) -> float:
        """The time of the first entry; infinite without one."""
        return self._entries[0][0] if self._entries else math.inf

    def push(self, entry: Entry) -> None:
        """Add an entry."""
        heapq.heappush(self._entries, entry)

    def until(self, time: float) -> Iterator[Entry]:
        """Remove and yield the entries up to a time; some may be stale."""
        while self._entries and self._entries[0][0] <= time:
            yield heapq.heappop(self._entries)

    def trim(self, live_max: int) -> None:
        """Drop stale and repeated entries if they are many; at most `live_max` are live."""
        if len(self._entries) > 2 * live_max + SPARE:
            self._entries = list({each for each in self._entries if self._is_live(each)})
            heapq.heapify(self._entries)
