"""Which stretch of each read partition a task of a stream reads, for its report to the audit. Pure.

Tasks read batches, and lie between their places without a gap: what one has read up to its end, and the next one from
there on, leaves nothing out, pointers that name no records neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from memq.topic import Position, ReadPartition

if TYPE_CHECKING:
    from memq.spark.read.planner import Split


@dataclass(frozen=True, slots=True)
class TaskRange:
    """A range of a read partition in a micro-batch, or what a task reads of it, by write partitions.

    The end is not read.
    """

    partition: ReadPartition
    writers: tuple[int, ...]
    begin: Position
    end: Position

    @property
    def name(self) -> str:
        """The topic's name."""
        return self.partition.topic

    @property
    def id(self) -> str:
        """The topic's id."""
        return self.partition.topic_id


@dataclass(frozen=True, slots=True)
class TaskAudit:
    """A task's reporting data: the stream's name, brokers, interval (ms), and its ranges."""

    name: str
    brokers: tuple[str, ...]
    interval_ms: int
    stretches: tuple[TaskRange, ...]


def stretches_of(
    splits: Sequence[Split], homes: Iterable[ReadPartition], places: Mapping[ReadPartition, TaskRange]
) -> list[tuple[TaskRange, ...]]:
    """Return the stretches of each split. `homes` has the read partition of each of their parts, in order.

    A place that has no part at all goes with the first split.
    """
    if not splits:
        return []
    begins: dict[ReadPartition, list[tuple[int, Position]]] = {partition: [] for partition in places}
    each = iter(homes)
    for number, split in enumerate(splits):
        for part in split.parts:
            found = begins[next(each)]
            if not found:
                found.append((number, Position(0, 0)))
            elif found[-1][0] != number:
                found.append((number, Position(part.partition, part.offset, part.low)))
    tasks: list[list[TaskRange]] = [[] for _ in splits]
    for partition, found in begins.items():
        place = places[partition]
        numbers = [number for number, _ in found] or [0]
        cuts = [place.begin, *(begin for _, begin in found[1:]), place.end]
        for number, begin, end in zip(numbers, cuts[:-1], cuts[1:], strict=True):
            tasks[number].append(replace(place, begin=begin, end=end))
    return [tuple(stretches) for stretches in tasks]
