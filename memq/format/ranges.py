"""Sets of integers as sorted half-open ranges: which sequences of a producer are known.

The broker, the consumer and the audit share this class.
Records of one producer nearly always arrive in order. Then the set is one range that grows at its end, and
`add` costs one comparison and one assignment.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from operator import lt
from typing import Self

Range = tuple[int, int]


class RangeSet:
    """A set of integers, kept as disjoint ranges `[first, next)` in order, none of which touch.

    Memory and the cost of an out-of-order change grow with the number of ranges, never with that of integers.
    """

    __slots__ = ("_firsts", "_nexts", "_total")

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self._firsts: list[int] = []
        self._nexts: list[int] = []
        self._total = 0
        for first, next_ in ranges:
            self.add(first, next_)

    @classmethod
    def from_flat(cls, numbers: Sequence[int]) -> Self:
        """Return the set whose ranges `flat` gave. Raises: ValueError unless the numbers are such a list."""
        found = cls()
        found._firsts, found._nexts = list(numbers[::2]), list(numbers[1::2])
        if len(numbers) % 2 or not all(map(lt, numbers, numbers[1:])):
            raise ValueError("ranges touch, run backwards or are out of order")
        found._total = sum(found._nexts) - sum(found._firsts)
        return found

    # ---- changes -----------------------------------------------------------------------------

    def add(self, first: int, next_: int) -> int:
        """Add the integers from `first` up to `next_` (exclusive); return how many are new."""
        assert first <= next_, f"range {first} to {next_} runs backwards"
        firsts, nexts = self._firsts, self._nexts
        if first == next_:
            return 0
        if not nexts or first > nexts[-1]:
            firsts.append(first)
            nexts.append(next_)
        elif first == nexts[-1]:
            nexts[-1] = next_
        else:
            return self._add_inside(first, next_)
        self._total += next_ - first
        return next_ - first

    # ---- queries -----------------------------------------------------------------------------

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._firsts, number) - 1
        return at >= 0 and number < self._nexts[at]

    def covers(self, first: int, next_: int) -> bool:
        """Whether the set has all of `first` up to `next_` (exclusive); true for the empty range."""
        if first >= next_:
            return True
        at = bisect_right(self._firsts, first) - 1
        return at >= 0 and next_ <= self._nexts[at]

    def overlaps(self, first: int, next_: int) -> bool:
        """Whether the set has any of `first` up to `next_` (exclusive); false for the empty range."""
        if first >= next_ or not self._nexts or first >= self._nexts[-1]:
            return False
        return self._firsts[bisect_right(self._nexts, first)] < next_

    def holes(self, first: int, next_: int) -> list[Range]:
        """Return the missing parts of `first` up to `next_` (exclusive), as ranges in order."""
        found: list[Range] = []
        at = bisect_right(self._nexts, first)
        while first < next_:
            if at == len(self._firsts) or self._firsts[at] >= next_:
                found.append((first, next_))
                break
            if first < self._firsts[at]:
                found.append((first, self._firsts[at]))
            first = self._nexts[at]
            at += 1
        return found

    @property
    def total(self) -> int:
        """Number of integers in the set."""
        return self._total

    @property
    def least(self) -> int:
        """The least integer of the set. Raises: IndexError for an empty set."""
        return self._firsts[0]

    @property
    def next(self) -> int:
        """The greatest integer of the set + 1. Raises: IndexError for an empty set."""
        return self._nexts[-1]

    def flat(self) -> list[int]:
        """Return the ranges in order as one list: first, next, first, next."""
        numbers = [0] * (2 * len(self._firsts))
        numbers[::2], numbers[1::2] = self._firsts, self._nexts
        return numbers

    def __iter__(self) -> Iterator[Range]:
        """Yield the ranges in order."""
        return zip(self._firsts, self._nexts, strict=True)

    def __len__(self) -> int:
        """Number of ranges."""
        return len(self._firsts)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RangeSet):
            return NotImplemented
        return self._firsts == other._firsts and self._nexts == other._nexts

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __repr__(self) -> str:
        return f"RangeSet({list(self)})"

    # ---- inside ------------------------------------------------------------------------------

    def _add_inside(self, first: int, next_: int) -> int:
        low = bisect_left(self._nexts, first)  # the first range that ends at or after `first`: it may touch
        high = bisect_right(self._firsts, next_)  # the first range that starts after `next_`
        new = next_ - first
        if low < high:
            new -= self._count(low, high, first, next_)
            first = min(first, self._firsts[low])
            next_ = max(next_, self._nexts[high - 1])
        self._firsts[low:high] = [first]
        self._nexts[low:high] = [next_]
        self._total += new
        return new

    def _count(self, low: int, high: int, first: int, next_: int) -> int:
        """Count the integers of the ranges `low` up to `high` that lie in `first` up to `next_`."""
        pairs = zip(self._firsts[low:high], self._nexts[low:high], strict=True)
        return sum(min(next_, end) - max(first, start) for start, end in pairs)
