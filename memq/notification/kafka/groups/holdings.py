"""One hosted group member's partitions and their generations. Pure.

Kafka tells its client what is assigned, revoked and lost; the member behind it asks now and then. So every change makes
the next generation here, and the rules are those of `memq.notification.groups`: a commit names a generation not before
the partition's hold began, a release one not before its revocation. The first generation is drawn at random by the
host, so that a member that comes back from another broker names one that is not known here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from memq.errors import GenerationFencedError
from memq.notification import Membership, check_position
from memq.notification.groups import Hold
from memq.topic import Committed, ReadPartition


class Holdings:
    """The partitions of one member."""

    def __init__(self, member: str, first_generation: int) -> None:
        self.generation = first_generation
        self._member = member
        self._joined = first_generation
        self._holds: dict[ReadPartition, Hold] = {}

    def rejoin(self) -> None:
        """Make all that the member knew void: what it holds begins again."""
        self.generation += 1
        self._joined = self.generation
        for hold in self._holds.values():
            hold.since = self.generation

    def assign(self, partitions: Iterable[ReadPartition]) -> None:
        """Take what Kafka gives."""
        self.generation += 1
        for partition in partitions:
            self._holds[partition] = Hold(partition, self.generation)

    def revoke(self, partitions: Iterable[ReadPartition]) -> None:
        """Note what Kafka wants back: it is held until it is released."""
        self.generation += 1
        for partition in partitions:
            if partition in self._holds:
                self._holds[partition].revoking = self.generation

    def lose(self, partitions: Iterable[ReadPartition]) -> None:
        """Drop what Kafka took without asking, or what was not released in time.

        The member is to join again: it may be given a partition back before it asks what it holds, and would read on
        where it was while others had it.
        """
        self.generation += 1
        for partition in partitions:
            if self._holds.pop(partition, None) is not None:
                self._joined = self.generation

    def release(self, generation: int, partitions: Sequence[ReadPartition]) -> None:
        """Drop what the member gives back; what is not revoked, or was revoked later, stays."""
        for partition in partitions:
            hold = self._holds.get(partition)
            if hold is not None and 0 < hold.revoking <= generation:
                del self._holds[partition]
                self.generation += 1

    @property
    def revoking(self) -> bool:
        """Whether something is still to be released."""
        return any(hold.revoking for hold in self._holds.values())

    def check(self, generation: int) -> None:
        """Refuse a generation that is not this membership's. Raises: GenerationFencedError."""
        if not self._joined <= generation <= self.generation:
            raise GenerationFencedError(
                f"member '{self._member}' names generation {generation}, it has {self._joined} to {self.generation}"
            )

    def check_commit(self, generation: int, positions: Mapping[ReadPartition, Committed]) -> None:
        """Refuse a commit of what is not held. Raises: GenerationFencedError, InvalidRequestError."""
        for partition, committed in positions.items():
            check_position(partition, committed)
        self.check(generation)
        for partition in positions:
            hold = self._holds.get(partition)
            if hold is None or hold.since > generation:
                raise GenerationFencedError(
                    f"member '{self._member}' of generation {generation} does not hold partition "
                    f"{partition.partition} of topic '{partition.topic}'"
                )

    def membership(self) -> Membership:
        """Return what the member holds now."""
        holds = sorted(self._holds.values(), key=lambda hold: hold.partition)
        return Membership(
            self.generation,
            tuple(hold.partition for hold in holds if not hold.revoking),
            tuple(hold.partition for hold in holds if hold.revoking),
        )
