"""Makes plans: small ones on the event loop at once, large ones in a thread.

A plan is pure, so it may be made anywhere, of the view that was read. One of 50,000 partitions takes half a second of
Python: in a thread the loop gets its turn every 5 ms meanwhile. Few are planned before a thread has begun; so the
simulation, which has no threads, runs the same code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from memq.governor.planning import AssignmentPlan, ClusterView, Strategy
from memq.governor.widening import Reshape, reshapes
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
