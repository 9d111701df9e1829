"""A member's work in its group: joins, sends heartbeats, releases partitions, commits, leaves.

A heartbeat waits at the owner of the group for a change, for a third of a session: so the member learns of it at once.
Brokers that let none wait, such as those of earlier releases, get a heartbeat each third of a session.

`Committer` commits consumed positions: one request for all partitions, one at a time, each value once.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from memq.client.consumer.assigned import Assigned
from memq.client.consumer.fetch.fetch_scheduler import FetchScheduler
from memq.client.consumer.fetch.ready_batches import ReadyBatches
from memq.client.consumer.group.membership import MemberState
from memq.errors import DeniedError, FencedError, GenerationFencedError, MemqError, RetryableError
from memq.groups import Membership, WaitingGroups
from memq.groups.group import SESSION_TIMEOUT_MS_MAX
from memq.runtime.clock import backoff_s
from memq.runtime.logs import EventLog
from memq.runtime.runtime import Runtime
from memq.topic import BROADCAST_GROUP, Committed, ReadPartition

LONE_MEMBER = "broadcast"
TIMER_MS = 1  # by which a timer may come early
_HEARTBEATS_PER_SESSION = 3
HEARTBEAT_S_MAX = 3.0  # without waits it is how members learn of each other, also in long sessions
_RETRY_S_BASE = 0.05
_RETRY_S_MAX = 1.0


@dataclass(frozen=True, slots=True)
class TakenPositions:
    """Positions of a member that a transaction moves, with those that are stored."""

    member: str
    generation: int
    before: dict[ReadPartition, Committed]
    after: dict[ReadPartition, Committed]


class Committer:
    """Commits the prefixes of the partitions that are read."""

    def __init__(
        self,
        reading: FetchScheduler,
        group: GroupSession,
        ready_batches: ReadyBatches,
        runtime: Runtime,
        events: EventLog,
    ) -> None:
        self.commits = 0
        self._runtime = runtime
        self._events = events
        self._reading = reading
        self._group = group
        self._ready_batches = ready_batches
        self._busy = asyncio.Lock()

    async def commit_surely(self, only: tuple[Assigned, Committed] | None = None) -> None:
        """Commit all partitions, or `only` one up to a position; retry while the queue is unreachable.

        The retries end when this member is no longer in its group.
        Raises: GenerationFencedError if another member has a partition now, or may have it.
        """
        for failures in itertools.count(1):
            try:
                await self.commit(only=only)
            except RetryableError as error:
                self._events.warning("consumer.commit-retry", f"{type(error).__name__}: {error.args[0]}; trying again")
            else:
                return
            await asyncio.sleep(backoff_s(self._runtime.random, failures, base_s=_RETRY_S_BASE, most_s=_RETRY_S_MAX))

    async def commit(
        self,
        partitions: Iterable[ReadPartition] | None = None,
        *,
        only: tuple[Assigned, Committed] | None = None,
    ) -> None:
        """Store the positions of finished batches: of `partitions`, of all, or of `only` one up to a position.

        Raises: GenerationFencedError if another member has a partition now; RetryableError.
        """
        async with self._busy:
            self._ready_batches.settle()
            due: dict[ReadPartition, tuple[Assigned, Committed]] = {}
            for partition in self._reading.assigned if partitions is None else partitions:
                assigned = self._reading.assigned.get(partition)
                committed = None if assigned is None else _due(assigned, only)
                if assigned is not None and committed is not None:
                    due[partition] = (assigned, committed)
            if not due:
                return
            observers = [assigned.observer for assigned, _ in due.values() if assigned.observer is not None]
            for observer in observers:
                observer.begin_storing()
            try:
                await self._group.commit({partition: committed for partition, (_, committed) in due.items()})
                self.commits += 1
                for partition, (assigned, committed) in due.items():
                    self._reading.stored[partition] = committed
                    assigned.ledger.stored(committed)
                    if assigned.observer is not None:
                        assigned.observer.store(committed, self._runtime.clock.wall_ms())
            finally:
                for observer in observers:
                    observer.end_storing()

    def take(self, only: tuple[Assigned, Committed] | None = None) -> TakenPositions:
        """Return what `commit` would store, for a transaction. Raises: GenerationFencedError."""
        self._ready_batches.settle()
        before: dict[ReadPartition, Committed] = {}
        after: dict[ReadPartition, Committed] = {}
        for partition, assigned in self._reading.assigned.items():
            committed, known = _due(assigned, only), assigned.ledger.known
            if committed is not None:
                after[partition] = committed
                if known is not None:
                    before[partition] = known
        return TakenPositions(self._group.member, self._group.inside_generation(), before, after)

    def note_stored(self, positions: Mapping[ReadPartition, Committed]) -> None:
        """Note that a transaction has moved the positions, perhaps long ago: none goes back."""
        self.commits += 1
        for partition, committed in positions.items():
            assigned = self._reading.assigned.get(partition)
            if assigned is not None and assigned.ledger.is_stored(committed.position):
                continue
            self._reading.stored[partition] = committed
            if assigned is None:
                continue
            assigned.ledger.stored(committed)
            if assigned.observer is not None:
                assigned.observer.store(committed, self._runtime.clock.wall_ms())

    async def commit_quietly(self, partitions: Iterable[ReadPartition] | None = None) -> None:
        """Commit what can be committed: what fails now is tried again later, or is another member's."""
        with suppress(RetryableError, FencedError):
            await self.commit(partitions)

    async def commit_at_close(self, timeout_s: float) -> None:
        """Commit for the last time, within `timeout_s`.

        A member without the permission closes all the same: the next member reads its records again.
        """
        with suppress(TimeoutError, FencedError):
            try:
                async with asyncio.timeout(timeout_s):
                    await self.commit_surely()
            except DeniedError as error:
                self._events.warning("consumer.not-committed", f"closed without the last commit: {error}; {error.hint}")

    async def run(self, interval_ms: int) -> None:
        """Commit every `interval_ms` until cancelled."""
        while True:
            await asyncio.sleep(interval_ms / 1000)
            await self.commit_quietly()


def _due(assigned: Assigned, only: tuple[Assigned, Committed] | None) -> Committed | None:
    ledger = assigned.ledger
    if only is None:
        return ledger.due
    reached = only[1]
    if only[0] is not assigned or ledger.prefix is None or ledger.is_stored(reached.position):
        return None
    return reached if reached.position <= ledger.prefix.position else None


class GroupSession:
    """One member of one group. `state` has its partitions and the events due to its user.

    `changed` is called after every answer. `failure` is an error for the user; the member still tries to join.
    A member that is `alone` has a name for ever: a newer one of the name takes its place, and `run` ends with an error.
    """

    def __init__(
        self,
        runtime: Runtime,
        groups: WaitingGroups,
        group: str,
        session_timeout_ms: int,
        changed: Callable[[], None],
        *,
        alone: bool = False,
    ) -> None:
        self.state = MemberState()
        self.group = group
        self.member = LONE_MEMBER if alone else f"memq-{runtime.random.getrandbits(64):016x}"
        self._alone = alone
        self.failure: MemqError | None = None
        self._runtime = runtime
        self._groups = groups
        self._asked_session_ms = self._session_ms = session_timeout_ms
        self._changed = changed
        self._events = EventLog(runtime.clock)
        self._partitions: tuple[ReadPartition, ...] = ()
        self._rejoin = True
        self._kicked = asyncio.Event()
        self._waiting: asyncio.Timeout | None = None  # of the heartbeat that waits at the owner
        self._heard_s = 0.0
        self._over: asyncio.TimerHandle | None = None  # the end of the session
        self._commits = 0

    def share(self, partitions: Sequence[ReadPartition]) -> None:
        """Share in these partitions with the other members from now on."""
        if tuple(partitions) != self._partitions:
            self._partitions = tuple(partitions)
            self._rejoin = True
            self.kick()

    def kick(self) -> None:
        """Send the next heartbeat at once, with the partitions to give back, also if one is waiting."""
        self._kicked.set()
        self._give_up_wait()

    def _give_up_wait(self) -> None:
        if self._waiting is not None and not self._waiting.expired():
            self._waiting.reschedule(asyncio.get_running_loop().time())

    async def run(self) -> None:
        """Stay in the group until cancelled."""
        try:
            await self._stay()
        finally:
            self._expect_over(None)

    async def _stay(self) -> None:
        failures = 0
        while True:
            self._kicked.clear()
            try:
                waits = await self._exchange(may_wait=not failures)
                failures = 0
                delay = 0.0 if waits else min(self._wait_ms / 1_000, HEARTBEAT_S_MAX)
            except MemqError as error:
                failures += 1
                self._judge(error)
                delay = backoff_s(self._runtime.random, failures, base_s=_RETRY_S_BASE, most_s=_RETRY_S_MAX)
            self._changed()
            if self.state.inside and self.state.released and not failures:
                continue  # partitions that the member never read are given back at once
            with suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._kicked.wait()

    async def commit(self, positions: dict[ReadPartition, Committed]) -> None:
        """Store positions as this member.

        Raises: GenerationFencedError when they are not this member's any more; RetryableError.
        """
        generation = self.inside_generation()
        self._commits += 1
        if self._alone:  # the next consumer of the name continues the numbers: else its commits would seem late
            self._commits = max(self._commits, self._runtime.clock.wall_ms())
        await self._groups.commit(self.group, self.member, generation, positions, self._commits)

    def inside_generation(self) -> int:
        """Return the generation of this member. Raises: GenerationFencedError outside the group."""
        if not self.state.inside:
            raise GenerationFencedError(f"member '{self.member}' is not in group '{self.group}' any more")
        return self.state.generation

    async def leave(self, timeout_s: float) -> None:
        """Give everything back: others need not wait for the session to time out. A failure is left to that."""
        if self._alone and not self.state.inside:
            return  # a newer consumer of the name may be in the group
        generation = self.state.generation if self._alone else None
        with suppress(TimeoutError, MemqError):
            async with asyncio.timeout(timeout_s):
                await self._groups.leave(self.group, self.member, generation)
        self.state.fenced()

    @property
    def _wait_ms(self) -> int:
        return self._session_ms // _HEARTBEATS_PER_SESSION

    async def _exchange(self, *, may_wait: bool) -> bool:
        """Join, or send a heartbeat. Return whether the next heartbeat may be sent at once.

        After an error a heartbeat does not wait: the session must not end because of a second error.
        After a heartbeat that brought nothing and did not wait, it may not: the broker would get too many.
        """
        asked_s, known = self._runtime.clock.monotonic(), self.state.generation
        if self._rejoin or not self.state.inside:
            self._rejoin = False
            try:
                membership = await self._groups.join(self.group, self.member, self._partitions, self._asked_session_ms)
            except BaseException:
                self._rejoin = True
                raise
            before_ms = self._session_ms
            self._follow(membership)
            if self._runtime.clock.monotonic() - asked_s >= self._session_ms / 1_000:
                asked_s = self._runtime.clock.monotonic()  # the group may have dropped this member since it joined (G4)
                membership = await self._groups.heartbeat(self.group, self.member, membership.generation)
            if self.state.inside and self._silent_ms() >= before_ms:
                self._leave_all()  # the group may have dropped this member before it took it in again
            self.state.answered(membership)
            waits = membership.waits
        else:
            released = self.state.released
            may_wait = may_wait and not released
            try:
                found = await self._heartbeat(known, released, may_wait=may_wait)
            except TimeoutError:
                return True  # kicked: another heartbeat replaces this one
            if self.state.generation != known:  # the session ended before the answer
                return True
            if found is not None:
                self._follow(found)
                self.state.answered(found, released)
            waits = found is None or (found.waits and (found.generation > known or not may_wait))
        self._heard_s = asked_s
        self._expect_over((self._session_ms - self._silent_ms()) / 1_000)
        return waits

    def _follow(self, membership: Membership) -> None:
        """Take the session time-out that the group has for this member: it is longer in a large one."""
        self._session_ms = min(SESSION_TIMEOUT_MS_MAX, max(self._asked_session_ms, membership.session_ms))

    async def _heartbeat(
        self, generation: int, released: Sequence[ReadPartition], *, may_wait: bool
    ) -> Membership | None:
        """Return the answer to a heartbeat; None: nothing has changed. Raises: TimeoutError after a kick."""
        if not may_wait:
            return await self._groups.heartbeat(self.group, self.member, generation, released)
        try:
            async with asyncio.timeout(None) as self._waiting:
                return await self._groups.await_change(self.group, self.member, generation, self._wait_ms)
        finally:
            self._waiting = None

    def _expect_over(self, left_s: float | None) -> None:
        """Call `_session_over` in `left_s` seconds, and not before; None: never."""
        if self._over is not None:
            self._over.cancel()
        self._over = None if left_s is None else asyncio.get_running_loop().call_later(left_s, self._session_over)

    def _session_over(self) -> None:
        """Give up the partitions if the session ends while a request waits, or between two tries (G4).

        Another member may have them from now on.
        """
        if self.state.inside and self._silent_ms() >= self._session_ms - TIMER_MS:
            self._leave_all()
            self._give_up_wait()  # its answer can't bring the member back

    def _judge(self, error: MemqError) -> None:
        """Keep a permanent error for the user; after a session timeout of silence, give up the partitions.

        Raises: GenerationFencedError if another member has taken the name of this one.
        """
        if isinstance(error, GenerationFencedError):
            if self._alone and self.state.inside and self._silent_ms() < self._session_ms:
                name = self.group.removeprefix(f"{BROADCAST_GROUP}-")
                raise GenerationFencedError(
                    f"another consumer reads as broadcast='{name}'",
                    hint="give each consumer a broadcast name of its own",
                )
            self._leave_all()
        elif not isinstance(error, RetryableError):
            self.failure = error
        if self.state.inside and self._silent_ms() > self._session_ms:
            self._leave_all()

    def _silent_ms(self) -> float:
        """Return how long ago the last request was sent that the group has answered."""
        return (self._runtime.clock.monotonic() - self._heard_s) * 1000

    def _leave_all(self) -> None:
        if self.state.held:
            lost = ", ".join(f"{partition.topic}:{partition.partition}" for partition in self.state.held[:20])
            self._events.warning("consumer.lost", f"group '{self.group}' gave {lost} to others; joining again")
        self.state.fenced()
        self._changed()
