"""Consumer groups by Kafka's own protocol: one hosted Kafka consumer per member."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any

from confluent_kafka import ConsumerGroupState, KafkaError, KafkaException, TopicPartition

from memq.errors import (
    ClosedError,
    GenerationFencedError,
    InvalidRequestError,
    NotFoundError,
    QueueError,
    ThrottledError,
)
from memq.notification import (
    MARK_END,
    OFFSET_END,
    RECORD_INDEX_END,
    TOTAL_END,
    FormerGroup,
    GroupState,
    Membership,
    check_position,
)
from memq.notification.groups import OUTSIDE_GENERATION, check_member
from memq.notification.kafka.admin import KafkaAdmin, KafkaPartition
from memq.notification.kafka.groups.member import HostedMember
from memq.notification.kafka.groups.requests import KafkaGroupRequests, Positions
from memq.notification.kafka.settings import KafkaSettings, Names
from memq.runtime.clock import Clock
from memq.runtime.tasks import TaskOwner
from memq.topic import Committed, Position, ReadPartition, Totals, check_group

# The offset of a commit is that of a pointer. Its metadata has the record index, the totals and the mark of the
# position, in ASCII; Kafka accepts 4,095 UTF-16 units. A reset with Kafka's tools writes a commit without metadata: its
# position is the first record of the pointer. A commit of an older release has no mark.
_METADATA = re.compile(
    r"memq1 (\d{1,20}) (\d{1,20}) (\d{1,20})(?: (\d{1,10}))?\Z"
)  # record index, records, bytes, mark
JOIN_S = 3.0  # longest wait of a join for Kafka's assignment; heartbeats return later ones
EXPIRY_S = 0.5  # interval between searches for silent members
# A commit may be retried after these errors: Kafka is rebalancing the group, its coordinator moves, or librdkafka does
# not know the next generation yet. If the member loses a partition by that, `Holdings` refuses the retried commit.
_PASSING = (
    KafkaError.REBALANCE_IN_PROGRESS,
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.STALE_MEMBER_EPOCH,
    KafkaError._NO_OFFSET,
)
# While Kafka creates its topic of positions (at the first commit) or moves a part of it, no node coordinates the group.
_MOVING = (KafkaError.NOT_COORDINATOR, KafkaError.COORDINATOR_LOAD_IN_PROGRESS, KafkaError.COORDINATOR_NOT_AVAILABLE)
MOVING_S_MAX = 5.0
MOVING_PAUSE_S = 0.1
Refusal = tuple[KafkaError, Sequence[TopicPartition]]  # an error, and the offsets that are not stored
_ACTIVE = (KafkaError.UNKNOWN_MEMBER_ID, KafkaError.NON_EMPTY_GROUP, KafkaError.STALE_MEMBER_EPOCH)


@dataclass(frozen=True, slots=True)
class Parts:
    """Objects that the groups share with the rest of the queue."""

    admin: KafkaAdmin
    settings: KafkaSettings
    names: Names
    requests: KafkaGroupRequests
    tasks: TaskOwner
    clock: Clock
    random: Random


class HostedGroups:
    """Members of groups that send heartbeats to this process, each with a Kafka consumer and a thread.

    A member that wants one partition of a topic subscribes to the whole topic, because Kafka's groups subscribe to
    topics. This process removes a member that was silent for its session time-out. If this process dies, Kafka removes
    its members after their session time-out.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._stored = Positions(parts.settings, parts.admin.errors)
        self._members: dict[tuple[str, str], HostedMember] = {}
        self._ending: dict[HostedMember, None] = {}  # members that are being closed
        self._closed = False
        self._generation = parts.random.getrandbits(20) << 32
        self._expiring = False

    # ---- membership --------------------------------------------------------------------------

    async def join(
        self, group: str, name: str, partitions: Sequence[ReadPartition], session_timeout_ms: int
    ) -> Membership:
        """See `Groups.join`."""
        check_member(name, partitions, session_timeout_ms)
        topics = sorted({self._parts.names.kafka_topic(partition) for partition in partitions})
        member = self._members.get((group, name))
        while member is not None and member.failure is not None:
            await self._end(group, name, member)
            member = self._members.get((group, name))  # another join may have hosted it meanwhile
        if member is None:
            member = self._host(group, name, session_timeout_ms)
        else:
            member.holdings.rejoin()
        member.session_timeout_ms, member.heard_s = session_timeout_ms, self._parts.clock.monotonic()
        if member.topics != topics:
            member.changed.clear()
            member.subscribe(topics)
            with suppress(TimeoutError):
                async with asyncio.timeout(JOIN_S):
                    await member.changed.wait()
        return self._answer(group, name, member)

    async def heartbeat(self, group: str, name: str, generation: int, released: Sequence[ReadPartition]) -> Membership:
        """See `Groups.heartbeat`."""
        member = self._known(group, name)
        member.holdings.check(generation)
        member.heard_s = self._parts.clock.monotonic()
        member.release(generation, released)
        return self._answer(group, name, member)

    async def leave(self, group: str, name: str) -> None:
        """See `Groups.leave`. A static member keeps its partitions in Kafka until its session times out."""
        member = self._members.get((group, name))
        if member is not None:
            await self._end(group, name, member)

    def _host(self, group: str, name: str, session_timeout_ms: int) -> HostedMember:
        parts = self._parts
        if self._closed:  # nobody would close the member, and the end of its task waits for its thread
            raise ClosedError("the queue is closed")
        if len(self._members) >= parts.settings.group_members_max:
            raise ThrottledError(
                f"this broker hosts {len(self._members)} members of groups already",
                hint="raise group_members_max in [kafka], or add brokers",
            )
        self._generation += 1 << 16
        settings = parts.settings.member(parts.names.kafka_group(group), name, session_timeout_ms)
        member = HostedMember(name, settings, parts.names, parts.admin.errors, self._generation)
        self._members[group, name] = member
        parts.tasks.start(member.serve(), f"kafka member {name}")
        if not self._expiring:
            self._expiring = True
            parts.tasks.start(self._expire(), "kafka members that are silent")
        return member

    def _known(self, group: str, name: str) -> HostedMember:
        member = self._members.get((group, name))
        if member is None:
            raise GenerationFencedError(f"member '{name}' of group '{group}' is not hosted here; it joins again")
        if member.failure is not None:
            raise member.failure
        return member

    def _answer(self, group: str, name: str, member: HostedMember) -> Membership:
        if member.failure is not None:
            raise member.failure
        return member.holdings.membership()

    async def _end(self, group: str, name: str, member: HostedMember) -> None:
        """Close a member, unless another call does; never one that was hosted in its place meanwhile."""
        if self._members.get((group, name)) is member:
            del self._members[group, name]
            self._ending[member] = None
            try:
                await member.close()
            finally:
                del self._ending[member]

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(EXPIRY_S)
            now_s = self._parts.clock.monotonic()
            for (group, name), member in self._members.items():
                if member.failure is not None or (now_s - member.heard_s) * 1000 >= member.session_timeout_ms:
                    # a task of its own: a close that hangs delays no other member
                    self._parts.tasks.start(self._end(group, name, member), f"kafka member {name} that is silent")

    async def close(self) -> None:
        """Refuse new members, leave all groups, and wait for the members that are leaving already."""
        self._closed = True
        members = [*self._members.values(), *self._ending]
        self._members.clear()
        await asyncio.gather(*(member.close() for member in members))
        await self._stored.close()

    # ---- positions ---------------------------------------------------------------------------

    async def commit(
        self, group: str, name: str, generation: int, positions: dict[ReadPartition, Committed], number: int
    ) -> None:
        """See `Groups.commit`. Kafka may store a part of a failed commit.

        A retry of the whole commit is harmless.
        """
        offsets = [
            TopicPartition(
                self._parts.names.kafka_topic(partition),
                partition.partition,
                committed.position.pointer_offset,
                metadata=encode_metadata(committed),
            )
            for partition, committed in positions.items()
        ]
        for partition, committed in positions.items():
            check_position(partition, committed)
        if name == "" and generation == OUTSIDE_GENERATION:
            await self._commit_outside(group, offsets)
            await self._check_stored(group, positions)
            return
        member = self._known(group, name)
        member.holdings.check_commit(generation, positions, number)
        if not offsets:
            return
        stored = await member.commit(offsets)
        refused = (stored, offsets) if isinstance(stored, KafkaError) else _refusal_in(stored, offsets)
        if refused is not None:
            raise self._refused(*refused, group, member=True)

    def _refused(
        self, error: KafkaError, failed: Sequence[TopicPartition], group: str, *, member: bool = False
    ) -> Exception:
        names = ", ".join(f"{part.topic} {part.partition}" for part in failed[:5])
        doing = f"committing {len(failed)} positions of group '{group}' ({names})"
        if error.code() in _PASSING:
            return QueueError(f"{doing}: {error.str().lower()}")
        return self._parts.admin.errors.group_failure(error, doing, member=member)

    async def _commit_outside(self, group: str, offsets: list[TopicPartition]) -> None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + MOVING_S_MAX
        while (refused := await self._store_outside(group, offsets)) is not None:
            error, failed = refused
            if error.code() not in _MOVING or loop.time() >= until_s:
                raise await self._refused_outside(error, group, failed)
            await asyncio.sleep(MOVING_PAUSE_S)

    async def _check_stored(self, group: str, positions: dict[ReadPartition, Committed]) -> None:
        """Read positions back that were set from outside, for example by a reset.

        librdkafka has the same result for a stored position and for one that Kafka's answer lacks. A commit of a
        member is not read back, because its next commit has the position again.
        Raises: QueueError, DeniedError.
        """
        found = await self.committed(group, list(positions))
        lacking = [partition for partition, committed in positions.items() if found.get(partition) != committed]
        if lacking:
            names = ", ".join(f"{each.topic} {each.partition}" for each in lacking[:5])
            raise QueueError(
                f"committing {len(positions)} positions of group '{group}': Kafka does not show those of {names}",
                hint="repeat the request, while no consumer of the group runs",
            )

    async def _store_outside(self, group: str, offsets: list[TopicPartition]) -> Refusal | None:
        """Set the positions of a group without members; return the error and the refused offsets, or None."""
        try:
            stored = await self._parts.requests.store(self._parts.names.kafka_group(group), offsets)
        except KafkaException as error:
            return error.args[0], offsets
        return _refusal_in(stored, offsets)

    async def _refused_outside(self, error: KafkaError, group: str, failed: Sequence[TopicPartition]) -> Exception:
        if error.code() in _ACTIVE:
            return await self._active(group, "positions can't be set")
        return self._refused(error, failed, group)

    async def committed(self, group: str, partitions: Sequence[ReadPartition]) -> dict[ReadPartition, Committed]:
        """See `Groups.committed`."""
        kafka_partitions = [(self._parts.names.kafka_topic(partition), partition.partition) for partition in partitions]
        return await self._positions(group, kafka_partitions)

    async def _positions(
        self, group: str, kafka_partitions: Sequence[KafkaPartition]
    ) -> dict[ReadPartition, Committed]:
        found: dict[ReadPartition, Committed] = {}
        for part in await self._stored.of(self._parts.names.kafka_group(group), kafka_partitions):
            partition = self._parts.names.read_partition(part.topic, part.partition)
            if partition is not None:
                committed = decode_commit(partition, part.offset, part.metadata)
                if committed is not None:
                    found[partition] = committed
        return dict(sorted(found.items()))

    # ---- for operators -----------------------------------------------------------------------

    async def groups(self) -> Sequence[str]:
        """See `Groups.groups`."""
        names = [self._parts.names.group(each) for each in await self._parts.admin.list_groups()]
        return sorted(name for name in names if name is not None)

    async def describe(self, group: str) -> GroupState:
        """See `Groups.describe`. The generation is 0, as Kafka does not report it."""
        found = await self._describe(group)
        members: dict[str, tuple[ReadPartition, ...]] = {}
        for each in found.members:
            held = [
                self._parts.names.read_partition(part.topic, part.partition)
                for part in each.assignment.topic_partitions
            ]
            members[each.group_instance_id or each.client_id] = tuple(sorted(part for part in held if part is not None))
        return GroupState(
            group, 0, dict(sorted(members.items())), await self._positions(group, await self._kafka_partitions())
        )

    async def _kafka_partitions(self) -> list[KafkaPartition]:
        """Return the partitions of all Kafka topics of memq."""
        return [
            (topic, number)
            for topic, count in (await self._parts.admin.partition_counts()).items()
            for number in range(count)
            if self._parts.names.read_partition(topic, number) is not None
        ]

    async def _describe(self, group: str) -> Any:
        missing = NotFoundError(f"group '{group}' does not exist", hint="memq group list shows the groups")
        try:
            found = await self._parts.requests.describe(self._parts.names.kafka_group(group))
        except KafkaException as error:
            if error.args[0].code() == KafkaError.GROUP_ID_NOT_FOUND:
                raise missing from error
            raise self._parts.admin.errors.group_failure(error, f"describing group '{group}'") from error
        if found.state == ConsumerGroupState.DEAD:
            raise missing
        return found

    async def _active(self, group: str, refusal: str) -> QueueError | InvalidRequestError:
        """Return the error for a request that an active group refuses; retryable if it now has no members."""
        count = len((await self._describe(group)).members)
        if not count:
            return QueueError(f"{refusal}: Kafka says that the group has members, and then that it has none")
        return InvalidRequestError(
            f"{refusal}: the group has {count} active members", hint="stop the group's consumers first"
        )

    async def delete(self, group: str) -> None:
        """See `Groups.delete_group`."""
        try:
            await self._parts.requests.delete(self._parts.names.kafka_group(group))
        except KafkaException as error:
            code = error.args[0].code()
            if code == KafkaError.GROUP_ID_NOT_FOUND:
                raise NotFoundError(
                    f"group '{group}' does not exist", hint="memq group list shows the groups"
                ) from error
            if code in _ACTIVE:
                with suppress(NotFoundError):  # the group is deleted by now
                    raise await self._active(group, f"group '{group}' can't be deleted") from error
                return
            raise self._parts.admin.errors.group_failure(error, f"deleting group '{group}'") from error


class FormerKafkaGroups:
    """See `memq.notification.FormerGroups`."""

    def __init__(self, groups: HostedGroups) -> None:
        self._groups = groups

    async def names(self) -> Sequence[str]:
        """See `FormerGroups.names`."""
        return await self._groups.groups()

    async def read(self, group: str) -> FormerGroup:
        """See `FormerGroups.read`. The generation is 0, as Kafka does not report it."""
        found = await self._groups.describe(check_group(group))
        return FormerGroup(group, found.generation, tuple(found.members), found.committed)

    async def remove(self, group: str) -> None:
        """See `FormerGroups.remove`. Raises: InvalidRequestError when it has members."""
        await self._groups.delete(check_group(group))


def _refusal_in(stored: Sequence[TopicPartition], offsets: Sequence[TopicPartition]) -> Refusal | None:
    """Return the error and the refused offsets of Kafka's answer to a commit; None if all are stored.

    An offset without an answer is not stored.
    """
    failed: list[Any] = [part for part in stored if part.error is not None]
    if failed:
        return failed[0].error, failed
    answered = {(part.topic, part.partition) for part in stored}
    missing = [part for part in offsets if (part.topic, part.partition) not in answered]
    return (KafkaError(KafkaError._BAD_MSG, "Kafka's answer lacks them"), missing) if missing else None


def encode_metadata(committed: Committed) -> str:
    """Return the metadata of a commit, at most 76 characters."""
    position, totals = committed.position, committed.totals
    mark = f" {committed.mark}" if committed.mark else ""
    return f"memq1 {position.record_index} {totals.records} {totals.bytes}{mark}"


def decode_commit(partition: ReadPartition, offset: int, metadata: str | None) -> Committed | None:
    """Return the position in a commit; None when the offset is out of bounds.

    Metadata that memq has not written is ignored.
    """
    if not 0 <= offset < OFFSET_END:
        return None
    found = _METADATA.match(metadata or "")
    index, records, size, mark = (int(part) for part in found.groups("0")) if found else (0, 0, 0, 0)
    if not (index < RECORD_INDEX_END and records < TOTAL_END and size < TOTAL_END and mark < MARK_END):
        index, records, size, mark = 0, 0, 0, 0
    return Committed(Position(partition.partition, offset, index), Totals(records, size), mark)
