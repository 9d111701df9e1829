"""Groups through a broker: any one takes the requests, and forwards them to the owner of the group."""

from __future__ import annotations

from collections.abc import Sequence

from memq.errors import InvalidRequestError, TooLargeError
from memq.groups import GroupState, Membership
from memq.groups.machine import pack
from memq.notification import check_position
from memq.notification.remote import ANSWER_S, Ask, partition_of, ref_of
from memq.protocol.admin_messages import AdminAnswer, AdminRequest
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
    WireCommitted,
    WireRanges,
)
from memq.topic import Committed, Position, ReadPartition, Totals


class RemoteGroups:
    """See `Groups`."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    async def join(
        self, group: str, member: str, partitions: Sequence[ReadPartition], session_timeout_ms: int
    ) -> Membership:
        """See `Groups.join`."""
        if partitions:
            try:
                return await self._join_with_ranges(group, member, partitions, session_timeout_ms)
            except TooLargeError:
                raise
            except InvalidRequestError:
                pass  # perhaps of a broker of an earlier release
        request = JoinRequest(
            group=group,
            member=member,
            partitions=[ref_of(partition) for partition in partitions],
            session_timeout_ms=session_timeout_ms,
        )
        answer = await self._ask(Api.JOIN, request, MembershipAnswer, timeout_s=ANSWER_S)
        return membership_of(answer, waits=bool(answer.owner))

    async def _join_with_ranges(
        self, group: str, member: str, partitions: Sequence[ReadPartition], session_ms: int
    ) -> Membership:
        """Join with ranges of partitions: a list of 10,000 takes 1 MB."""
        ranges = [WireRanges(topic=each.topic, topic_id=each.topic_id, bounds=each.bounds) for each in pack(partitions)]
        request = JoinRequest(group=group, member=member, ranges=ranges, session_timeout_ms=0, session_ms=session_ms)
        answer = await self._ask(Api.JOIN, request, MembershipAnswer, timeout_s=ANSWER_S)
        return membership_of(answer, waits=bool(answer.owner))

    async def heartbeat(
        self, group: str, member: str, generation: int, released: Sequence[ReadPartition] = ()
    ) -> Membership:
        """See `Groups.heartbeat`."""
        request = HeartbeatRequest(
            group=group, member=member, generation=generation, released=[ref_of(partition) for partition in released]
        )
        answer = await self._ask(Api.HEARTBEAT, request, MembershipAnswer, timeout_s=ANSWER_S)
        return membership_of(answer, waits=bool(answer.owner))

    async def await_change(self, group: str, member: str, generation: int, wait_ms: int) -> Membership | None:
        """See `WaitingGroups.await_change`."""
        request = HeartbeatRequest(group=group, member=member, generation=generation, wait_ms=wait_ms)
        timeout_s = ANSWER_S + wait_ms / 1_000
        answer = await self._ask(Api.HEARTBEAT, request, MembershipAnswer, timeout_s=timeout_s)
        return None if answer.unchanged else membership_of(answer, waits=answer.waits)

    async def leave(self, group: str, member: str, generation: int | None = None) -> None:
        """See `Groups.leave`."""
        if generation is None:
            request = JoinRequest(group=group, member=member, leave=True)
            await self._ask(Api.JOIN, request, MembershipAnswer, timeout_s=ANSWER_S)
        else:
            beat = HeartbeatRequest(group=group, member=member, generation=generation, leave=True)
            await self._ask(Api.HEARTBEAT, beat, MembershipAnswer, timeout_s=ANSWER_S)

    async def commit(
        self, group: str, member: str, generation: int, positions: dict[ReadPartition, Committed], number: int = 0
    ) -> None:
        """See `Groups.commit`."""
        for partition, committed in positions.items():
            check_position(partition, committed)  # a message can't express a position of another partition
        wire = [wire_of(partition, committed) for partition, committed in positions.items()]
        request = CommitRequest(group=group, member=member, generation=generation, number=number, positions=wire)
        await self._ask(Api.COMMIT, request, CommitAnswer, timeout_s=ANSWER_S)

    async def overwrite(self, group: str, positions: dict[ReadPartition, Committed]) -> None:
        """Remove all members of a group, and store positions: members that join again start there.

        Raises: as `Groups.commit` from outside; so does a broker of an earlier release while the group has members.
        """
        wire = [wire_of(partition, committed) for partition, committed in positions.items()]
        await self._ask(
            Api.COMMIT, CommitRequest(group=group, force=True, positions=wire), CommitAnswer, timeout_s=ANSWER_S
        )

    async def committed(self, group: str, partitions: Sequence[ReadPartition]) -> dict[ReadPartition, Committed]:
        """See `Groups.committed`."""
        request = CommitRequest(group=group, fetch=[ref_of(partition) for partition in partitions])
        answer = await self._ask(Api.COMMIT, request, CommitAnswer, timeout_s=ANSWER_S)
        return committed_of(answer.positions)

    async def groups(self, *, proven: bool = True) -> Sequence[str]:
        """See `Groups.groups`. Without `proven`, the answer may be old after a takeover."""
        return (await self._admin(AdminRequest(ask=ListGroups(proven=proven)))).groups

    async def describe(self, group: str, *, proven: bool = True) -> GroupState:
        """See `Groups.describe`. Without `proven`, the answer may be old after a takeover."""
        return _group_of(await self._admin(AdminRequest(ask=DescribeGroup(group=group, proven=proven))))

    async def delete_group(self, group: str) -> None:
        """See `Groups.delete_group`."""
        await self._admin(AdminRequest(ask=DeleteGroup(group=group)))

    async def former_groups(self) -> Sequence[str]:
        """Return the names of the groups that an earlier release kept in the queue."""
        return (await self._admin(AdminRequest(ask=ListFormerGroups()))).groups

    async def move_group(self, group: str, *, dry_run: bool = False) -> GroupState:
        """Move a group from the queue to its state log; return it as it was. With `dry_run`, only return it.

        Raises: NotFoundError when it is not in the queue; InvalidRequestError when it has members there.
        """
        return _group_of(await self._admin(AdminRequest(ask=MoveGroup(group=group, dry_run=dry_run))))

    async def _admin(self, request: AdminRequest) -> AdminAnswer:
        return await self._ask(Api.ADMIN, request, AdminAnswer, timeout_s=ANSWER_S)


# ---- between the wire and the port --------------------------------------------------------------


def _group_of(answer: AdminAnswer) -> GroupState:
    found = answer.group
    assert found is not None, "the broker answered without a group"
    members = {member.member: tuple(partition_of(ref) for ref in member.assigned) for member in found.members}
    return GroupState(found.group, found.generation, members, committed_of(found.positions))


def wire_of(partition: ReadPartition, committed: Committed) -> WireCommitted:
    """Return a committed position as a field of a message."""
    return WireCommitted(
        partition=ref_of(partition),
        pointer_offset=committed.position.pointer_offset,
        record_index=committed.position.record_index,
        records=committed.totals.records,
        bytes=committed.totals.bytes,
        mark=committed.mark,
        covered=committed.covered,
        tried=committed.tried,
    )


def committed_of(positions: Sequence[WireCommitted]) -> dict[ReadPartition, Committed]:
    """Return the committed positions in a message."""
    return {
        partition_of(wire.partition): Committed(
            Position(wire.partition.partition, wire.pointer_offset, wire.record_index),
            Totals(wire.records, wire.bytes),
            wire.mark,
            wire.covered,
            wire.tried,
        )
        for wire in positions
    }


def membership_of(answer: MembershipAnswer, *, waits: bool = False) -> Membership:
    """Return the membership in a message."""
    return Membership(
        answer.generation,
        tuple(partition_of(ref) for ref in answer.assigned),
        tuple(partition_of(ref) for ref in answer.revoking),
        committed_of(answer.positions),
        answer.session_ms,
        waits,
    )
