"""Recent decisions in the state of a queue machine, which answer a request that comes again. Pure.

They are bounded by number alone: a client repeats a request after a lost answer, in seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from memq.queues.decisions import ItemOutcome, ItemRanges, SavedGrant, SavedReturn

RECENT_MAX = 8_192  # blocks of grants in memory, and ranges of nacks, each about 200 bytes


class RecentGrants:
    """The grants of recent requests, by the identity of the request. The oldest are forgotten."""

    def __init__(self) -> None:
        self._grants: dict[int, list[SavedGrant]] = {}
        self._blocks = 0

    def add(self, request: int, grant: int, blocks: Iterable[int]) -> None:
        """Note the grant of a request."""
        made = SavedGrant(request, grant, tuple(blocks))
        self._grants.setdefault(request, []).append(made)
        self._blocks += len(made.blocks)
        while self._blocks > RECENT_MAX and len(self._grants) > 1:
            self._blocks -= sum(len(each.blocks) for each in self._grants.pop(next(iter(self._grants))))

    def of(self, request: int) -> Iterator[tuple[int, int]]:
        """Yield grant and block of a request."""
        for each in tuple(self._grants.get(request, ())):
            for block in each.blocks:
                yield each.grant, block

    def saved(self) -> list[SavedGrant]:
        """Return the grants for a snapshot."""
        return [each for grants in self._grants.values() for each in grants]

    def restore(self, saved: Iterable[SavedGrant]) -> None:
        """Take the grants of a snapshot."""
        for each in saved:
            self.add(*each)


class RecentReturns:
    """The outcomes of recent nacks, by block and grant. The oldest are forgotten."""

    def __init__(self) -> None:
        self._returns: dict[tuple[int, int], list[SavedReturn]] = {}
        self._count = 0

    def add(self, made: SavedReturn) -> None:
        """Note the outcome of a nack."""
        place = made.block, made.grant
        found = self._returns.pop(place, [])
        last = found[-1] if found else None
        if last is not None and (last.end, last.outcome) == (made.begin, made.outcome):
            found[-1] = last._replace(end=made.end)
        else:
            found.append(made)
            self._count += 1
        self._returns[place] = found
        while self._count > RECENT_MAX and len(self._returns) > 1:
            self._count -= len(self._returns.pop(next(iter(self._returns))))

    def split(self, items: ItemRanges, grant: int) -> Iterator[tuple[int, int, ItemOutcome | None]]:
        """Yield begin and end of ranges of items, in order, and the outcome of their nack; None without one."""
        known = sorted(self._returns.get((items.block, grant), ()), key=lambda each: each.begin)
        for begin, end in items.pairs():
            at = begin
            for each in known:
                first, last = max(at, each.begin), min(end, each.end)
                if first >= last:
                    continue
                if at < first:
                    yield at, first, None
                yield first, last, each.outcome
                at = last
            if at < end:
                yield at, end, None

    def saved(self) -> list[SavedReturn]:
        """Return the nacks for a snapshot."""
        return [each for found in self._returns.values() for each in found]

    def restore(self, saved: Iterable[SavedReturn]) -> None:
        """Take the nacks of a snapshot."""
        for each in saved:
            self.add(each)
