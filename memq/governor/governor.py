"""The governor: a role that any broker takes when nobody has it, and that ends with the session that it was taken in.

The shell around a strategy. Each act asks for the term first, and everything that it sets carries that term: from the
moment another one governs, the coordinator refuses it, however late it comes. Whatever goes wrong ends the act.
"""

from __future__ import annotations

import asyncio

from memq.errors import NotFoundError, TermFencedError, VersionConflictError
from memq.governor import BrokerEntry, Coordinator
from memq.governor.planning import ClusterView, Strategy
from memq.logs import EventLog


async def view_of(coordinator: Coordinator) -> ClusterView:
    """Read the cluster as it is now. Raises: UnreachableError."""
    return ClusterView(
        topics=await coordinator.topics(),
        brokers=await coordinator.brokers(),
        assignments=await coordinator.assignments(),
        loads=await coordinator.loads(),
    )


class Governor:
    """Acts for one broker, when that one governs."""

    def __init__(self, coordinator: Coordinator, strategy: Strategy, events: EventLog) -> None:
        self._coordinator = coordinator
        self._strategy = strategy
        self._events = events
        self._term = 0
        self._turn = asyncio.Lock()

    @property
    def term(self) -> int:
        """The term in which the last act governed, 0 when it did not."""
        return self._term

    async def act(self, broker: BrokerEntry) -> int:
        """Plan and set what is planned, when this broker governs or may begin to; return how much was changed.

        Raises: UnreachableError, DeniedError: the rest of the plan is left, and the next act begins anew.
        """
        async with self._turn:
            before, self._term = self._term, 0
            self._term = await self._coordinator.govern(broker)
            if not self._term:
                return 0
            if self._term != before:
                self._events.info("governing", f"broker '{broker.id}' governs in term {self._term}")
            return await self._carry_out()

    async def _carry_out(self) -> int:
        plan = self._strategy(await view_of(self._coordinator))
        done = 0
        for change in plan.changes:
            try:
                after = await self._coordinator.set_assignment(change.assignment, term=self._term)
            except (VersionConflictError, NotFoundError):
                continue  # somebody was faster; that change comes as one more act
            except TermFencedError as error:
                self._events.info("governed", str(error))
                self._term = 0
                return done
            done += 1
            text = f"partition {after.partition} of topic id {after.topic_id[:8]} goes from '{change.before}' to"
            self._events.info("assigned", f"{text} '{after.broker}': {change.reason}")
        for note in plan.notes:
            self._events.warning("governor-note", note)
        return done
