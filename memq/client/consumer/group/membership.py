"""A group member: its partitions, those that it must release, and changes for its user. Pure.

The group's answers come in the background, and the user's thread takes the changes when it polls: between
the two a partition may come and go again, and then nobody is notified. A partition that is to be given back is
held until the user took that change, so that what was handed out of it can be finished and committed.

A partition that went and came back may have been read and committed by another member meanwhile. Each time that it
comes it is a new *grant*, with a number of its own: what was read or fetched under an older grant is void.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from memq.groups import Membership
from memq.topic import Committed, ReadPartition


@dataclass(frozen=True, slots=True)
class AssignmentEvents:
    """Changes since the last notice to the user, in order: lost, revoked, assigned."""

    lost: tuple[ReadPartition, ...] = ()
    revoked: tuple[ReadPartition, ...] = ()
    assigned: tuple[ReadPartition, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.lost or self.revoked or self.assigned)


class MemberState:
    """One member of one group. `generation` is -1 while it is outside.

    `released` are the partitions that the next heartbeat gives back.
    """

    def __init__(self) -> None:
        self.generation = -1
        self._held: dict[ReadPartition, None] = {}
        self._to_assign: dict[ReadPartition, None] = {}
        self._to_revoke: dict[ReadPartition, None] = {}
        self._to_lose: dict[ReadPartition, None] = {}
        self._released: dict[ReadPartition, None] = {}
        self._granted: dict[ReadPartition, int] = {}
        self._grants = 0
        self._positions: dict[ReadPartition, tuple[int, Committed]] = {}  # that came with a grant, until they are taken

    @property
    def inside(self) -> bool:
        """Whether the member is in the group as far as it knows."""
        return self.generation >= 0

    @property
    def held(self) -> tuple[ReadPartition, ...]:
        """The partitions that the user knows it has."""
        return tuple(self._held)

    @property
    def granted(self) -> Mapping[ReadPartition, int]:
        """The partitions that may be read and committed now, each with the number of its grant."""
        return self._granted

    @property
    def released(self) -> tuple[ReadPartition, ...]:
        """Partitions to give back with the next heartbeat."""
        return tuple(self._released)

    def answered(self, membership: Membership, named: Iterable[ReadPartition] = ()) -> None:
        """Take an answer of the group to a heartbeat that gave back `named`, or to a join."""
        self.generation = membership.generation
        before = self._granted
        for partition in named:
            self._released.pop(partition, None)
        assigned = dict.fromkeys(membership.assigned)
        revoking = dict.fromkeys(membership.revoking)
        for partition in revoking:
            if partition in self._held:
                self._to_revoke[partition] = None
            else:  # the user was not notified of it: nothing to finish
                self._released[partition] = None
        for partition in list(self._held):
            if partition not in assigned and partition not in revoking and partition not in self._released:
                self._lose(partition)
        for partition in list(self._to_revoke):
            if partition in assigned:  # it may stay after all
                del self._to_revoke[partition]
        self._to_assign = {
            partition: None for partition in assigned if partition not in self._held and partition not in self._released
        }
        self._grant()
        for partition, committed in membership.positions.items():
            grant = self._granted.get(partition)
            if grant is not None and before.get(partition) != grant:
                self._positions[partition] = grant, committed

    def take_position(self, partition: ReadPartition, grant: int) -> Committed | None:
        """Return the stored position that came with a grant, once: this member moves it from then on (G3)."""
        came_with, committed = self._positions.pop(partition, (grant, None))
        return committed if came_with == grant else None

    def fenced(self) -> None:
        """The group does not know this member any more: everything is lost."""
        self.generation = -1
        for partition in list(self._held):
            self._lose(partition)
        self._to_assign.clear()
        self._released.clear()
        self._grant()

    def changes(self) -> AssignmentEvents:
        """Return the events that are due to the user, without removing them."""
        return AssignmentEvents(tuple(self._to_lose), tuple(self._to_revoke), tuple(self._to_assign))

    def confirm_lost(self, partition: ReadPartition) -> None:
        """The user knows that the partition is lost."""
        self._to_lose.pop(partition, None)

    def confirm_revoked(self, partition: ReadPartition) -> None:
        """The user has finished with the partition: the next heartbeat releases it.

        While the user finished, the group may have left it to this member: then it is assigned again, as a new grant.
        """
        self._to_lose.pop(partition, None)  # it was lost meanwhile: the user was notified
        if partition not in self._held:
            return
        del self._held[partition], self._granted[partition]
        if self._to_revoke.pop(partition, 0) is None:
            self._released[partition] = None
        else:
            self._to_assign[partition] = None
        self._grant()

    def confirm_assigned(self, partition: ReadPartition) -> None:
        """The user knows that it has the partition, or had it: when it went meanwhile, the user loses it next."""
        if self._to_assign.pop(partition, 0) is None:
            self._held[partition] = None
        else:
            self._to_lose[partition] = None

    def _lose(self, partition: ReadPartition) -> None:
        del self._held[partition]
        self._to_revoke.pop(partition, None)
        self._to_lose[partition] = None

    def _grant(self) -> None:
        """Number the new partitions, and drop those that left; the others keep their numbers."""
        before, self._granted = self._granted, {}
        for partition in (*self._held, *self._to_assign):
            if partition not in before:
                self._grants += 1
            self._granted[partition] = before.get(partition, self._grants)
