"""Rules of stored positions: only the owner of a partition moves them, and `commit()` stores them.

The rules use only the answers of the queue to each member: neither the queue's own checks, nor the members' state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from memq.groups import Membership
from memq.topic import BROADCAST_GROUP, Position, ReadPartition

Key = tuple[str, ReadPartition]  # group, partition


class CommitRules:
    """All groups of one run; `fail` gets each finding. `goes_back`: readers seek, so positions may go back."""

    def __init__(self, fail: Callable[[str], None]) -> None:
        self.goes_back = False
        self._fail = fail
        self._grants: dict[
            Key, tuple[str, int]
        ] = {}  # who was notified last that it holds it, and since which generation
        self._stored: dict[Key, list[Position]] = {}
        self._asked: dict[tuple[str, ReadPartition, str], Position] = {}  # the last commit that a member requested
        self._numbers: dict[tuple[str, str], int] = {}  # of a member's newest stored commit
        self._latest: dict[tuple[str, str], int] = {}  # of the newest commit that a member asked for
        self._joined: dict[tuple[str, str], int] = {}  # the generation in which a member of a group joined last

    def granted(self, group: str, member: str, membership: Membership, *, joined: bool) -> None:
        """The queue answers a member; one that joins gets all partitions again, some of them only by a later answer."""
        if joined:
            self._joined[group, member] = membership.generation
            if group.startswith(BROADCAST_GROUP):
                # A consumer that starts again has the same name, and counts from its clock. Generations fence it.
                self._numbers.pop((group, member), None)
            for key in [key for key in self._asked if key[0] == group and key[2] == member]:
                del self._asked[key]
        for partition in membership.assigned:
            holder, _ = self._grants.get((group, partition), ("", 0))
            if joined or holder != member:
                self._grants[group, partition] = (member, membership.generation)
                self._asked.pop((group, partition, member), None)

    def stored(
        self, group: str, member: str, generation: int, number: int, positions: Iterable[tuple[ReadPartition, Position]]
    ) -> None:
        """The queue has stored what a member asked for in a generation, by its commit with this number."""
        newest = self._numbers.get((group, member), 0)
        if number < newest:
            self._fail(f"commit {number} of member '{member}' of group {group} is stored after its commit {newest}")
        self._numbers[group, member] = max(number, newest)
        for partition, position in positions:
            holder, since = self._grants.get((group, partition), ("", 0))
            who = f"member '{member}' of generation {generation} stores {position} of group {group}"
            if holder != member or generation < since:
                self._fail(f"{who}, and member '{holder}' holds it since generation {since}")
            self._stored.setdefault((group, partition), []).append(position)

    def asked(
        self, group: str, member: str, generation: int, number: int, positions: Iterable[tuple[ReadPartition, Position]]
    ) -> None:
        """A broker asks for a member's positions to be stored: none is asked for behind another.

        A broker that was paused may ask for what the member sent before a later commit, or before it joined again. Such
        a call is no step back of the member. It must be refused, which `stored` checks.
        """
        if generation < self._joined.get((group, member), 0) or number < self._latest.get((group, member), 0):
            return
        self._latest[group, member] = number
        for partition, position in positions:
            before = self._asked.get((group, partition, member), position)
            if position < before and not self.goes_back:
                self._fail(f"member '{member}' of group {group} asks for {position} of {partition} after {before}")
            self._asked[group, partition, member] = position

    def returned(self, group: str, partition: ReadPartition, position: Position) -> None:
        """The commit of a batch that ends before a position has returned without an error."""
        if not any(stored >= position for stored in self._stored.get((group, partition), ())):
            self._fail(f"a commit of group {group} has returned, and {position} of {partition} was never stored")
