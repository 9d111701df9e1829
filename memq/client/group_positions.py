"""A group's progress in a topic as typed results, and the effect of a reset."""

from __future__ import annotations

from dataclasses import dataclass

from memq.client.places import Lag
from memq.client.record import TopicPartition
from memq.topic import Position


@dataclass(frozen=True, slots=True)
class PartitionProgress:
    """A group's state in one partition: position (None: none), member ("" when free), and lag."""

    place: TopicPartition
    position: Position | None
    member: str
    lag: Lag


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
