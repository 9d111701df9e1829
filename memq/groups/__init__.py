"""Consumer groups: their port, and the coordinator, a machine on a state log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from memq.topic import Committed, ReadPartition

OUTSIDE_GENERATION = -1  # of the member "", which commits from outside the membership


@dataclass(frozen=True, slots=True)
class Membership:
    """A group member's state: generation, partitions it may read, partitions it must return.

    A member delivers only records of `assigned`. It still holds the partitions in `revoking`, and must release them:
    finish, commit, then name them in the next heartbeat's `released`. Only then does another member get them.
    `positions` are stored positions of partitions that are new in `assigned` (G3): only this member moves them from now
    on. Partitions without a stored position are left out, and perhaps others: ask for those.
    `session_ms` is the session time-out that the member has in the group: in a large one it is longer than asked. 0 if
    it is not known.
    """

    generation: int
    assigned: tuple[ReadPartition, ...]
    revoking: tuple[ReadPartition, ...] = ()
    positions: Mapping[ReadPartition, Committed] = field(default_factory=dict, compare=False)
    session_ms: int = field(default=0, compare=False)
    waits: bool = field(default=False, compare=False)  # whether the next heartbeat may wait at the owner of the group


@dataclass(frozen=True, slots=True)
class GroupState:
    """One consumer group for operators: the partitions of its members, and the committed positions."""

    group: str
    generation: int
    members: dict[str, tuple[ReadPartition, ...]]
    committed: dict[ReadPartition, Committed]


class Groups(Protocol):
    """Consumer groups: membership with generations, and committed positions with totals.

    Promises: at any time a partition is assigned to at most one member of a group. A member that is
    silent for its session time-out loses all its partitions at once. A commit is refused as a whole if the member
    does not hold one of its partitions in its generation. Positions outlive the members.
    Raises: GenerationFencedError, QueueError, NotFoundError (group), InvalidNameError,
    InvalidRequestError (reset or delete while members are active).
    """

    async def join(
        self, group: str, member: str, partitions: Sequence[ReadPartition], session_timeout_ms: int
    ) -> Membership:
        """Join the group, or change the set of partitions that the member wants.

        The assignment may come later, with a heartbeat.
        """
        ...

    async def heartbeat(
        self, group: str, member: str, generation: int, released: Sequence[ReadPartition] = ()
    ) -> Membership:
        """Keep the member alive, release the partitions `released`, and return the current membership."""
        ...

    async def leave(self, group: str, member: str, generation: int | None = None) -> None:
        """Release all partitions at once; leaving twice is fine.

        With a `generation`, a member that has joined again after it stays: perhaps a newer process has its name.
        """
        ...

    async def commit(
        self, group: str, member: str, generation: int, positions: dict[ReadPartition, Committed], number: int = 0
    ) -> None:
        """Store positions, all or none; after QueueError some may be stored: then store all again.

        A position may be lower than the stored one, after a seek of its consumer.

        `number` counts the commits of a member, from 1. A commit with a smaller number than the member's newest
        one is refused: it comes late, from a connection that the member gave up. 0: the caller does not count.

        The member "" with generation OUTSIDE_GENERATION commits from outside the membership. That is allowed only
        while the group has no members.

        Raises: GenerationFencedError, also for a late commit; InvalidRequestError; QueueError.
        """
        ...

    async def committed(self, group: str, partitions: Sequence[ReadPartition]) -> dict[ReadPartition, Committed]:
        """Return the stored positions of `partitions`, without those that have none.

        After an error the positions are unknown: a member that assumed "none" would skip records.
        """
        ...

    async def groups(self) -> Sequence[str]:
        """Return the names of all groups, sorted."""
        ...

    async def describe(self, group: str) -> GroupState:
        """Return members and positions."""
        ...

    async def delete_group(self, group: str) -> None:
        """Delete a group without members, with its positions."""
        ...


class WaitingGroups(Groups, Protocol):
    """Groups whose heartbeats may wait for a change. Promises and errors: as `Groups`."""

    async def await_change(self, group: str, member: str, generation: int, wait_ms: int) -> Membership | None:
        """Send a heartbeat that waits for a change of the member's assignment, `wait_ms` at most.

        None: the assignment is the one of `generation`. A membership may come at once, also without a change.
        """
        ...
