"""The governor: a role that any broker takes when free, and that ends with its session.

The shell around a strategy. Each act asks for the term first, and everything that it sets carries that term: from the
moment another one governs, the coordinator refuses it, however late it comes. Whatever goes wrong ends the act.

`Planner` makes the plans: small ones on the event loop at once, large ones in a thread. A plan needs no clock and no
I/O, so it may be made anywhere, of the view that was read. One of 50,000 partitions takes half a second of Python: in a
thread the loop gets its turn every 5 ms meanwhile. Few are planned before a thread has begun; so the simulation, which
has no threads, runs the same code.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from memq.errors import NotFoundError, TermFencedError, VersionConflictError
from memq.governor import BrokerEntry, Coordinator
from memq.governor.planning import AssignmentChange, AssignmentPlan, ClusterView, Reshape, Strategy, reshapes
from memq.runtime.clock import Clock
from memq.runtime.logs import OUTAGE_INTERVAL_S, EventLog
from memq.runtime.threads import ThreadPool

T = TypeVar("T")

AT_ONCE_PARTITIONS_MAX = 2_000  # that many take 20 ms at most


class Planner:
    """One for who governs, one for who shows what would be done. `close` ends its thread."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._threads = ThreadPool("planner", 1)

    async def plan(self, view: ClusterView) -> AssignmentPlan:
        """Return what the strategy would change. Raises: ClosedError."""
        return await self._of(view, self._strategy)

    async def reshapes(self, view: ClusterView) -> list[Reshape]:
        """Return the write partitions to split and to join. Raises: ClosedError."""
        return await self._of(view, reshapes)

    async def close(self) -> None:
        """Wait for a plan that is being made; no other is made any more."""
        await self._threads.close()

    async def _of(self, view: ClusterView, made: Callable[[ClusterView], T]) -> T:
        if len(view.assignments) <= AT_ONCE_PARTITIONS_MAX:
            return made(view)
        return await self._threads.run(made, view)


async def view_of(coordinator: Coordinator, now_ms: int) -> ClusterView:
    """Read the cluster as it is now. Raises: UnreachableError."""
    return ClusterView(
        topics=await coordinator.topics(),
        brokers=await coordinator.brokers(),
        assignments=await coordinator.assignments(),
        loads=await coordinator.loads(),
        now_ms=now_ms,
    )


CHANGES_AT_ONCE_MAX = 64  # a coordinator stores several with one fsync
CHANGES_UNSEEN_MAX = 1_024  # who governs may have to let go of what it moves, long before it has moved 10,000


async def _unseen() -> None:
    """Nobody looks."""


class Governor:
    """Acts for one broker, when that one governs. `look` is called within an act of very many changes."""

    def __init__(self, coordinator: Coordinator, planner: Planner, events: EventLog, clock: Clock) -> None:
        self._coordinator = coordinator
        self._clock = clock
        self._planner = planner
        self._events = events
        self._term = 0
        self._turn = asyncio.Lock()
        self._said: dict[str, float] = {}  # when something was said last, by what it is about
        self.look: Callable[[], Awaitable[None]] = _unseen

    @property
    def term(self) -> int:
        """The term in which the last act governed, 0 when it did not."""
        return self._term

    async def act(self, broker: BrokerEntry) -> int:
        """Plan and set what is planned, when this broker governs or may begin to; return how much was changed.

        Raises: UnreachableError, DeniedError: the rest of the plan is left, and the next act begins again.
        """
        async with self._turn:
            before, self._term = self._term, 0
            self._term = await self._coordinator.govern(broker)
            if not self._term:
                return 0
            if self._term != before:
                self._events.info("governing", f"broker '{broker.id}' governs in term {self._term}")
            return await self._carry_out()

    async def _view(self) -> ClusterView:
        return await view_of(self._coordinator, self._clock.wall_ms())

    async def _reshape(self, view: ClusterView) -> int:
        """Split and join write partitions. A former governor may try it once: a topic's version guards it."""
        done = 0
        for change in await self._planner.reshapes(view):
            try:
                await self._coordinator.alter_topic(change.topic)
            except (VersionConflictError, NotFoundError):
                continue  # as in `_set`
            done += 1
            self._events.info("reshaped", f"topic '{change.topic.name}': {change.reason}")
        return done

    async def _carry_out(self) -> int:
        view = await self._view()
        done = await self._reshape(view)
        plan = await self._planner.plan(await self._view() if done else view)
        for start in range(0, len(plan.changes), CHANGES_AT_ONCE_MAX):
            if start and start % CHANGES_UNSEEN_MAX == 0:
                await self.look()
            sets = [self._set(change) for change in plan.changes[start : start + CHANGES_AT_ONCE_MAX]]
            ends = await asyncio.gather(*sets, return_exceptions=True)
            done += sum(end is True for end in ends)
            for end in ends:
                if isinstance(end, TermFencedError):
                    self._events.info("governed", str(end))
                    self._term = 0
                    return done
                if isinstance(end, BaseException):
                    raise end
        self._say(plan.notes)
        return done

    def _say(self, notes: Iterable[str]) -> None:
        """Log what lasts once, then every minute: figures behind the colon change with each plan."""
        now_s, said = self._clock.monotonic(), self._said
        self._said = {}
        for note in notes:
            about = note.partition(":")[0]
            self._said[about] = said.get(about, now_s)
            if about not in said or now_s - said[about] >= OUTAGE_INTERVAL_S:
                self._said[about] = now_s
                self._events.warning("governor-note", note)

    async def _set(self, change: AssignmentChange) -> bool:
        """Set one assignment.

        Return False when another process was faster: its change arrives as one more event.
        """
        try:
            after = await self._coordinator.set_assignment(change.assignment, term=self._term)
        except (VersionConflictError, NotFoundError):
            return False
        text = f"partition {after.partition} of topic id {after.topic_id[:8]} goes from '{change.before}' to"
        self._events.info("assigned", f"{text} '{after.broker}': {change.reason}")
        return True
