"""The governor: a role that any broker takes when free, and that ends with its session.

The shell around a strategy. Each act first asks the coordinator for the term, and sets assignments with that term. From
the moment that another broker governs, the coordinator refuses them, however late they arrive. Any error ends the act.

`Planner` makes the plans: small ones on the event loop, large ones in a thread. A strategy needs only the view, no
clock and no I/O. A plan of 50,000 partitions takes half a second of Python; while a thread makes it, the event loop
gets its turn every 5 ms. A small plan is ready before a thread would have started. The simulation, which has no
threads, has only small plans.
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
from memq.topic import is_internal

T = TypeVar("T")

AT_ONCE_PARTITIONS_MAX = 2_000  # planned on the event loop, in 20 ms at most


class Planner:
    """Makes plans, for the governor and for requests that only show a plan. `close` ends its thread."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._threads = ThreadPool("planner", 1)

    async def plan(self, view: ClusterView) -> AssignmentPlan:
        """Return the changes that the strategy proposes. Raises: ClosedError."""
        return await self._run(view, self._strategy)

    async def reshapes(self, view: ClusterView) -> list[Reshape]:
        """Return the write partitions to split and to join. Raises: ClosedError."""
        return await self._run(view, reshapes)

    async def close(self) -> None:
        """Wait for the plan in progress; later plans that need the thread raise ClosedError."""
        await self._threads.close()

    async def _run(self, view: ClusterView, decide: Callable[[ClusterView], T]) -> T:
        if len(view.assignments) <= AT_ONCE_PARTITIONS_MAX:
            return decide(view)
        return await self._threads.run(decide, view)


async def view_of(coordinator: Coordinator, now_ms: int) -> ClusterView:
    """Read the current state of the cluster. Raises: UnreachableError."""
    return ClusterView(
        topics=await coordinator.topics(),
        brokers=await coordinator.brokers(),
        assignments=await coordinator.assignments(),
        loads=await coordinator.loads(),
        now_ms=now_ms,
    )


CHANGES_AT_ONCE_MAX = 64  # sent concurrently: a coordinator stores several with one fsync
CHANGES_UNSEEN_MAX = 1_024  # changes between two calls of `Governor.refresh`


async def _unseen() -> None:
    """Do nothing: the default of `Governor.refresh`."""


class Governor:
    """Acts for one broker while it governs. `refresh` is called every `CHANGES_UNSEEN_MAX` changes.

    The reason: the governor's own broker must release its moved partitions long before an act has moved 10,000.
    """

    def __init__(self, coordinator: Coordinator, planner: Planner, events: EventLog, clock: Clock) -> None:
        self._coordinator = coordinator
        self._clock = clock
        self._planner = planner
        self._events = events
        self._term = 0
        self._turn = asyncio.Lock()
        self._noted_s: dict[str, float] = {}  # text of a note before its colon: when it was logged last
        self.refresh: Callable[[], Awaitable[None]] = _unseen

    @property
    def term(self) -> int:
        """The term of the last act, 0 when this broker did not govern."""
        return self._term

    async def act(self, broker: BrokerEntry) -> int:
        """Plan and set assignments if this broker is or becomes the governor; return the number of changes.

        Raises: UnreachableError, DeniedError: the rest of the plan is dropped, and the next act plans again.
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
        """Split and join write partitions. The topic's version protects it against a late former governor."""
        done = 0
        for change in await self._planner.reshapes(view):
            try:
                await self._coordinator.alter_topic(change.topic)
            except (VersionConflictError, NotFoundError):
                continue  # another process was faster, as in `_set`
            done += 1
            self._events.info("reshaped", f"topic '{change.topic.name}': {change.reason}")
        return done

    async def _carry_out(self) -> int:
        view = await self._view()
        done = await self._reshape(view)
        view = await self._view() if done else view
        plan = await self._planner.plan(view)
        names = {topic.id: topic.name for topic in view.topics}
        for start in range(0, len(plan.changes), CHANGES_AT_ONCE_MAX):
            if start and start % CHANGES_UNSEEN_MAX == 0:
                await self.refresh()
            sets = [
                self._set(change, names.get(change.assignment.topic_id, ""))
                for change in plan.changes[start : start + CHANGES_AT_ONCE_MAX]
            ]
            ends = await asyncio.gather(*sets, return_exceptions=True)
            done += sum(end is True for end in ends)
            for end in ends:
                if isinstance(end, TermFencedError):
                    self._events.info("governed", str(end))
                    self._term = 0
                    return done
                if isinstance(end, BaseException):
                    raise end
        self._log_notes(plan.notes)
        return done

    def _log_notes(self, notes: Iterable[str]) -> None:
        """Log a note when it is new, then every minute while plans repeat it.

        Notes are the same if their texts before the colon are: the figures after it change with each plan.
        """
        now_s, before = self._clock.monotonic(), self._noted_s
        self._noted_s = {}
        for note in notes:
            about = note.partition(":")[0]
            self._noted_s[about] = before.get(about, now_s)
            if about not in before or now_s - before[about] >= OUTAGE_INTERVAL_S:
                self._noted_s[about] = now_s
                self._events.warning("governor-note", note)

    async def _set(self, change: AssignmentChange, topic: str) -> bool:
        """Set one assignment. The first owner of a hidden topic's partition is logged as debug.

        Return False when another process was faster: its change causes another act.
        """
        try:
            after = await self._coordinator.set_assignment(change.assignment, term=self._term)
        except (VersionConflictError, NotFoundError):
            return False
        owners = f"from '{change.before}' to '{after.broker}'" if change.before else f"to '{after.broker}'"
        text = f"partition {after.partition} of topic '{topic}' goes {owners}: {change.reason}"
        if is_internal(topic) and not change.before:
            self._events.debug("assigned", text)
        else:
            self._events.info("assigned", text)
        return True
