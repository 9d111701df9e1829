"""Positions of a group in a topic, and commits from outside by a job that catches up for the group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

from memq.errors import InvalidRequestError, NotFoundError
from memq.notification import Groups
from memq.runtime.network import Runtime
from memq.spark.access import open_access
from memq.spark.options import ReadOptions
from memq.topic import Committed, Position, ReadPartition


async def stored_positions(
    groups: Groups, group: str, partitions: Sequence[ReadPartition]
) -> dict[ReadPartition, Position]:
    """Return the group's positions in those of `partitions` that it has committed.

    Raises: as `Groups.committed`.
    """
    stored = await groups.committed(group, partitions)
    return {partition: committed.position for partition, committed in stored.items()}


async def positions_of(options: ReadOptions, group: str) -> dict[int, Position]:
    """Return the group's positions in the topic of `options`, by read partition; none for a new group.

    Raises: InvalidRequestError while the group has members; UnreachableError, NotFoundError of the topic.
    """
    async with open_access(options, Runtime()) as access:
        groups = access.groups
        with suppress(NotFoundError):  # a new group, if nothing of it is stored either
            state = await groups.describe(group)
            if state.members:
                raise InvalidRequestError(
                    f"group '{group}' has {len(state.members)} members",
                    hint="stop them: they would read the same records",
                )
        stored = await stored_positions(groups, group, list(access.topics[options.topics[0]].partitions))
        return {partition.partition: position for partition, position in stored.items()}


async def commit_positions(options: ReadOptions, group: str, positions: Mapping[int, Position]) -> None:
    """Set a group to these positions by read partition, except where it is there or further.

    Raises: as `positions_of`; as `Groups.commit`.
    """
    stored = await positions_of(options, group)
    async with open_access(options, Runtime()) as access:
        topic = access.topics[options.topics[0]]
        commits: dict[ReadPartition, Committed] = {}
        for partition, writers in topic.partitions.items():
            position = positions.get(partition.partition)
            before = stored.get(partition.partition)
            if position is not None and (before is None or before < position):
                offset = position.pointer_offset
                totals = await access.places.totals_before(partition, offset, topic.settings, writers)
                commits[partition] = Committed(position, totals.plus(position.record_index, 0))
        if commits:
            await access.groups.commit(group, "", -1, commits)
