"""The membership of one consumer group: members, generations and their partitions. Pure.

`memq.groups.machine` has all groups of a service partition, with their positions.

**Cooperative.** A partition moves from member A to B in two steps. The machine marks A's hold as revoking. B gets
the partition only after A names it in a heartbeat's `released`, or A is gone. So at any time a partition has at
most one holder.

**Generations.** Each change of members or holds makes the next generation. A hold has the generation in which it
began (`since`) and the one in which it was revoked (`revoking`). A commit is valid when the member holds all of its
partitions, revoking or not, and these holds began at or before the commit's generation. A member may lose a
partition and get it again, by expiry, by a second join or by two moves. The new hold began after the generation
that the member knew before. A release is valid when its generation is at or after the revocation, so a late copy of
an old heartbeat releases nothing.

**Liveness.** A member expires when its last request is as old as its session time-out. Time is an argument, in
monotonic milliseconds of one machine. After a restart of the machine its clock starts at 0 again, so stored times may
be in the future. Therefore a difference of a time-out in either direction is an expiry. Each request first expires
members.

**Long sessions.** The heartbeats of many members cost their owner too much. With each decision it lengthens sessions
that are too short for the size of the group. It never shortens the session of a member, which may not know of that yet.

**Assignment.** `balance` chooses the member of each partition: balanced, and with few moves.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from operator import attrgetter

import msgspec

from memq.errors import GenerationFencedError, InvalidRequestError, TooLargeError
from memq.groups import OUTSIDE_GENERATION, Membership
from memq.notification import active_members, check_position
from memq.topic import Committed, ReadPartition, check_name

GROUP_MEMBERS_MAX = 10_000
PARTITIONS_PER_MEMBER_MAX = 65_536
SESSION_TIMEOUT_MS_MIN = 100
SESSION_TIMEOUT_MS_MAX = 3_600_000
# Heartbeats of 10,000 members with sessions of 45 s take 5 % of a core. Sessions of large groups grow to that.
SESSION_MS_PER_MEMBER = 4.5
SESSION_WANTED_MS_MAX = 45_000
SLICE_PARTITIONS = 1_024  # that one step of an assignment moves at most, about 2 ms; smaller ones have one step
SESSION_GROWTH = 1.5  # by which a session must be too short: each change names all members


def balance(
    wanted: Mapping[str, Sequence[ReadPartition]], kept: Mapping[ReadPartition, str]
) -> dict[ReadPartition, str]:
    """Return a member for each wanted partition, starting from the present holders (`kept`).

    Each step lowers the sum of the squared loads, so the loop ends. When all members want the same partitions, their
    loads differ by one at most. Partitions without a holder move first, because their moves interrupt no member. The
    result does not depend on the order of the mappings.
    """
    return next(owners for owners in balancing(wanted, kept) if owners is not None)


def balancing(
    wanted: Mapping[str, Sequence[ReadPartition]], kept: Mapping[ReadPartition, str]
) -> Iterator[dict[ReadPartition, str] | None]:
    """Return the steps of `balance`; the last one is its result, the others are None."""
    loads = _Loads(wanted)
    partitions = loads.partitions
    owners: dict[ReadPartition, str] = {}
    for number, partition in enumerate(partitions, 1):
        if number % SLICE_PARTITIONS == 0:
            yield None
        owner = kept.get(partition)
        if owner is not None and loads.wants(owner, partition):
            owners[partition] = owner
            loads.add(owner, 1)
    homeless = [partition for partition in partitions if partition not in owners]
    for number, partition in enumerate(homeless, 1):
        owners[partition] = loads.lightest(partition)
        loads.add(owners[partition], 1)
        if number % SLICE_PARTITIONS == 0:
            yield None
    order = homeless + [partition for partition in partitions if partition in kept]
    fair = -(-len(partitions) // max(len(wanted), 1))
    for limit in (fair, 0):  # members above the fair share give first: else a member with a fair share would give, too
        while (yield from _level(order, owners, loads, limit)):
            pass
    yield owners


class _Loads:
    """How many partitions each member has, and the lightest member that wants a partition.

    If all members want the same partitions, the lightest of all is the first of a heap. Else many members would cost
    much: the time would grow with their product with the partitions. A heap's item with another load is an old one.
    """

    def __init__(self, wanted: Mapping[str, Sequence[ReadPartition]]) -> None:
        self.of = dict.fromkeys(sorted(wanted), 0)
        self._heap: list[tuple[int, str]] = []
        self._wanters: dict[ReadPartition, list[str]] = {}
        first = next(iter(wanted.values()), ())
        if all(each is first or each == first for each in wanted.values()):
            self._heap = [(0, member) for member in self.of]
            self.partitions = sorted(set(first), key=attrgetter("topic", "topic_id", "partition"))
            return
        for member in self.of:
            for partition in wanted[member]:
                self._wanters.setdefault(partition, []).append(member)
        self.partitions = sorted(self._wanters)

    def wants(self, member: str | None, partition: ReadPartition) -> bool:
        """Whether a member wants one of the partitions."""
        return member in (self.of if self._heap else self._wanters[partition])

    def add(self, member: str, count: int) -> None:
        """Give a member partitions, or take them."""
        self.of[member] += count
        if self._heap:
            heappush(self._heap, (self.of[member], member))

    def lightest(self, partition: ReadPartition) -> str:
        """Return the member with the fewest partitions of those that want this one."""
        if not self._heap:
            return min(self._wanters[partition], key=lambda member: (self.of[member], member))
        while self._heap[0][0] != self.of[self._heap[0][1]]:
            heappop(self._heap)
        return self._heap[0][1]


def _level(
    order: Sequence[ReadPartition], owners: dict[ReadPartition, str], loads: _Loads, limit: int
) -> Generator[None, None, bool]:
    """Move partitions whose owner has more than `limit`, and two more than another, in steps.

    Return whether a partition moved.
    """
    moved, of = False, loads.of
    if max(of.values(), default=0) - min(of.values(), default=0) <= 1:
        return False
    for number, partition in enumerate(order, 1):
        if number % SLICE_PARTITIONS == 0:
            yield
        if of[owners[partition]] <= limit:
            continue
        light = loads.lightest(partition)
        if of[owners[partition]] - of[light] > 1:
            loads.add(owners[partition], -1)
            loads.add(light, 1)
            owners[partition] = light
            moved = True
    return moved


class HeldPartition(msgspec.Struct, gc=False):
    """One partition that a member holds, and the generation in which the hold began.

    `revoking` is the generation of its revocation, or 0.
    """

    partition: ReadPartition
    since: int
    revoking: int = 0


class Member(msgspec.Struct, gc=False):
    """One member: time of its last request (monotonic ms), wanted partitions, and holds."""

    session_timeout_ms: int
    heard_ms: int
    joined: int  # the generation in which it joined last
    wanted: tuple[ReadPartition, ...]
    holds: list[HeldPartition]
    commits: int = 0  # the number of its newest commit


class Group(msgspec.Struct):
    """The membership of one group. Without a change of `generation`, only `heard_ms` of members changes."""

    generation: int = 0
    members: dict[str, Member] = {}

    def expire(self, now_ms: int) -> None:
        """Remove members that were silent for their session time-out, and reassign their partitions."""
        gone = [
            name for name, member in self.members.items() if abs(now_ms - member.heard_ms) >= member.session_timeout_ms
        ]
        for name in gone:
            del self.members[name]
        if gone:
            self._change()

    def join(self, name: str, wanted: Sequence[ReadPartition], session_timeout_ms: int, now_ms: int) -> Membership:
        """Join, or change the wanted partitions.

        All holds of the member begin in the new generation: commits with an older one are refused. A tuple has each
        partition once, and may be shared by members.
        """
        self.expire(now_ms)
        check_member(name, wanted, session_timeout_ms)
        if name not in self.members and len(self.members) >= GROUP_MEMBERS_MAX:
            raise TooLargeError(f"a group has at most {GROUP_MEMBERS_MAX} members")
        before = self.members.get(name)
        joined = self.generation + 1
        holds = [HeldPartition(hold.partition, joined, hold.revoking) for hold in before.holds] if before else []
        wanted_once = wanted if isinstance(wanted, tuple) else tuple(dict.fromkeys(wanted))
        commits = before.commits if before else 0
        session_ms = max(session_timeout_ms, before.session_timeout_ms if before else 0)
        self.members[name] = Member(session_ms, now_ms, joined, wanted_once, holds, commits)
        self._change()
        return self.membership(name)

    def heartbeat(self, name: str, generation: int, released: Sequence[ReadPartition], now_ms: int) -> Membership:
        """Note the time of the heartbeat, and end the revoked holds that the member releases.

        Raises: GenerationFencedError when the member has expired, left, or joined again.
        """
        self.expire(now_ms)
        member = self.current_member(name, generation)
        member.heard_ms = now_ms
        given = frozenset(released)
        kept = [hold for hold in member.holds if not (hold.partition in given and 0 < hold.revoking <= generation)]
        if len(kept) < len(member.holds):
            member.holds = kept
            self._change()
        return self.membership(name)

    def current(self, name: str, generation: int) -> Membership:
        """Return the current holds of a member, without a change.

        Raises: GenerationFencedError when the member has expired, left, or joined again after `generation`.
        """
        self.current_member(name, generation)
        return self.membership(name)

    def leave(self, name: str, now_ms: int, generation: int | None = None) -> None:
        """Remove a member with all its holds, unless it has joined after `generation`."""
        self.expire(now_ms)
        member = self.members.get(name)
        if member is not None and (generation is None or member.joined <= generation):
            del self.members[name]
            self._change()

    def leave_all(self, now_ms: int) -> None:
        """Remove all members with all their holds."""
        self.expire(now_ms)
        if self.members:
            self.members.clear()
            self._change()

    def forget(self, partitions: Sequence[ReadPartition]) -> None:
        """Remove deleted partitions from all members."""
        gone = frozenset(partitions)
        members = self.members.values()
        if all(gone.isdisjoint(member.wanted) and not _holds_any(member, gone) for member in members):
            return
        for member in members:
            member.wanted = tuple(partition for partition in member.wanted if partition not in gone)
            member.holds = [hold for hold in member.holds if hold.partition not in gone]
        self._change()

    def check_commit(
        self,
        name: str,
        generation: int,
        positions: Mapping[ReadPartition, Committed],
        number: int = 0,
    ) -> None:
        """Refuse a commit that the member may not make; note its `number`, as in `Groups.commit`.

        It expires nobody: call `expire` first, if members have times.

        Raises: GenerationFencedError, for all positions, when one partition is not held, or after a later commit of
        the member. InvalidRequestError for a position of another partition, or for a commit from outside (member "",
        generation -1) while the group has members.
        """
        for partition, committed in positions.items():
            check_position(partition, committed)
        if name == "" and generation == OUTSIDE_GENERATION:
            return self.check_no_members("positions can't be set")
        current = self.current_member(name, generation)
        since = {hold.partition: hold.since for hold in current.holds}
        for partition in positions:
            if since.get(partition, generation + 1) > generation:
                raise GenerationFencedError(
                    f"member '{name}' of generation {generation} does not hold partition {partition.partition} "
                    f"of topic '{partition.topic}'"
                )
        current.commits = newest_commit(name, current.commits, number)
        return None

    def check_no_members(self, refusal: str) -> None:
        """Raise InvalidRequestError when the group has members; call `expire` first."""
        if self.members:
            raise active_members(refusal, len(self.members))

    def membership(self, name: str) -> Membership:
        """Return the current holds of a member."""
        member = self.members[name]
        holds = sorted(member.holds, key=lambda hold: hold.partition)
        return Membership(
            self.generation,
            tuple(hold.partition for hold in holds if not hold.revoking),
            tuple(hold.partition for hold in holds if hold.revoking),
            session_ms=member.session_timeout_ms,
        )

    def held(self) -> dict[str, tuple[ReadPartition, ...]]:
        """Return each member with all its partitions, for operators."""
        return {
            name: tuple(sorted(hold.partition for hold in member.holds))
            for name, member in sorted(self.members.items())
        }

    def current_member(self, name: str, generation: int) -> Member:
        """Return a member that knows a generation. Raises: as `current`."""
        member = self.members.get(name)
        if member is None:
            raise GenerationFencedError(f"member '{name}' is not in the group; it left, or was silent for too long")
        if not member.joined <= generation <= self.generation:
            raise GenerationFencedError(
                f"member '{name}' names generation {generation}, it has {member.joined} to {self.generation}"
            )
        return member

    def _change(self) -> None:
        """Make the next generation: revoke and assign partitions as `balance` returns."""
        for _ in self._changing():
            pass

    def _changing(self) -> Iterator[None]:
        """Return the steps of `_change`."""
        self.generation += 1
        holders = {hold.partition: name for name, member in self.members.items() for hold in member.holds}
        kept = {
            hold.partition: name for name, member in self.members.items() for hold in member.holds if not hold.revoking
        }
        is_large = max(len(self.members), len(holders)) >= SLICE_PARTITIONS
        if is_large:
            yield
        owners: Mapping[ReadPartition, str] = {}
        for found in balancing({name: member.wanted for name, member in self.members.items()}, kept):
            if found is not None:
                owners = found
            else:
                yield
        for name, member in self.members.items():
            for hold in member.holds:
                if not hold.revoking and owners.get(hold.partition) != name:
                    hold.revoking = self.generation
        if is_large:
            yield
        for partition, name in owners.items():
            if partition not in holders:
                self.members[name].holds.append(HeldPartition(partition, self.generation))


class PlannedGroup(Group):
    """A copy of a membership: all changes of one decision make one generation, which `settle` makes.

    No member is silent for too long before `ends_ms`. So thousands of changes do not check all members each time.
    """

    changed: bool = False
    ends_ms: int = 0

    def expire(self, now_ms: int) -> None:
        """See `Group.expire`."""
        if now_ms >= self.ends_ms:
            super().expire(now_ms)
            ends_ms = (member.heard_ms + member.session_timeout_ms for member in self.members.values())
            self.ends_ms = min(ends_ms, default=now_ms)

    def join(self, name: str, wanted: Sequence[ReadPartition], session_timeout_ms: int, now_ms: int) -> Membership:
        """See `Group.join`."""
        known = super().join(name, wanted, session_timeout_ms, now_ms)
        self.ends_ms = min(self.ends_ms, now_ms + session_timeout_ms)
        return known

    def _change(self) -> None:
        self.changed = True

    def settle(self) -> None:
        """Make the next generation if anything has changed."""
        for _ in self.settling():
            pass

    def settling(self) -> Iterator[None]:
        """Return the steps of `settle`; the copy is not used before their end."""
        if self.changed:
            self.changed = False
            self._lengthen_sessions()
            yield from self._changing()

    def _lengthen_sessions(self) -> None:
        wanted_ms = int(min(SESSION_WANTED_MS_MAX, len(self.members) * SESSION_MS_PER_MEMBER))
        for member in self.members.values():
            if member.session_timeout_ms * SESSION_GROWTH <= wanted_ms:
                member.session_timeout_ms = wanted_ms


def newest_commit(member: str, newest: int, number: int) -> int:
    """Return the number of a member's newest commit after the one with `number` (0: not counted).

    A late commit would set the stored positions back, and the next holder would read their records again.
    Raises: GenerationFencedError for a commit that comes after a later one.
    """
    if number and number < newest:
        raise GenerationFencedError(f"commit {number} of member '{member}' comes late, after its commit {newest}")
    return max(number, newest)


def _holds_any(member: Member, partitions: frozenset[ReadPartition]) -> bool:
    return any(hold.partition in partitions for hold in member.holds)


def check_wanted(count: int) -> None:
    """Raise TooLargeError for more partitions than a member may want."""
    if count > PARTITIONS_PER_MEMBER_MAX:
        raise TooLargeError(f"a member wants {count} partitions, at most {PARTITIONS_PER_MEMBER_MAX}")


def check_member(name: str, wanted: Sequence[ReadPartition], session_timeout_ms: int) -> None:
    """Refuse a join with an invalid name, too many partitions, or a session time-out out of bounds."""
    check_name(name, "member")
    check_wanted(len(wanted))
    if not SESSION_TIMEOUT_MS_MIN <= session_timeout_ms <= SESSION_TIMEOUT_MS_MAX:
        raise InvalidRequestError(
            f"session timeout {session_timeout_ms} ms is outside {SESSION_TIMEOUT_MS_MIN} to {SESSION_TIMEOUT_MS_MAX}"
        )
