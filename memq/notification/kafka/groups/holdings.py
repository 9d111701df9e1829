"""One hosted group member's partitions and their generations. Pure.

Kafka notifies its client of assigned, revoked and lost partitions; the member learns of them with its heartbeats. So
every change makes the next generation here. The rules are those of `memq.notification.groups`. The generation of a
commit must be at or after the start of the hold, that of a release at or after the revocation. The first generation is
random, so that a member that was hosted by another broker before names an unknown generation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from memq.errors import GenerationFencedError
from memq.notification import Membership, check_position
from memq.notification.groups import HeldPartition, newest_commit
from memq.topic import Committed, ReadPartition


class Holdings:
    """The partitions of one member."""

    def __init__(self, member: str, first_generation: int) -> None:
        self.generation = first_generation
        self._member = member
        self._joined = first_generation
        self._holds: dict[ReadPartition, HeldPartition] = {}
        self._commits = 0  # the number of its newest commit

    def rejoin(self) -> None:
        """Begin all holds again, so that generations which the member knew are refused."""
        self.generation += 1
        self._joined = self.generation
        for hold in self._holds.values():
            hold.since = self.generation

    def assign(self, partitions: Iterable[ReadPartition]) -> None:
        """Add partitions that Kafka has assigned."""
        self.generation += 1
        for partition in partitions:
            self._holds[partition] = HeldPartition(partition, self.generation)

    def revoke(self, partitions: Iterable[ReadPartition]) -> None:
        """Mark partitions that Kafka revokes; they are held until the member releases them."""
        self.generation += 1
        for partition in partitions:
            if partition in self._holds:
                self._holds[partition].revoking = self.generation

    def lose(self, partitions: Iterable[ReadPartition]) -> None:
        """Remove partitions that Kafka took away: released, not released in time, or lost.

        If the member still held one of them, it must join again. Otherwise it might get the partition back before its
        next heartbeat, and continue at its own position although other members have read the partition since.
        """
        self.generation += 1
        for partition in partitions:
            if self._holds.pop(partition, None) is not None:
                self._joined = self.generation

    def release(self, generation: int, partitions: Sequence[ReadPartition]) -> None:
        """End holds that the member releases, except those not revoked, or revoked after `generation`."""
        for partition in partitions:
            hold = self._holds.get(partition)
            if hold is not None and 0 < hold.revoking <= generation:
                del self._holds[partition]
                self.generation += 1

    @property
    def revoking(self) -> bool:
        """Whether the member must still release a partition."""
        return any(hold.revoking for hold in self._holds.values())

    def check(self, generation: int) -> None:
        """Refuse a generation from before the last join, or an unknown one. Raises: GenerationFencedError."""
        if not self._joined <= generation <= self.generation:
            raise GenerationFencedError(
                f"member '{self._member}' names generation {generation}, it has {self._joined} to {self.generation}"
            )

    def check_commit(self, generation: int, positions: Mapping[ReadPartition, Committed], number: int = 0) -> None:
        """Refuse a commit for partitions not held, or one that comes late. `number`: as `Groups.commit`.

        Raises: GenerationFencedError, InvalidRequestError.
        """
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
        self._commits = newest_commit(self._member, self._commits, number)

    def membership(self) -> Membership:
        """Return the current partitions of the member."""
        holds = sorted(self._holds.values(), key=lambda hold: hold.partition)
        return Membership(
            self.generation,
            tuple(hold.partition for hold in holds if not hold.revoking),
            tuple(hold.partition for hold in holds if hold.revoking),
        )
