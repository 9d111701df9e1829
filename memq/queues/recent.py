"""Recent decisions in the state of a queue machine, which answer a request that comes again. Pure.

They are bounded by number alone: a client repeats a request after a lost answer, in seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from memq.queues.decisions import SavedGrant

RECENT_MAX = 8_192  # blocks of grants in memory, each about 200 bytes


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
