"""A group's progress in a topic as typed results, and the effect of a reset."""

from __future__ import annotations

from dataclasses import dataclass

from memq.client.consumer.offset_resolver import Lag
from memq.client.consumer.record import TopicPartition
from memq.errors import MemqError
from memq.topic import Position


@dataclass(frozen=True, slots=True)
class PartitionProgress:
    """A group's state in one partition: position (None: none), member ("" when free), and lag.

    `measured` is the error instead where the log of the partition does not answer.
    """

    place: TopicPartition
    position: Position | None
    member: str
    measured: Lag | MemqError

    @property
    def lag(self) -> Lag:
        """The lag. Raises: the error of the partition's log when it is not known."""
        if isinstance(self.measured, MemqError):
            raise self.measured
        return self.measured

    @property
    def error(self) -> MemqError | None:
        """The reason why the lag is not known; None when it is."""
        return self.measured if isinstance(self.measured, MemqError) else None


@dataclass(frozen=True, slots=True)
class GroupDescription:
    """A consumer group: its generation, its members, and how far it is, by partition."""

    group: str
    generation: int
    members: tuple[str, ...]
    partitions: tuple[PartitionProgress, ...]


@dataclass(frozen=True, slots=True)
class Reset:
    """One partition of a reset: the group's position before (None: none stored) and after."""

    place: TopicPartition
    before: Position | None
    after: Position
