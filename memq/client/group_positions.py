"""What a group has read of a topic and what is left, as typed results; and where a reset puts it."""

from __future__ import annotations

from dataclasses import dataclass

from memq.client.places import Lag
from memq.client.record import TopicPartition
from memq.topic import Position


@dataclass(frozen=True, slots=True)
class PartitionProgress:
    """Where a group stands in one partition: its position (None: nothing stored), member ("" when free), and lag."""

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
    """One partition of a reset: where the group stood (None: nothing stored) and where it is put."""

    place: TopicPartition
    before: Position | None
    after: Position
