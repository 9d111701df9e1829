"""The plan of an audit on Spark, from the queue: spans, pieces, positions of groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memq.notification import Span
from memq.runtime.network import Runtime
from memq.spark.access import Access, open_access
from memq.spark.options import ReadOptions
from memq.spark.pipelines.group_positions import stored_positions
from memq.spark.pipelines.pieces import PointerSpan, pieces_of
from memq.topic import Position, ReadPartition, Topic, equal_slots


@dataclass(frozen=True, slots=True)
class AuditPlan:
    """Spans by read partition, their pieces, and positions of `groups` by read partition.

    `now_ms` (Unix ms) is the moment that the verdict is of.
    """

    topic: Topic
    spans: Mapping[int, Span]
    pieces: Sequence[PointerSpan]
    groups: Sequence[str]
    committed: Mapping[int, Mapping[str, Position | None]]
    now_ms: int


async def plan_audit(options: ReadOptions) -> AuditPlan:
    """Ask for what there is now. Raises: UnreachableError, NotFoundError, QueueError."""
    runtime = Runtime()
    async with open_access(options, runtime) as access:
        place = access.topics[options.topics[0]]
        topic = Topic(name=place.name, id=place.id, created_ms=0, partitions=equal_slots(1), settings=place.settings)
        spans = {partition: await access.places.span(partition) for partition in sorted(place.partitions)}
        pieces = [
            piece
            for partition, span in spans.items()
            for piece in await pieces_of(access, partition, span, options.partition_bytes)
        ]
        groups = await _committed(access, list(spans))
        return AuditPlan(
            topic=topic,
            spans={partition.partition: span for partition, span in spans.items()},
            pieces=pieces,
            groups=list(groups),
            committed={each.partition: {group: groups[group].get(each) for group in groups} for each in spans},
            now_ms=runtime.clock.wall_ms(),
        )


async def _committed(access: Access, partitions: list[ReadPartition]) -> dict[str, dict[ReadPartition, Position]]:
    """Return the positions of each group that has read the topic."""
    groups = access.groups
    found = {group: await stored_positions(groups, group, partitions) for group in await groups.groups()}
    return {group: positions for group, positions in found.items() if positions}
