"""The groups of one service partition at its owner: each request becomes decisions in the state log.

Heartbeats are no decisions. Their times are in memory only, so `GroupCoordinator` expires a member when it was silent
for its session time-out, counted from the opening of the log plus F at the earliest (G4). F is a quarter of the session
time-out. An owner answers heartbeats only with a proof younger than F, that it still has the log. So a former owner
keeps no member alive for longer than F after the opening of the next one.

A heartbeat that brings nothing may wait for a change (`keep_heartbeat`, ADR 43). It counts as heard when it came, and
not when it is answered: its connection may be dead meanwhile. So it can't keep a silent member in the group.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TypeVar

import msgspec

from memq.errors import (
    GenerationFencedError,
    InvalidRequestError,
    MemqError,
    NotReadyError,
    QueueError,
    ThrottledError,
    TooLargeError,
)
from memq.groups import OUTSIDE_GENERATION, GroupState, Membership
from memq.groups.group import Group, Member, PlannedGroup, check_member
from memq.groups.machine import (
    GROUPS_MACHINE,
    CommitDecision,
    Decision,
    DeleteDecision,
    ForgetDecision,
    GroupMachine,
    ImportDecision,
    MembersDecision,
    StalePlanError,
    StoredMember,
    changed_members,
    copying,
    encode_decision,
    gone_members,
    missing_group,
    pack,
    pack_positions,
    portions,
    shared_wanted,
)
from memq.groups.pieces import PIECE_BYTES_MAX, pieces_of
from memq.groups.waiting import TICK_MS, AnswerHeartbeat, WaitingHeartbeat, WaitingHeartbeats
from memq.notification import FormerGroup, check_position
from memq.runtime.clock import Clock
from memq.runtime.tasks import TaskOwner, in_slices
from memq.state_log import known_outcome
from memq.state_log.state_log import StateLog
from memq.topic import Committed, ReadPartition, check_group

FRESH_SHARE = 4  # F is this part of a session time-out
WAIT_SHARE = 3  # a heartbeat waits for this part of a session at most: two of them must fit into one (G4)
WAIT_SLACK_MS = 2 * TICK_MS  # by which an answer may come after the end of its wait
EXPIRY_CHECK_S = TICK_MS / 1_000  # between two searches for silent members, and for heartbeats whose wait ends

SLICE_MEMBERS = 256  # work on so many members holds the event loop at once
OVERWRITES_MAX = 8  # attempts of `GroupCoordinator.overwrite`; one suffices unless members join in between

Change = Callable[[Group], object]
Item = TypeVar("Item")


@dataclass(slots=True)
class _Heard:
    """When members of a group were heard, and when one may be silent for too long (monotonic ms).

    Before the generation `since`, partitions may have been removed that no hold shows: by a former owner, or with their
    topic.
    """

    since: int
    at_ms: dict[str, int] = field(default_factory=dict)
    next_ms: int = 0


class GroupCoordinator:
    """Answers for the groups of one service partition, while `log` is open.

    See `memq.groups.Groups`. All times are monotonic. The log is open since `opened_s`. `tasks` run until the log
    is closed.
    Raises: as `StateLog.propose`: MovedError, NotReadyError, ThrottledError, TooLargeError. If the outcome of a request
    is unknown, the error is NotReadyError, too: each request may be repeated, and commits have numbers.
    """

    def __init__(self, log: StateLog, machine: GroupMachine, clock: Clock, tasks: TaskOwner, opened_s: float) -> None:
        self._log = log
        self._machine = machine
        self._clock = clock
        self._opened_ms = int(opened_s * 1_000)
        self._heard: dict[str, _Heard] = {}
        self._waiting: dict[str, list[tuple[Change, asyncio.Future[None]]]] = {}
        self._deciding: set[str] = set()
        self._beats = WaitingHeartbeats()
        self._tasks = tasks

    # ---- members ---------------------------------------------------------------------------------

    async def join(
        self, group: str, member: str, partitions: Sequence[ReadPartition], session_timeout_ms: int
    ) -> Membership:
        """See `Groups.join`."""
        check_group(group)
        check_member(member, partitions, session_timeout_ms)
        wanted = shared_wanted(partitions)

        def enter(state: Group) -> None:
            state.join(member, wanted, session_timeout_ms, self._now_ms())

        await self._decide(group, enter)
        state = self._machine.membership(group)
        if member not in state.members:
            raise GenerationFencedError(f"member '{member}' has left group '{group}' again")
        return self._with_positions(group, member, state.membership(member), OUTSIDE_GENERATION)

    async def heartbeat(
        self, group: str, member: str, generation: int, released: Sequence[ReadPartition] = ()
    ) -> Membership:
        """See `Groups.heartbeat`."""
        check_group(group)
        await self._prove(group, member)
        if released or self._may_be_silent(group, self._existing(group)):

            def beat(state: Group) -> None:
                state.heartbeat(member, generation, released, self._now_ms())

            await self._decide(group, beat)
        membership = self._existing(group).current(member, generation)
        self._note(group, member)
        return self._with_positions(group, member, membership, generation)

    def keep_heartbeat(self, group: str, member: str, generation: int, wait_ms: int, answer: AnswerHeartbeat) -> bool:
        """Keep a heartbeat until its member's assignment changes, `wait_ms` at most.

        It releases no partitions. The wait has no task, and `answer` is called once. It takes a membership after a
        change, None without one, or the error. A later heartbeat of the member ends the wait. False: `heartbeat` must
        answer now. The member is unknown here, may be silent for too long, knows an older assignment, or has a session
        that is too short for a wait.
        """
        stored = self._machine.groups.get(group)
        known = stored.membership.members.get(member) if stored is not None else None
        if stored is None or known is None or self._tasks.stopped or not self._log.is_owner:
            return False
        heard, now_ms = self._heard_in(group), self._now_ms()
        if now_ms - self._heard_ms(heard, member, known) >= known.session_timeout_ms:
            return False
        wait_ms = min(wait_ms, known.session_timeout_ms // WAIT_SHARE) - WAIT_SLACK_MS
        if wait_ms <= 0 or not known.joined <= generation <= stored.membership.generation:
            return False
        if _has_changed(heard, known, generation):
            return False
        self._note(group, member)
        fresh_ms = known.session_timeout_ms // FRESH_SHARE
        former = self._beats.add(WaitingHeartbeat(group, member, generation, now_ms + wait_ms, fresh_ms, answer))
        if former is not None:
            former.answer(NotReadyError(f"a later heartbeat of member '{member}' has come"))
        return True

    @property
    def waiting(self) -> int:
        """How many heartbeats wait."""
        return len(self._beats)

    async def _answer_due(self) -> None:
        """Answer the heartbeats that have waited long enough, all with one proof.

        Raises: NotReadyError when the log has ended.
        """
        if not self._log.is_owner:
            raise NotReadyError("the log of this coordinator has ended")
        beats = self._beats.take_due(self._now_ms())
        error: MemqError | None = _closed()
        try:
            if beats and not self._is_proved(min(beat.fresh_ms for beat in beats)):
                await known_outcome(self._log.fresh())
            error = None
        except MemqError as failure:
            error = failure
        finally:
            for beat in beats:
                if error is None:
                    self._answer_beat(beat)
                else:
                    beat.answer(error)

    def _answer_beat(self, beat: WaitingHeartbeat, *, changed: bool = False) -> None:
        """Answer a heartbeat with what counts now; the log is proved."""
        state = self._machine.membership(beat.group)
        try:
            member = state.current_member(beat.member, beat.generation)
        except MemqError as error:
            return beat.answer(error)
        if not changed and not _has_changed(self._heard_in(beat.group), member, beat.generation):
            return beat.answer(None)
        membership = state.membership(beat.member)
        return beat.answer(self._with_positions(beat.group, beat.member, membership, beat.generation))

    async def _answer_changed(self, decision: MembersDecision) -> None:
        """Answer the waiting heartbeats of the members that a decision has changed."""
        async for names in _slices((*decision.changed, *decision.gone)):
            for beat in self._beats.take_members(decision.group, names):
                if self._is_proved(beat.fresh_ms):
                    self._answer_beat(beat, changed=True)
                else:  # the entry was on its way for too long: the next tick gets a proof
                    self._beats.add(beat._replace(until_ms=0))

    def _is_proved(self, fresh_ms: int) -> bool:
        return self._clock.monotonic() - self._log.proved_s <= fresh_ms / 1_000

    def _with_positions(self, group: str, member: str, membership: Membership, known: int) -> Membership:
        """Add the positions of what the member has got since the generation that it knows (G3)."""
        if membership.generation <= known:
            return membership
        stored = self._machine.groups[group]
        holds = stored.membership.members[member].holds
        news = [hold.partition for hold in holds if hold.since > known and not hold.revoking]
        positions = {partition: stored.positions[partition] for partition in news if partition in stored.positions}
        return replace(membership, positions=positions) if positions else membership

    async def leave(self, group: str, member: str, generation: int | None = None) -> None:
        """See `Groups.leave`."""
        check_group(group)
        await known_outcome(self._log.fresh())
        if member in self._machine.membership(group).members:
            await self._decide(group, lambda state: state.leave(member, self._now_ms(), generation))

    async def expire(self) -> None:
        """Remove the silent members of all groups.

        If the log takes no decision about a group now, the others continue.
        Raises: MovedError, NotReadyError when the log has ended.
        """
        for group in list(self._machine.groups):
            with suppress(ThrottledError, TooLargeError):
                await self._expire(group)

    async def run(self) -> None:
        """Expire members, and answer waiting heartbeats. Raises: MemqError when the log has ended."""
        try:
            while True:
                await asyncio.sleep(EXPIRY_CHECK_S)
                await self.expire()
                await self._answer_due()
        finally:  # the members ask again, perhaps the next owner
            for beat in self._beats.take_all():
                beat.answer(_closed())

    async def _expire(self, group: str) -> None:
        if group in self._machine.groups and self._may_be_silent(group, self._machine.membership(group)):
            await self._decide(group, lambda state: state.expire(self._now_ms()))

    # ---- positions -------------------------------------------------------------------------------

    async def commit(
        self, group: str, member: str, generation: int, positions: Mapping[ReadPartition, Committed], number: int = 0
    ) -> None:
        """See `Groups.commit`."""
        check_group(group)
        for partition, committed in positions.items():
            check_position(partition, committed)
        await self._expire(group)
        for portion in portions(positions):
            await self._propose(CommitDecision(group, member, generation, number, pack_positions(portion)))

    async def overwrite(self, group: str, positions: Mapping[ReadPartition, Committed]) -> None:
        """Remove all members of a group, and store positions from outside it.

        Members that join again start there. If one joins between the two decisions, both are made again.
        Raises: InvalidRequestError when it has members each time; QueueError: some positions may be stored.
        """
        for attempt in range(1, OVERWRITES_MAX + 1):
            await self._decide(group, lambda state: state.leave_all(self._now_ms()))
            try:
                await self.commit(group, "", OUTSIDE_GENERATION, positions)
            except InvalidRequestError:
                if attempt == OVERWRITES_MAX or not self._machine.membership(group).members:
                    raise
            else:
                return

    async def import_group(self, former: FormerGroup) -> None:
        """Store a group that an earlier release kept in the queue, and read its positions back.

        Later positions of the group stay. Raises: InvalidRequestError if it has members here; QueueError.
        """
        check_group(former.group)
        for partition, committed in former.committed.items():
            check_position(partition, committed)
        await self._expire(former.group)
        for portion in portions(former.committed):
            await self._propose(ImportDecision(former.group, former.generation, pack_positions(portion)))
        stored = await self.committed(former.group, list(former.committed))
        for partition, committed in former.committed.items():
            if partition not in stored or stored[partition].position < committed.position:
                raise QueueError(f"the state log does not show the position of group '{former.group}' in {partition}")

    async def committed(self, group: str, partitions: Sequence[ReadPartition]) -> dict[ReadPartition, Committed]:
        """See `Groups.committed`."""
        check_group(group)
        await known_outcome(self._log.fresh())
        stored = self._machine.groups.get(group)
        found = stored.positions if stored is not None else {}
        return {partition: found[partition] for partition in partitions if partition in found}

    # ---- operators -------------------------------------------------------------------------------

    async def groups(self, *, proven: bool = True) -> list[str]:
        """See `Groups.groups`; those of this service partition only.

        Without `proven`, another owner may know better.
        """
        if proven:
            await known_outcome(self._log.fresh())
        return sorted(self._machine.groups)

    async def describe(self, group: str, *, proven: bool = True) -> GroupState:
        """See `Groups.describe`. Without `proven`, another owner may know better."""
        if proven:
            await self._expire(group)
            await known_outcome(self._log.fresh())
        state = self._existing(group)
        positions = dict(sorted(self._machine.groups[group].positions.items()))
        return GroupState(group, state.generation, state.held(), positions)

    async def delete_group(self, group: str) -> None:
        """See `Groups.delete_group`."""
        check_group(group)
        await self._expire(group)
        await self._propose(DeleteDecision(group))
        self._heard.pop(group, None)

    def named_topics(self) -> dict[tuple[str, str], set[ReadPartition]]:
        """Return the read partitions of positions and members by topic and topic id, as this owner knows them."""
        found: dict[tuple[str, str], set[ReadPartition]] = {}
        for stored in self._machine.groups.values():
            for partition in (*stored.positions, *_partitions_of(stored.membership)):
                found.setdefault((partition.topic, partition.topic_id), set()).add(partition)
        return found

    async def forget(self, partitions: Sequence[ReadPartition]) -> None:
        """Remove partitions of a deleted topic from all members and positions."""
        gone = frozenset(partitions)
        for group, stored in list(self._machine.groups.items()):
            if gone & _partitions_of(stored.membership):
                await self._decide(group, lambda state: state.forget(partitions))
                self._heard_in(group).since = self._machine.membership(group).generation
        await self._propose(ForgetDecision(pack(partitions)))

    # ---- inside ----------------------------------------------------------------------------------

    async def _decide(self, group: str, change: Change) -> None:
        """Make a change of a membership; return when it is in the log.

        The changes of one group that wait for its last decision become one decision.
        Raises: as `change`; as `StateLog.propose`.
        """
        if self._tasks.stopped:
            raise _closed()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(group, []).append((change, done))
        if group not in self._deciding:
            self._deciding.add(group)
            self._tasks.start(self._decide_waiting(group), f"decide on group {group}")
        await done

    async def _decide_waiting(self, group: str) -> None:
        waiting: list[tuple[Change, asyncio.Future[None]]] = []
        try:
            while waiting := self._waiting.pop(group, []):
                try:
                    ends = await self._decide_once(group, [change for change, _ in waiting])
                except MemqError as error:
                    ends = [error] * len(waiting)
                async for some in _slices(zip(waiting, ends, strict=True)):
                    _settle(some)
        except asyncio.CancelledError:  # the coordinator closes; all changes can be made again at the next owner
            waiting += self._waiting.pop(group, [])
            _settle([(each, _closed()) for each in waiting])
            raise
        finally:
            self._deciding.discard(group)

    async def _decide_once(self, group: str, changes: Sequence[Change]) -> list[MemqError | None]:
        """Make several changes by one decision; return the error of each, or None.

        The errors rest on entries that count, too: without a decision, a read of the log proves that (S4).
        """
        while True:
            before = self._machine.membership(group)
            generation = before.generation
            after = await in_slices(copying(before))
            await self._set_heard(group, after)
            ends = list[MemqError | None]()
            async for some in _slices(changes):
                ends += [_end_of(change, after) for change in some]
            for _ in after.settling():
                await asyncio.sleep(0)
            if after.generation == generation:
                await known_outcome(self._log.fresh())
                if self._machine.membership(group).generation == generation:
                    return ends
                continue
            asking = await self._asking(group, after)
            decision = await self._difference(group, before, after, generation)
            try:
                await self._propose_members(decision)
            except StalePlanError:
                continue
            for member in asking:  # at once: the next decision would expire members whose joins have no answer yet
                self._note(group, member)
            self._heard_in(group).next_ms = 0
            await self._answer_changed(decision)
            return ends

    async def _difference(self, group: str, before: Group, after: PlannedGroup, base: int) -> MembersDecision:
        """Return the decision that makes `after` of the generation `base`, which `before` had.

        Meanwhile members may commit: the machine keeps their newer numbers.
        """
        changed = dict[str, StoredMember]()
        async for names in _slices(after.members):
            changed |= changed_members(before, after, names)
        return MembersDecision(group, base, after.generation, changed, gone_members(before, after))

    async def _propose_members(self, decision: MembersDecision) -> None:
        """Put a decision about members into the log, in one entry or in pieces (`memq.groups.pieces`)."""
        parts = [encode_decision(msgspec.structs.replace(decision, changed={}))]  # with those that are gone
        async for names in _slices(decision.changed):
            changed = {name: decision.changed[name] for name in names}
            parts.append(encode_decision(msgspec.structs.replace(decision, changed=changed, gone=())))
        if sum(map(len, parts)) <= PIECE_BYTES_MAX:
            return await self._propose(decision)
        for piece in pieces_of(decision.group, parts):
            await self._propose(piece)
        return None

    async def _propose(self, decision: Decision) -> None:
        await self._propose_body(encode_decision(decision))

    async def _propose_body(self, body: bytes) -> None:
        answer = await known_outcome(self._log.propose(GROUPS_MACHINE, body))
        if isinstance(answer, MemqError | StalePlanError):
            raise answer

    async def _prove(self, group: str, member: str) -> None:
        """Wait for a proof younger than F of this member's session."""
        known = self._machine.membership(group).members.get(member)
        if known is None or not self._is_proved(known.session_timeout_ms // FRESH_SHARE):
            await known_outcome(self._log.fresh())

    def _existing(self, group: str) -> Group:
        stored = self._machine.groups.get(check_group(group))
        if stored is None:
            raise missing_group(group)
        return stored.membership

    # ---- times of heartbeats ---------------------------------------------------------------------

    def _note(self, group: str, member: str) -> None:
        """Note that a member was heard now; that makes no expiry after an opening earlier (G4)."""
        known = self._machine.membership(group).members.get(member)
        if known is not None:
            heard = self._heard_in(group)
            heard.at_ms[member] = max(self._heard_ms(heard, member, known), self._now_ms())

    def _heard_in(self, group: str) -> _Heard:
        heard = self._heard.get(group)
        if heard is None:
            heard = self._heard[group] = _Heard(since=self._machine.membership(group).generation)
        return heard

    def _heard_ms(self, heard: _Heard, name: str, member: Member) -> int:
        return heard.at_ms.get(name, self._opened_ms + member.session_timeout_ms // FRESH_SHARE)

    async def _set_heard(self, group: str, state: Group) -> None:
        """Set in a copy of a membership when each member was heard; forget the times of former members."""
        heard = self._heard_in(group)
        async for some in _slices(state.members.items()):
            for name, member in some:
                member.heard_ms = self._heard_ms(heard, name, member)
        if len(heard.at_ms) > len(state.members):
            heard.at_ms = {name: at_ms for name, at_ms in heard.at_ms.items() if name in state.members}

    async def _asking(self, group: str, after: Group) -> list[str]:
        """Return the members that the changes of a decision have heard: those that join, or send a heartbeat."""
        heard, found = self._heard_in(group), list[str]()
        async for some in _slices(after.members.items()):
            found += [name for name, each in some if each.heard_ms > self._heard_ms(heard, name, each)]
        return found

    def _may_be_silent(self, group: str, state: Group) -> bool:
        """Whether a member is silent for its session time-out. The members are checked only when one can be."""
        heard, now_ms = self._heard_in(group), self._now_ms()
        if now_ms < heard.next_ms:
            return False
        ends = [self._heard_ms(heard, name, each) + each.session_timeout_ms for name, each in state.members.items()]
        heard.next_ms = min(ends, default=now_ms)
        return bool(ends) and heard.next_ms <= now_ms

    def _now_ms(self) -> int:
        return int(self._clock.monotonic() * 1_000)


def _has_changed(heard: _Heard, member: Member, generation: int) -> bool:
    """Whether the holds of a member may have changed since a generation."""
    for hold in member.holds:
        if hold.since > generation or hold.revoking > generation:
            return True
    return generation < heard.since


async def _slices(items: Iterable[Item]) -> AsyncIterator[list[Item]]:
    """Yield slices of SLICE_MEMBERS; between two of them, other work of the broker runs."""
    left = iter(items)
    while some := list(islice(left, SLICE_MEMBERS)):
        yield some
        if len(some) == SLICE_MEMBERS:
            await asyncio.sleep(0)


def _closed() -> NotReadyError:
    return NotReadyError("the coordinator of this group is closed")


def _settle(ended: Iterable[tuple[tuple[Change, asyncio.Future[None]], MemqError | None]]) -> None:
    """Pass the ends of changes to the callers that still wait."""
    for (_, done), end in ended:
        if done.done():
            continue
        if end is None:
            done.set_result(None)
        else:
            done.set_exception(end)


def _end_of(change: Change, state: Group) -> MemqError | None:
    """Make a change; return its error. A refused change only removes expired members."""
    try:
        change(state)
    except MemqError as error:
        return error
    return None


def _partitions_of(state: Group) -> set[ReadPartition]:
    """Return all partitions that members want or hold."""
    members = state.members.values()
    shared = {id(member.wanted): member.wanted for member in members}
    wanted = {partition for each in shared.values() for partition in each}
    return wanted | {hold.partition for member in members for hold in member.holds}
