"""Answers requests about groups: JOIN, HEARTBEAT and COMMIT of members, and those of operators."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from memq.broker.api import Answer, Call, Reply
from memq.broker.api.group_migration import GroupMigrator
from memq.broker.api.reader_requests import known_partition
from memq.broker.api.service_lookup import ask_all_services, find_service, forward
from memq.broker.partitions import Partitions
from memq.broker.service_partitions.hosts import ServiceHosts
from memq.broker.services import BROKER_PROGRAM
from memq.errors import InvalidRequestError, MemqError, NotReadyError, TimedOutError
from memq.groups import OUTSIDE_GENERATION, Membership
from memq.groups.coordinator import GroupCoordinator
from memq.groups.group import check_wanted
from memq.groups.machine import SharedWanted, TopicPartitions, unpack_shared
from memq.groups.remote import committed_of, wire_of
from memq.notification.remote import partition_of, ref_of
from memq.protocol.admin_messages import AdminAnswer
from memq.protocol.frames import Api
from memq.protocol.group_messages import (
    CommitAnswer,
    CommitRequest,
    DeleteGroup,
    DescribeGroup,
    HeartbeatRequest,
    JoinRequest,
    ListFormerGroups,
    ListGroups,
    MembershipAnswer,
    MoveGroup,
    WireGroup,
    WireMember,
    WireRanges,
)
from memq.protocol.link import Link
from memq.protocol.messages import PartitionRef, encode_message
from memq.topic import Committed, ReadPartition, check_group

Found = TypeVar("Found", bound=msgspec.Struct)
_UNCHANGED = encode_message(MembershipAnswer(generation=OUTSIDE_GENERATION, unchanged=True, waits=True))
HEARTBEAT_S = 5.0  # time-out for the owner of a group: if it hangs, another broker may be the owner soon
REQUEST_S = 10.0  # the same for joins and commits, which may wait for others


class GroupRequests:
    """Requests that the coordinator of a group answers; any broker takes them, and asks it."""

    def __init__(self, partitions: Partitions, hosts: ServiceHosts, migrator: GroupMigrator) -> None:
        self._partitions = partitions
        self._hosts = hosts
        self._migrator = migrator

    async def join(self, call: Call[JoinRequest]) -> Answer:
        """Enter or leave a group. Raises: NotReadyError if the group's owner does not answer."""
        ask = call.ask
        coordinator = await self._coordinator(call, ask.group)
        if isinstance(coordinator, Link):
            return await _of_owner(coordinator, Api.JOIN, ask, MembershipAnswer, REQUEST_S)
        if ask.leave:
            await coordinator.leave(ask.group, ask.member)
            return MembershipAnswer(generation=OUTSIDE_GENERATION)
        if ask.ranges:
            partitions: Sequence[ReadPartition] = await _known_ranges(self._partitions, ask.ranges)
            session_ms = ask.session_ms
        else:
            partitions, session_ms = await _all_known(self._partitions, ask.partitions), ask.session_timeout_ms
        membership = await coordinator.join(ask.group, ask.member, partitions, session_ms)
        return self._answer(call, membership)

    async def heartbeat(self, call: Call[HeartbeatRequest]) -> Answer:
        """Keep a member alive, or let it leave. Raises: NotReadyError if the group's owner does not answer."""
        ask = call.ask
        coordinator = await self._coordinator(call, ask.group)
        if isinstance(coordinator, Link):
            return await _of_owner(coordinator, Api.HEARTBEAT, ask, MembershipAnswer, HEARTBEAT_S)
        if ask.leave:
            await coordinator.leave(ask.group, ask.member, ask.generation)
            return MembershipAnswer(generation=OUTSIDE_GENERATION)
        released = [partition_of(ref) for ref in ask.released]
        return self._answer(call, await coordinator.heartbeat(ask.group, ask.member, ask.generation, released))

    def keep(self, call: Call[HeartbeatRequest], reply: Reply) -> bool:
        """Keep a heartbeat that may wait, and `reply` once, later. False: `heartbeat` must answer it.

        A broker that forwards a heartbeat keeps nothing: so the client learns who the owner is, and asks it directly.
        """
        ask = call.ask
        if ask.wait_ms <= 0 or ask.released or ask.leave or call.connection.program == BROKER_PROGRAM:
            return False
        coordinator = self._hosts.service_here(self._hosts.groups, ask.group)
        if coordinator is None:
            return False

        def answer(found: Membership | MemqError | None) -> None:
            if found is None:
                reply(_UNCHANGED)
            else:
                reply(self._answer(call, found) if isinstance(found, Membership) else found)

        return coordinator.keep_heartbeat(ask.group, ask.member, ask.generation, ask.wait_ms, answer)

    def _answer(self, call: Call[Any], membership: Membership) -> MembershipAnswer:
        direct = call.connection.program != BROKER_PROGRAM
        return _answer(membership, self._hosts.address_of(call.ask.group), waits=direct)

    async def commit(self, call: Call[CommitRequest]) -> Answer:
        """Store positions of a group, or read them. Raises: as `join`."""
        ask = call.ask
        coordinator = await self._coordinator(call, ask.group)
        if isinstance(coordinator, Link):
            return await _of_owner(coordinator, Api.COMMIT, ask, CommitAnswer, REQUEST_S)
        if ask.positions:
            positions = committed_of(ask.positions)
            for partition in positions:
                await known_partition(self._partitions, ref_of(partition))
            if ask.force:
                await coordinator.overwrite(ask.group, positions)
            else:
                await coordinator.commit(ask.group, ask.member, ask.generation, positions, ask.number)
        if not ask.fetch:
            return CommitAnswer()
        found = await coordinator.committed(ask.group, [partition_of(ref) for ref in ask.fetch])
        return CommitAnswer(positions=[wire_of(partition, committed) for partition, committed in found.items()])

    async def list_groups(self, call: Call[ListGroups]) -> Answer:
        """Return the names of all groups; for another broker, of those whose coordinators are here."""
        await self._migrator.check(self._coordinator_here)
        hosts, proven = self._hosts, call.ask.proven
        names, covered = await ask_all_services(
            hosts, hosts.groups, call, lambda one: one.groups(proven=proven), lambda answer: answer.groups, create=True
        )
        return AdminAnswer(groups=sorted(names), covered=covered)

    async def delete(self, call: Call[DeleteGroup]) -> Answer:
        """Delete a group."""
        coordinator = await self._coordinator(call, call.ask.group)
        if isinstance(coordinator, Link):
            return await forward(coordinator, call.ask)
        await coordinator.delete_group(call.ask.group)
        return AdminAnswer()

    async def describe(self, call: Call[DescribeGroup]) -> Answer:
        """Return members, by their shown names, and positions of a group."""
        coordinator = await self._coordinator(call, call.ask.group)
        if isinstance(coordinator, Link):
            return await forward(coordinator, call.ask)
        state = await coordinator.describe(call.ask.group, proven=call.ask.proven)
        members = {shown_member(member): held for member, held in state.members.items()}
        return AdminAnswer(group=_wire_group(state.group, state.generation, members, state.committed))

    async def list_former(self, call: Call[ListFormerGroups]) -> Answer:
        """Return the names of the groups that an earlier release kept in the queue."""
        return AdminAnswer(groups=await self._migrator.names())

    async def move(self, call: Call[MoveGroup]) -> Answer:
        """Move a group from the queue to its state log, at the broker that has it; or show it."""
        ask = call.ask
        check_group(ask.group)
        if ask.dry_run:
            found = await self._migrator.read(ask.group)
        else:
            await self._migrator.check_brokers()
            coordinator = await self._coordinator_or_link(call, ask.group)
            if isinstance(coordinator, Link):
                return await forward(coordinator, ask)
            found = await self._migrator.move(ask.group, coordinator)
        members: dict[str, tuple[ReadPartition, ...]] = dict.fromkeys(found.members, ())
        return AdminAnswer(group=_wire_group(found.group, found.generation, members, found.committed))

    async def _coordinator(self, call: Call[Any], group: str) -> GroupCoordinator | Link:
        """Return the coordinator of a group, or a link to the broker that has it.

        Raises: InvalidNameError; MovedError for the request of a broker that takes this one for the owner.
        """
        check_group(group)
        await self._migrator.check(self._coordinator_here)
        return await self._coordinator_or_link(call, group)

    async def _coordinator_or_link(self, call: Call[Any], group: str) -> GroupCoordinator | Link:
        return await find_service(self._hosts, self._hosts.groups, group, call)

    async def _coordinator_here(self, group: str) -> GroupCoordinator:
        """Return the coordinator of a group at the only broker.

        Raises: NotReadyError; as `ServiceHosts.service_or_address`.
        """
        hosts = self._hosts
        found = await hosts.service_or_address(hosts.groups, group)
        if isinstance(found, str):
            raise NotReadyError(f"the coordinator of group '{group}' is at {found}")
        return found


async def _of_owner(owner: Link, api: Api, ask: Any, answer: type[Found], timeout_s: float) -> Found:
    """Return the answer of the owner of a group.

    Raises: NotReadyError if it does not answer. With a TimedOutError the client would give up its connection to this
    broker.
    """
    try:
        return await owner.request(api, ask, answer, timeout_s=timeout_s)
    except TimedOutError as error:
        raise NotReadyError(f"the owner of group '{ask.group}' does not answer: {error}") from error


async def _all_known(partitions: Partitions, refs: Sequence[PartitionRef]) -> list[ReadPartition]:
    """Return the read partitions in a message; each topic is looked up once. Raises: NotFoundError."""
    counts: dict[tuple[str, str], PartitionRef] = {}
    for ref in refs:
        most = counts.get((ref.topic, ref.topic_id), ref)
        counts[ref.topic, ref.topic_id] = max(most, ref, key=lambda each: each.partition)
        if ref.partition < 0:
            await known_partition(partitions, ref)
    for ref in counts.values():
        await known_partition(partitions, ref)
    return [partition_of(ref) for ref in refs]


async def _known_ranges(partitions: Partitions, ranges: Sequence[WireRanges]) -> SharedWanted:
    """Return the read partitions in these ranges; each topic is looked up once.

    Raises: NotFoundError; InvalidRequestError for ranges out of order; TooLargeError.
    """
    topics = [(each.topic, each.topic_id) for each in ranges]
    if topics != sorted(set(topics)):
        raise InvalidRequestError("the topics of a join are not in order, or one is named twice")
    count = 0
    for each in ranges:
        numbers = each.bounds
        if len(numbers) < 2 or len(numbers) % 2 or list(numbers) != sorted(set(numbers)):
            raise InvalidRequestError(f"the ranges of topic '{each.topic}' in a join are not in order")
        count += sum(numbers[1::2]) - sum(numbers[::2])
        check_wanted(count)
        for number in (numbers[0], numbers[-1] - 1):
            await known_partition(partitions, PartitionRef(topic=each.topic, topic_id=each.topic_id, partition=number))
    return unpack_shared(tuple(TopicPartitions(each.topic, each.topic_id, each.bounds) for each in ranges))


def shown_member(member: str) -> str:
    """Return the name under which others see a member: 48 bits of the SHA-256 of its id.

    The id itself is the member's secret. With it, another client could commit, or leave, for the member.
    """
    return f"member-{hashlib.sha256(f'memq member {member}'.encode()).hexdigest()[:12]}"


def _wire_group(
    name: str,
    generation: int,
    members: Mapping[str, Sequence[ReadPartition]],
    positions: Mapping[ReadPartition, Committed],
) -> WireGroup:
    return WireGroup(
        group=name,
        generation=generation,
        members=[
            WireMember(member=member, assigned=[ref_of(partition) for partition in held])
            for member, held in members.items()
        ],
        positions=[wire_of(partition, committed) for partition, committed in positions.items()],
    )


def _answer(membership: Membership, owner: str, *, waits: bool) -> MembershipAnswer:
    return MembershipAnswer(
        owner=owner,
        waits=waits,
        session_ms=membership.session_ms,
        generation=membership.generation,
        assigned=[ref_of(partition) for partition in membership.assigned],
        revoking=[ref_of(partition) for partition in membership.revoking],
        positions=[wire_of(partition, committed) for partition, committed in membership.positions.items()],
    )
