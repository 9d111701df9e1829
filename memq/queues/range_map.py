"""Values of numbers from 0 on, in ranges of equal values. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

Value = TypeVar("Value")
Range = tuple[int, int]  # begin and end (exclusive)


class RangeMap(Generic[Value]):
    """A value for each number: `value` at first. Numbers in a row with equal values are one range.

    It takes memory for ranges only. A change costs a search, and a move of the ranges behind it.
    """

    __slots__ = ("_begins", "_values")

    def __init__(self, value: Value) -> None:
        self._begins = [0]  # of the ranges; the last one has no end
        self._values = [value]

    def __len__(self) -> int:
        return len(self._begins)

    @property
    def end(self) -> int:
        """The begin of the last range, which has no end."""
        return self._begins[-1]

    def get(self, number: int) -> Value:
        """Return the value of a number."""
        return self._values[bisect_right(self._begins, number) - 1]

    def ranges(self, begin: int, end: int) -> Iterable[tuple[int, int, Value]]:
        """Return begin, end and value of the ranges from `begin` to `end`, as they are at the call."""
        if begin >= end:
            return ()
        begins, values = self._begins, self._values
        first, stop = bisect_right(begins, begin) - 1, bisect_left(begins, end)
        if stop - first == 1:
            return ((begin, end, values[first]),)
        edges = [begin, *begins[first + 1 : stop], end]
        return zip(edges, edges[1:], values[first:stop])  # noqa: B905 - `edges` has one more

    def put(self, begin: int, end: int, value: Value) -> None:
        """Set the value of the numbers from `begin` to `end`."""
        if begin >= end:
            return
        begins, values = self._begins, self._values
        first, stop = bisect_left(begins, begin), bisect_right(begins, end)
        new_begins, new_values = [begin], [value]
        if values[stop - 1] != value:
            new_begins.append(end)
            new_values.append(values[stop - 1])
        if first and values[first - 1] == value:
            del new_begins[0], new_values[0]
        begins[first:stop] = new_begins
        values[first:stop] = new_values


def merged(ranges: Iterable[Range]) -> list[Range]:
    """Return ranges in order; those that touch or overlap become one."""
    found: list[Range] = []
    for begin, end in sorted(ranges):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def cut(begin: int, end: int, inside: Iterable[Range]) -> Iterator[tuple[int, int, bool]]:
    """Yield the parts of a range, and whether each lies in one of the ranges `inside`, which are in order."""
    for first, last in inside:
        first, last = max(first, begin), min(last, end)
        if first >= last:
            continue
        if begin < first:
            yield begin, first, False
        yield first, last, True
        begin = last
    if begin < end:
        yield begin, end, False
