"""The groups of one service partition as a state machine: memberships and committed positions. Pure.

The owner of the partition decides on a copy of a group, with the rules of `memq.notification.groups`, and puts the
difference into the log as a `MembersDecision`. A decision therefore names members, generations and holds: another
release of memq, whose assignment differs, makes the same state of it (S3). `base` is the generation on which the owner
decided. If another decision came in between, the decision changes nothing, and the owner decides again.

A commit is judged by the machine itself, in the state that all earlier decisions made (G2): the member holds the
partitions in the generation that it names. Its answer is the same at every owner.

Times are no part of the state: a new owner begins to count the silence of all members when it has opened the log (G4).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from memq.errors import (
    CorruptDataError,
    GenerationFencedError,
    InvalidRequestError,
    NotFoundError,
    UnsupportedFormatError,
)
from memq.notification.groups import Group, Member
from memq.state_log import Answer
from memq.topic import Committed, Position, ReadPartition, Totals

STATE_VERSION = 1


class StalePlanError(Exception):
    """A decision was made on a state that has changed meanwhile. The coordinator decides again."""


class StoredPosition(msgspec.Struct, frozen=True, array_like=True):
    """The position of a group in one read partition, as decisions and snapshots have it."""

    topic: str
    topic_id: str
    partition: int
    pointer_offset: int
    record_index: int
    records: int
    bytes: int
    mark: int

    @classmethod
    def of(cls, partition: ReadPartition, committed: Committed) -> StoredPosition:
        """Return a committed position as it is stored."""
        at, totals = committed.position, committed.totals
        return cls(
            partition.topic,
            partition.topic_id,
            partition.partition,
            at.pointer_offset,
            at.record_index,
            totals.records,
            totals.bytes,
            committed.mark,
        )

    @property
    def read_partition(self) -> ReadPartition:
        """The read partition in which the position is."""
        return ReadPartition(self.topic, self.topic_id, self.partition)

    @property
    def committed(self) -> Committed:
        """The position with its totals and its mark."""
        at = Position(self.partition, self.pointer_offset, self.record_index)
        return Committed(at, Totals(self.records, self.bytes), self.mark)


class MembersDecision(msgspec.Struct, frozen=True, tag="members"):
    """The membership of a group after a join, a leave, an expiry or a release.

    `changed` are members as they are after it, `gone` those that are not in the group any more.
    """

    group: str
    base: int
    generation: int
    changed: dict[str, Member]
    gone: tuple[str, ...] = ()


class CommitDecision(msgspec.Struct, frozen=True, tag="commit"):
    """Positions that a member commits, as `Groups.commit` takes them."""

    group: str
    member: str
    generation: int
    number: int
    positions: tuple[StoredPosition, ...]


class DeleteDecision(msgspec.Struct, frozen=True, tag="delete"):
    """The deletion of a group without members."""

    group: str


class ForgetDecision(msgspec.Struct, frozen=True, tag="forget"):
    """The removal of all positions in partitions of a deleted topic."""

    partitions: tuple[ReadPartition, ...]


Decision = MembersDecision | CommitDecision | DeleteDecision | ForgetDecision


class StoredGroup(msgspec.Struct):
    """A group: its membership, and its positions by read partition."""

    membership: Group
    positions: dict[ReadPartition, Committed]


class _SavedGroup(msgspec.Struct, frozen=True):
    membership: Group
    positions: tuple[StoredPosition, ...]


class _SavedGroups(msgspec.Struct, frozen=True):
    version: int
    floor: int
    groups: dict[str, _SavedGroup]


_encode = msgspec.msgpack.Encoder().encode
_decode_decision = msgspec.msgpack.Decoder(Decision).decode
_decode_groups = msgspec.msgpack.Decoder(_SavedGroups).decode
_decode_group = msgspec.msgpack.Decoder(Group).decode


def encode_decision(decision: Decision) -> bytes:
    """Return the bytes of a decision."""
    return _encode(decision)


def decode_decision(body: bytes) -> Decision:
    """Return a decision. Raises: CorruptDataError."""
    try:
        decision: Decision = _decode_decision(body)
    except msgspec.MsgspecError as error:
        raise CorruptDataError(f"decision about a group can't be read: {error}") from error
    return decision


def copy_of(membership: Group) -> Group:
    """Return a copy of a membership that shares nothing with it."""
    return _decode_group(_encode(membership))


def difference(group: str, before: Group, after: Group) -> MembersDecision:
    """Return the decision that makes `after` of `before`. Times of heartbeats are left out."""
    changed: dict[str, Member] = {}
    for name, member in after.members.items():
        member.heard_ms = 0
        if before.members.get(name) != member:
            changed[name] = member
    gone = tuple(name for name in before.members if name not in after.members)
    return MembersDecision(group, before.generation, after.generation, changed, gone)


class GroupMachine:
    """All groups of a service partition. See `memq.state_log.StateMachine`.

    `apply` returns None, or the error for the caller: the decision then changed nothing. The generation of a group
    never goes back, also not when the group is deleted and made again (G1): `floor` is the highest one of a deleted
    group.
    """

    def __init__(self) -> None:
        self.groups: dict[str, StoredGroup] = {}
        self.floor = 0

    def apply(self, body: bytes) -> Answer:
        """Apply a decision. Raises: CorruptDataError."""
        decision = decode_decision(body)
        try:
            match decision:
                case MembersDecision():
                    self._change_members(decision)
                case CommitDecision():
                    self._commit(decision)
                case DeleteDecision():
                    self._delete(decision.group)
                case ForgetDecision():
                    self._forget(decision.partitions)
        except (GenerationFencedError, InvalidRequestError, NotFoundError, StalePlanError) as error:
            return error
        return None

    def membership(self, group: str) -> Group:
        """Return the membership of a group; a new one for an unknown group. Do not change it."""
        stored = self.groups.get(group)
        return stored.membership if stored is not None else Group(self.floor)

    def _change_members(self, decision: MembersDecision) -> None:
        stored = self.groups.get(decision.group) or StoredGroup(Group(self.floor), {})
        membership = stored.membership
        if membership.generation != decision.base:
            raise StalePlanError(f"group '{decision.group}' is in generation {membership.generation}")
        for name in decision.gone:
            membership.members.pop(name, None)
        for name, member in decision.changed.items():
            before = membership.members.get(name)  # it may have committed since the owner decided
            member.commits = max(member.commits, before.commits if before is not None else 0)
            membership.members[name] = member
        membership.generation = decision.generation
        self.groups[decision.group] = stored

    def _commit(self, decision: CommitDecision) -> None:
        stored = self.groups.get(decision.group) or StoredGroup(Group(self.floor), {})
        positions = {each.read_partition: each.committed for each in decision.positions}
        stored.membership.check_commit(decision.member, decision.generation, positions, 0, decision.number)
        stored.positions |= positions
        self.groups[decision.group] = stored

    def _delete(self, group: str) -> None:
        stored = self.groups.get(group)
        if stored is None:
            raise missing_group(group)
        stored.membership.check_no_members(f"group '{group}' can't be deleted")
        self.floor = max(self.floor, stored.membership.generation)
        del self.groups[group]

    def _forget(self, partitions: Sequence[ReadPartition]) -> None:
        for stored in self.groups.values():
            for partition in partitions:
                stored.positions.pop(partition, None)

    # ---- snapshots -------------------------------------------------------------------------------

    def snapshot(self) -> bytes:
        """Return all groups as bytes."""
        groups = {
            name: _SavedGroup(
                stored.membership, tuple(StoredPosition.of(*each) for each in sorted(stored.positions.items()))
            )
            for name, stored in sorted(self.groups.items())
        }
        return _encode(_SavedGroups(STATE_VERSION, self.floor, groups))

    def restore(self, state: bytes) -> None:
        """Take the groups of a snapshot. Raises: UnsupportedFormatError for a newer one; CorruptDataError."""
        try:
            saved = _decode_groups(state)
        except msgspec.MsgspecError as error:
            raise CorruptDataError(f"snapshot of groups can't be read: {error}") from error
        if saved.version != STATE_VERSION:
            raise UnsupportedFormatError(f"snapshot of groups has version {saved.version}, not {STATE_VERSION}")
        self.floor = saved.floor
        self.groups = {
            name: StoredGroup(group.membership, {each.read_partition: each.committed for each in group.positions})
            for name, group in saved.groups.items()
        }


def missing_group(name: str) -> NotFoundError:
    """Return the error about a group that does not exist."""
    return NotFoundError(f"group '{name}' does not exist", hint="memq group list shows the groups")
