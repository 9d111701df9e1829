"""The groups of one service partition as a state machine: memberships and committed positions. Pure.

The owner of the partition decides on a copy of a group, with the rules of `memq.groups.group`, and puts the
difference into the log as a `MembersDecision`. A decision therefore names members, generations and holds: another
release of memq, whose assignment differs, makes the same state of it (S3). `base` is the generation on which the owner
decided. If another decision came in between, the decision changes nothing, and the owner decides again.

A commit is judged by the machine itself, in the state that all earlier decisions made (G2): the member holds the
partitions in the generation that it names. Its answer is the same at every owner.

Times are no part of the state: a new owner begins to count the silence of all members when it has opened the log (G4).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

import msgspec

from memq.errors import (
    CorruptDataError,
    GenerationFencedError,
    InvalidRequestError,
    NotFoundError,
)
from memq.groups.group import Group, HeldPartition, Member, PlannedGroup
from memq.groups.pieces import GatheredPieces, PieceDecision, PieceReader
from memq.limits import KIB
from memq.state_log import Answer
from memq.state_log.machine_format import MachineFormat
from memq.topic import Committed, Covered, Position, ReadPartition, Totals

GROUPS_MACHINE = "groups"  # its name in the log
STATE_VERSION = 2  # 1: without pieces of decisions
SLICE_MEMBERS = 1_024  # that one step of a copy has
WANTED_SETS_MAX = 256  # sets of partitions that members want, which are kept to share them
PORTION_BYTES_MAX = 48 * KIB  # of the positions in one decision: an entry has at most 64 KiB


class StalePlanError(Exception):
    """A decision was made on a state that has changed meanwhile. The coordinator decides again."""


class TopicPartitions(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Read partitions of one topic, as ranges: `bounds` has begin and end (exclusive) of each, in order."""

    topic: str
    topic_id: str
    bounds: tuple[int, ...]


class StoredPosition(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A position in a read partition, as `Committed` has it."""

    partition: int
    offset: int
    index: int
    records: int
    bytes: int
    mark: int
    covered: Covered = ()
    tried: tuple[tuple[int, int], ...] = ()  # earlier releases ignore it


class PackedPositions(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Positions in read partitions of one topic."""

    topic: str
    topic_id: str
    positions: tuple[StoredPosition, ...]


class StoredMember(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A member as decisions and snapshots have it: `Member` without times.

    `holds` has the generations `since` and `revoking` of some holds, and their partitions.
    """

    session_timeout_ms: int
    joined: int
    commits: int
    wanted: tuple[TopicPartitions, ...]
    holds: tuple[tuple[int, int, tuple[TopicPartitions, ...]], ...]


class MembersDecision(msgspec.Struct, frozen=True, tag="members"):
    """The membership of a group after a join, a leave, an expiry or a release.

    `changed` are members as they are after it, `gone` those that are not in the group any more.
    """

    group: str
    base: int
    generation: int
    changed: dict[str, StoredMember]
    gone: tuple[str, ...] = ()


class CommitDecision(msgspec.Struct, frozen=True, tag="commit"):
    """Positions that a member commits, as `Groups.commit` takes them."""

    group: str
    member: str
    generation: int
    number: int
    positions: tuple[PackedPositions, ...]


class DeleteDecision(msgspec.Struct, frozen=True, tag="delete"):
    """The deletion of a group without members."""

    group: str


class ImportDecision(msgspec.Struct, frozen=True, tag="import"):
    """Positions of a group that an earlier release kept in the queue, and its generation there.

    The group may not have members. A position that is not above the one of the group changes nothing: the same group
    may be imported twice.
    """

    group: str
    generation: int
    positions: tuple[PackedPositions, ...]


class ForgetDecision(msgspec.Struct, frozen=True, tag="forget"):
    """The removal of all positions in partitions of a deleted topic."""

    partitions: tuple[TopicPartitions, ...]


class RestoredDecision(msgspec.Struct, frozen=True, tag="restored"):
    """Positions in logs that `memq restore` has made again, by group (S9).

    These groups lose their members, which know offsets of the lost logs. Generations grow by `gap`: a group whose last
    decisions are lost had higher ones than its state has. With `all`, those of all groups grow, also of later ones.
    """

    groups: dict[str, tuple[PackedPositions, ...]]
    gap: int = 1
    all: bool = False


Decision = (
    MembersDecision
    | CommitDecision
    | DeleteDecision
    | ForgetDecision
    | ImportDecision
    | RestoredDecision
    | PieceDecision
)


class StoredGroup(msgspec.Struct):
    """A group: its membership, and its positions by read partition."""

    membership: Group
    positions: dict[ReadPartition, Committed]


class _SavedGroup(msgspec.Struct, frozen=True):
    generation: int
    members: dict[str, StoredMember]
    positions: tuple[PackedPositions, ...]


class _SavedGroups(msgspec.Struct, frozen=True, omit_defaults=True):
    version: int
    floor: int
    groups: dict[str, _SavedGroup]
    gathered: dict[str, GatheredPieces] = {}


_FORMAT: MachineFormat[Decision, _SavedGroups] = MachineFormat(
    Decision, _SavedGroups, STATE_VERSION, decision="decision about a group", snapshot="snapshot of groups"
)
encode_decision = _FORMAT.encode_decision
decode_decision = _FORMAT.decode_decision


def pack(partitions: Iterable[ReadPartition]) -> tuple[TopicPartitions, ...]:
    """Return read partitions by topic, as ranges."""
    numbers: dict[tuple[str, str], set[int]] = {}
    for partition in partitions:
        numbers.setdefault((partition.topic, partition.topic_id), set()).add(partition.partition)
    return tuple(TopicPartitions(*topic, _ranges(found)) for topic, found in sorted(numbers.items()))


def _ranges(numbers: Iterable[int]) -> tuple[int, ...]:
    """Return begin and end of each range of numbers, in order."""
    found: list[int] = []
    for number in sorted(numbers):
        if found and found[-1] == number:
            found[-1] += 1
        else:
            found += [number, number + 1]
    return tuple(found)


def unpack(packed: Iterable[TopicPartitions]) -> list[ReadPartition]:
    """Return the read partitions, sorted within each topic."""
    return [
        ReadPartition(each.topic, each.topic_id, number)
        for each in packed
        for begin, end in zip(each.bounds[::2], each.bounds[1::2], strict=True)
        for number in range(begin, end)
    ]


def pack_positions(positions: Mapping[ReadPartition, Committed]) -> tuple[PackedPositions, ...]:
    """Return positions by topic."""
    found: dict[tuple[str, str], list[StoredPosition]] = {}
    for partition, committed in sorted(positions.items(), key=lambda item: item[0]):
        at, totals = committed.position, committed.totals
        numbers = (at.pointer_offset, at.record_index, totals.records, totals.bytes, committed.mark)
        stored = StoredPosition(partition.partition, *numbers, committed.covered, committed.tried)
        found.setdefault((partition.topic, partition.topic_id), []).append(stored)
    return tuple(PackedPositions(*topic, tuple(each)) for topic, each in found.items())


def portions(positions: Mapping[ReadPartition, Committed]) -> Iterator[dict[ReadPartition, Committed]]:
    """Yield the positions in portions that fit into an entry each; for no positions one that is empty."""
    portion: dict[ReadPartition, Committed] = {}
    size = 0
    for partition, committed in positions.items():
        more = 43 + 13 * len(committed.tried) + 9 * sum(3 + len(numbers) for _, _, numbers in committed.covered)
        if portion and size + more > PORTION_BYTES_MAX:
            yield portion
            portion, size = {}, 0
        portion[partition] = committed
        size += more
    yield portion


def unpack_positions(packed: Iterable[PackedPositions]) -> dict[ReadPartition, Committed]:
    """Return positions by read partition."""
    return {
        ReadPartition(each.topic, each.topic_id, at.partition): Committed(
            Position(at.partition, at.offset, at.index), Totals(at.records, at.bytes), at.mark, at.covered, at.tried
        )
        for each in packed
        for at in each.positions
    }


def _stored(member: Member) -> StoredMember:
    kinds = sorted({(hold.since, hold.revoking) for hold in member.holds})
    holds = tuple(
        (*kind, pack(hold.partition for hold in member.holds if (hold.since, hold.revoking) == kind)) for kind in kinds
    )
    return StoredMember(member.session_timeout_ms, member.joined, member.commits, _packed(member.wanted), holds)


class SharedWanted(tuple[ReadPartition, ...]):  # noqa: SLOT001 - a tuple can't have slots with values
    """The partitions that some members want, each once, and the same as ranges."""

    packed: tuple[TopicPartitions, ...]


def shared_wanted(partitions: Iterable[ReadPartition]) -> SharedWanted:
    """Return the partitions, each once, in the tuple that all members with the same ones have."""
    return partitions if isinstance(partitions, SharedWanted) else unpack_shared(pack(partitions))


@lru_cache(maxsize=WANTED_SETS_MAX)
def unpack_shared(packed: tuple[TopicPartitions, ...]) -> SharedWanted:
    """Return the partitions in these ranges, as `shared_wanted`."""
    found = SharedWanted(unpack(packed))
    found.packed = packed
    return found


def _packed(wanted: tuple[ReadPartition, ...]) -> tuple[TopicPartitions, ...]:
    return wanted.packed if isinstance(wanted, SharedWanted) else pack(wanted)


def _restored(stored: StoredMember) -> Member:
    holds = [
        HeldPartition(each, since, revoking) for since, revoking, packed in stored.holds for each in unpack(packed)
    ]
    return Member(stored.session_timeout_ms, 0, stored.joined, unpack_shared(stored.wanted), holds, stored.commits)


def copy_of(membership: Group) -> PlannedGroup:
    """Return a copy of a membership, to plan a decision on."""
    return next(copy for copy in copying(membership) if copy is not None)


def copying(membership: Group) -> Iterator[PlannedGroup | None]:
    """Return the steps of `copy_of`; the last one is the copy, the others are None."""
    generation, members = membership.generation, dict[str, Member]()
    for number, (name, member) in enumerate(list(membership.members.items()), 1):
        holds = [msgspec.structs.replace(hold) for hold in member.holds]
        members[name] = msgspec.structs.replace(member, holds=holds)
        if number % SLICE_MEMBERS == 0:
            yield None
    yield PlannedGroup(generation, members)


def difference(group: str, before: Group, after: PlannedGroup) -> MembersDecision:
    """Return the decision that makes `after` of `before`. Times of heartbeats are left out."""
    after.settle()
    changed = changed_members(before, after, after.members)
    return MembersDecision(group, before.generation, after.generation, changed, gone_members(before, after))


def changed_members(before: Group, after: PlannedGroup, names: Iterable[str]) -> dict[str, StoredMember]:
    """Return those of some members of `after` that `before` does not have so."""
    changed: dict[str, StoredMember] = {}
    for name in names:
        member = after.members[name]
        member.heard_ms = 0
        if before.members.get(name) != member:
            changed[name] = _stored(member)
    return changed


def gone_members(before: Group, after: PlannedGroup) -> tuple[str, ...]:
    """Return the members that `after` does not have any more."""
    return tuple(name for name in before.members if name not in after.members)


class _GatheredMembers:
    """A decision about members in pieces: those that its parts have so far."""

    def __init__(self, group: str, checksum: int, count: int) -> None:
        self.pieces = PieceReader(checksum, count)
        self._group = group
        self._plan: tuple[str, int, int] | None = None
        self.members: dict[str, Member] = {}
        self.gone: list[str] = []

    @property
    def plan(self) -> tuple[str, int, int] | None:
        """Group, base and generation after the last piece, else None. Raises: CorruptDataError."""
        if not self.pieces.is_whole:
            return None
        if self._plan is None or not self.pieces.is_sound:
            raise self._corrupt()
        return self._plan

    def take(self, piece: bytes) -> None:
        """Take the next piece. Raises: CorruptDataError."""
        for body in self.pieces.take(piece):
            part = decode_decision(body)
            if not isinstance(part, MembersDecision) or part.group != self._group:
                raise self._corrupt()
            plan = part.group, part.base, part.generation
            if self._plan not in (None, plan):
                raise self._corrupt()
            self._plan = plan
            self.members |= {name: _restored(changed) for name, changed in part.changed.items()}
            self.gone += part.gone

    def _corrupt(self) -> CorruptDataError:
        return CorruptDataError(f"the pieces of a decision about group '{self._group}' are not one of its members")


class GroupMachine:
    """All groups of a service partition. See `memq.state_log.StateMachine`.

    `apply` returns None, or the error for the caller: the decision then changed nothing. The generation of a group
    never goes back, also not when the group is deleted and made again (G1): `floor` is the highest one of a deleted
    group. `gathered` has the pieces of decisions about members whose last piece does not count yet, by group.
    """

    def __init__(self) -> None:
        self.groups: dict[str, StoredGroup] = {}
        self.gathered: dict[str, _GatheredMembers] = {}
        self.floor = 0

    def apply(self, body: bytes) -> Answer:
        """Apply a decision. Raises: CorruptDataError."""
        decision = decode_decision(body)
        try:
            match decision:
                case MembersDecision():
                    members = {name: _restored(changed) for name, changed in decision.changed.items()}
                    plan = decision.group, decision.base, decision.generation
                    self._change_members(*plan, members, decision.gone)
                case CommitDecision():
                    self._commit(decision)
                case DeleteDecision():
                    self._delete(decision.group)
                case ForgetDecision():
                    self._forget(unpack(decision.partitions))
                case ImportDecision():
                    self._import(decision)
                case RestoredDecision():
                    self._take_restored(decision)
                case PieceDecision():
                    self._gather(decision)
        except (GenerationFencedError, InvalidRequestError, NotFoundError, StalePlanError) as error:
            return error
        return None

    def membership(self, group: str) -> Group:
        """Return the membership of a group; a new one for an unknown group. Do not change it."""
        stored = self.groups.get(group)
        return stored.membership if stored is not None else Group(self.floor)

    def _change_members(
        self, group: str, base: int, generation: int, members: Mapping[str, Member], gone: Iterable[str]
    ) -> None:
        stored = self.groups.get(group) or StoredGroup(Group(self.floor), {})
        membership = stored.membership
        if membership.generation != base:
            raise StalePlanError(f"group '{group}' is in generation {membership.generation}")
        self.gathered.pop(group, None)  # pieces of a decision that can't count any more
        for name in gone:
            membership.members.pop(name, None)
        for name, member in members.items():
            before = membership.members.get(name)  # which may have committed meanwhile
            member.commits = max(member.commits, before.commits if before is not None else 0)
            membership.members[name] = member
        membership.generation = generation
        self.groups[group] = stored

    def _gather(self, decision: PieceDecision) -> None:
        """Take a piece of a decision, which is applied with its last piece."""
        if decision.number == 0:  # what an earlier owner has left behind ends here
            self.gathered[decision.group] = _GatheredMembers(decision.group, decision.checksum, decision.count)
        gathered = self.gathered.get(decision.group)
        if gathered is None or not gathered.pieces.is_next(decision):
            raise StalePlanError(
                f"piece {decision.number} of a decision about group '{decision.group}' does not follow"
            )
        gathered.take(decision.piece)
        plan = gathered.plan
        if plan is not None:
            del self.gathered[decision.group]
            self._change_members(*plan, gathered.members, gathered.gone)

    def _commit(self, decision: CommitDecision) -> None:
        stored = self.groups.get(decision.group) or StoredGroup(Group(self.floor), {})
        positions = unpack_positions(decision.positions)
        stored.membership.check_commit(decision.member, decision.generation, positions, decision.number)
        stored.positions |= positions
        self.groups[decision.group] = stored

    def _delete(self, group: str) -> None:
        stored = self.groups.get(group)
        if stored is None:
            raise missing_group(group)
        stored.membership.check_no_members(f"group '{group}' can't be deleted")
        self.floor = max(self.floor, stored.membership.generation)
        del self.groups[group]
        self.gathered.pop(group, None)

    def _import(self, decision: ImportDecision) -> None:
        stored = self.groups.get(decision.group) or StoredGroup(Group(self.floor), {})
        stored.membership.check_no_members(f"positions of group '{decision.group}' can't be imported")
        stored.membership.generation = max(stored.membership.generation, decision.generation)
        for partition, committed in unpack_positions(decision.positions).items():
            present = stored.positions.get(partition)
            if present is None or present.position < committed.position:
                stored.positions[partition] = committed
        self.groups[decision.group] = stored

    def _forget(self, partitions: Sequence[ReadPartition]) -> None:
        for stored in self.groups.values():
            for partition in partitions:
                stored.positions.pop(partition, None)

    def _take_restored(self, decision: RestoredDecision) -> None:
        self.floor += decision.gap if decision.all else 0
        for name, stored in self.groups.items():
            if decision.all or name in decision.groups:
                stored.membership.members.clear()
                stored.membership.generation += decision.gap
                stored.positions |= unpack_positions(decision.groups.get(name, ()))

    # ---- snapshots -------------------------------------------------------------------------------

    def snapshot(self) -> bytes:
        """Return all groups as bytes."""
        groups = {
            name: _SavedGroup(
                stored.membership.generation,
                {member: _stored(stored.membership.members[member]) for member in sorted(stored.membership.members)},
                pack_positions(stored.positions),
            )
            for name, stored in sorted(self.groups.items())
        }
        gathered = {name: each.pieces.gathered for name, each in sorted(self.gathered.items())}
        return _FORMAT.encode_state(_SavedGroups(STATE_VERSION if gathered else 1, self.floor, groups, gathered))

    def restore(self, state: bytes) -> None:
        """Take the groups of a snapshot. Raises: UnsupportedFormatError for a newer one; CorruptDataError."""
        saved = _FORMAT.decode_state(state)
        self.floor = saved.floor
        for name, pieces in saved.gathered.items():
            gathered = self.gathered[name] = _GatheredMembers(name, pieces.checksum, pieces.count)
            for piece in pieces.pieces:
                gathered.take(piece)
        self.groups = {
            name: StoredGroup(
                Group(group.generation, {member: _restored(stored) for member, stored in group.members.items()}),
                unpack_positions(group.positions),
            )
            for name, group in saved.groups.items()
        }


def missing_group(name: str) -> NotFoundError:
    """Return the error about a group that does not exist."""
    return NotFoundError(f"group '{name}' does not exist", hint="memq group list shows the groups")
