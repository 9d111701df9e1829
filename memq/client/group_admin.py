"""Groups for operators: the part of `Admin` that shows, resets and deletes them."""

from __future__ import annotations

from dataclasses import dataclass

from memq.client.arguments import check_switch
from memq.client.consumer.batch import TopicPartition, topic_partition_of
from memq.client.consumer.offset_resolver import Lag
from memq.client.consumer.settings import Point, check_point, named_partitions, point_of
from memq.client.log_answers import ask_logs
from memq.client.topic_admin import AsyncTopicAdmin, TopicAdmin
from memq.errors import MemqError, NotFoundError
from memq.groups import OUTSIDE_GENERATION, GroupState
from memq.topic import (
    Committed,
    Position,
    ReadPartition,
    Topic,
    Totals,
    check_resource_name,
    is_internal,
    read_partitions,
)

GROUPS_NAMED_MAX = 20  # in the error about one that is not there


@dataclass(frozen=True, slots=True)
class PartitionProgress:
    """A group's state in one partition: position (None: none), member ("" when free), and lag.

    `measured` is the lag, or an error if the log of the partition does not answer.
    """

    topic_partition: TopicPartition
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
    """A consumer group: its generation, its members, and its progress in each partition."""

    group: str
    generation: int
    members: tuple[str, ...]
    partitions: tuple[PartitionProgress, ...]


@dataclass(frozen=True, slots=True)
class Reset:
    """One partition of a reset: the group's position before (None: none stored) and after."""

    topic_partition: TopicPartition
    before: Position | None
    after: Position


@dataclass(frozen=True, slots=True)
class Shift:
    """The target of a reset: so many records after the group's position, before it if negative."""

    records: int


class AsyncGroupAdmin(AsyncTopicAdmin):
    """Shows, resets and deletes groups, in addition to topics."""

    async def groups(self, *, internal: bool = False, proven: bool = True) -> list[str]:
        """Return the names of all groups, in order; `internal` adds memq's own.

        Without `proven`, coordinators write no proof into their logs, and the answer may be old after a takeover.
        """
        check_switch("internal", internal)
        await self._pool.reach(self._connect_timeout_s)
        return [name for name in await self._groups.groups(proven=proven) if internal or not is_internal(name)]

    async def group(self, name: str, *, proven: bool = True) -> GroupDescription:
        """Return a group: members, positions and lag. A failing log hides only its own partition's lag.

        Without `proven`, its coordinator writes no proof into its log, and the answer may be old after a takeover.
        Raises: NotFoundError, InvalidNameError.
        """
        check_resource_name(name, "group", internal=True)
        await self._pool.reach(self._connect_timeout_s)
        state = await self._described(name, proven=proven)
        holders = {partition: member for member, held in state.members.items() for partition in held}
        read = {partition.topic_id: None for partition in (*state.committed, *holders)}
        # Also partitions without a stored position: all their records are lag.
        partitions = [
            (topic, partition)
            for topic in await self.topics(internal=True)
            if topic.id in read
            for partition in read_partitions(topic)
        ]
        of = {partition: topic for topic, partition in partitions}
        lags = await ask_logs(of, lambda each: self._lag(of[each], each, state.committed.get(each)))
        progress = [
            PartitionProgress(topic_partition_of(each), _position_in(state, each), holders.get(each, ""), measured)
            for each, measured in lags.items()
        ]
        return GroupDescription(name, state.generation, tuple(sorted(state.members)), tuple(progress))

    async def reset_group(
        self,
        group: str,
        topic: str,
        to: Point | Shift,
        *,
        dry_run: bool = False,
        new_ok: bool = False,
        force: bool = False,
    ) -> list[Reset]:
        """Set new positions of a group without members, in all partitions of a topic.

        `to` is "beginning", "end", a datetime, positions as a consumer's `start`, or a Shift. Other partitions
        do not change. With `dry_run` nothing is stored; with `new_ok` the group need not exist. With `force` the
        members leave the group first: they lose their partitions, join again, and read from the new positions.

        Raises: NotFoundError, InvalidRequestError.
        """
        check_resource_name(group, "group")
        _check_target(to, topic)
        check_switch("dry_run", dry_run)
        check_switch("force", force)
        found = (await self.topic(topic)).topic
        if not new_ok:
            await self._described(group)  # a misspelt name must not make a group
        partitions = read_partitions(found) if isinstance(to, Shift) else named_partitions(found, to)
        stored = await self._groups.committed(group, partitions)
        resets: dict[ReadPartition, Committed] = {}
        for partition in partitions:
            position = await self._target(found, partition, to, stored.get(partition))
            totals = await self._totals_before(found, partition, position)
            mark, offset = await self._resolver.checked_mark(partition, position), position.pointer_offset
            writers = found.writers_of(partition)
            covered = await self._resolver.covered_before(partition, offset, found.settings, writers)
            resets[partition] = Committed(position, totals, mark, covered)
        if not dry_run and resets:
            if force:
                await self._groups.overwrite(group, resets)
            else:
                await self._groups.commit(group, "", OUTSIDE_GENERATION, resets)
        return [
            Reset(
                topic_partition_of(partition),
                stored[partition].marked_position if partition in stored else None,
                committed.marked_position,
            )
            for partition, committed in resets.items()
        ]

    async def delete_group(self, name: str) -> None:
        """Delete a group that has no members, with its positions. Raises: NotFoundError, InvalidRequestError."""
        check_resource_name(name, "group", internal=True)
        await self._pool.reach(self._connect_timeout_s)
        await self._groups.delete_group(name)

    async def _target(
        self, topic: Topic, partition: ReadPartition, to: Point | Shift, stored: Committed | None
    ) -> Position:
        """Return the position that a target of a reset means in one partition."""
        if not isinstance(to, Shift):
            point = point_of(to, topic_partition_of(partition))
            return await self._resolver.start_at(point, partition, topic.settings)
        here = stored.position if stored else await self._resolver.position_of("beginning", partition, topic.settings)
        return await self._resolver.shifted(topic, partition, here, to.records)

    async def _described(self, group: str, *, proven: bool = True) -> GroupState:
        """Return the state of a group. Raises: NotFoundError that names the groups that there are."""
        try:
            return await self._groups.describe(group, proven=proven)
        except NotFoundError as error:
            names = await self.groups()
            there = ", ".join(names[:GROUPS_NAMED_MAX]) + (", …" if len(names) > GROUPS_NAMED_MAX else "")
            hint = f"the groups are: {there}" if names else "there are no groups"
            raise NotFoundError(str(error), hint=hint) from error

    async def _lag(self, topic: Topic, partition: ReadPartition, committed: Committed | None) -> Lag:
        if committed is None:
            position = await self._resolver.position_of("beginning", partition, topic.settings)
            here = await self._pointers_before(topic, partition, position)
        else:
            position, totals = committed.position, committed.totals
            here = Totals(totals.records - position.record_index, totals.bytes)
        return await self._resolver.lag(topic, partition, position, here, self._runtime.clock)


class GroupAdmin(TopicAdmin):
    """The same for threads."""

    _core: AsyncGroupAdmin

    def groups(self, *, internal: bool = False, proven: bool = True) -> list[str]:
        """Return the names of all groups, in order; `internal` adds memq's own.

        Without `proven`, coordinators write no proof into their logs, and the answer may be old after a takeover.
        """
        return self._background.run(self._core.groups(internal=internal, proven=proven))

    def group(self, name: str, *, proven: bool = True) -> GroupDescription:
        """Return a group: members, positions and lag. `proven` as in `groups`. Raises: NotFoundError."""
        return self._background.run(self._core.group(name, proven=proven))

    def reset_group(
        self, group: str, topic: str, to: Point | Shift, *, dry_run: bool = False, force: bool = False
    ) -> list[Reset]:
        """Set new positions of a group without members, in all partitions of a topic.

        `to` is "beginning", "end", a datetime, positions as a consumer's `start`, or a Shift. Other partitions
        do not change. With `dry_run` nothing is stored; with `force` the members leave the group first.
        Raises: NotFoundError, InvalidRequestError.
        """
        return self._background.run(self._core.reset_group(group, topic, to, dry_run=dry_run, force=force))

    def delete_group(self, name: str) -> None:
        """Delete a group that has no members, with its positions. Raises: NotFoundError, InvalidRequestError."""
        self._background.run(self._core.delete_group(name))


def _position_in(state: GroupState, partition: ReadPartition) -> Position | None:
    committed = state.committed.get(partition)
    return committed.marked_position if committed else None


def _check_target(to: Point | Shift, topic: str) -> None:
    if not isinstance(to, Shift):
        check_point(to, "to", (topic,))
    elif not isinstance(to.records, int):
        raise TypeError(f"a Shift is by a number of records, not by {type(to.records).__name__}")
