"""A coordinator that retries calls which a fault spoiled: a fault leaves no effect, or an error."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from msgspec.structs import replace

from memq.errors import MemqError, UnreachableError
from memq.governor import Assignment, BrokerEntry, Load, MarkedCoordinator, RuleKeeper
from memq.permissions import RuleSet
from memq.topic import Topic

T = TypeVar("T")
PAUSE_S = 0.02


class RetryingRules:
    """See `memq.governor.RuleKeeper`. A change that landed before is found as the stored rules."""

    def __init__(self, again: Callable[[Callable[[], Awaitable[RuleSet]]], Awaitable[RuleSet]], inner: RuleKeeper):
        self._again = again
        self._inner = inner

    async def read(self) -> RuleSet:
        return await self._again(self._inner.read)

    async def replace(self, changed: RuleSet) -> RuleSet:
        return await self._again(lambda: self._inner.replace(changed))


class RetryingCoordinator:
    """See `memq.governor.Coordinator`. It makes a call again that was not answered, or that met a fault and failed.

    `met` counts the faults. A call that met none must give the right answer. A change in doubt is looked for, as
    brokers do.
    """

    def __init__(self, coordinator: MarkedCoordinator, met: Callable[[], int]) -> None:
        self._coordinator = coordinator
        self.cluster = coordinator.cluster
        self._met = met
        self.rules: RuleKeeper = RetryingRules(self._again, coordinator.rules)

    async def register(self, broker: BrokerEntry) -> int | None:
        return await self._again(lambda: self._coordinator.register(broker))

    async def unregister(self, broker: BrokerEntry) -> None:
        await self._again(lambda: self._coordinator.unregister(broker))

    async def brokers(self) -> Sequence[BrokerEntry]:
        return await self._again(self._coordinator.brokers)

    async def topics(self) -> Sequence[Topic]:
        return await self._again(self._coordinator.topics)

    async def create_topic(self, topic: Topic) -> None:
        async def landed() -> bool:
            return await self.current_topic(topic.name) == topic

        await self._again(lambda: self._coordinator.create_topic(topic), landed, None)

    async def alter_topic(self, topic: Topic) -> Topic:
        after = replace(topic, version=topic.version + 1)

        async def landed() -> bool:
            return await self.current_topic(topic.name) == after

        return await self._again(lambda: self._coordinator.alter_topic(topic), landed, after)

    async def delete_topic(self, topic: Topic) -> None:
        async def landed() -> bool:
            return await self.deleted(topic.id)

        await self._again(lambda: self._coordinator.delete_topic(topic), landed, None)

    async def current_topic(self, name: str) -> Topic | None:
        return await self._again(lambda: self._coordinator.current_topic(name))

    async def deleted(self, topic_id: str) -> bool:
        return await self._again(lambda: self._coordinator.deleted(topic_id))

    async def assignments(self) -> Sequence[Assignment]:
        return await self._again(self._coordinator.assignments)

    async def assignment(self, topic_id: str, partition: int) -> Assignment:
        return await self._again(lambda: self._coordinator.assignment(topic_id, partition))

    async def set_assignment(self, assignment: Assignment, *, term: int = 0) -> Assignment:
        after = replace(assignment, version=assignment.version + 1)

        async def landed() -> bool:
            return await self.assignment(assignment.topic_id, assignment.partition) == after

        return await self._again(lambda: self._coordinator.set_assignment(assignment, term=term), landed, after)

    async def govern(self, broker: BrokerEntry) -> int:
        return await self._again(lambda: self._coordinator.govern(broker))

    async def governor(self) -> str:
        return await self._again(self._coordinator.governor)

    async def take_over(self, suspect: BrokerEntry, *, term: int, now_ms: int) -> bool:
        async def landed() -> bool:
            return suspect not in await self._coordinator.brokers()

        return await self._again(lambda: self._coordinator.take_over(suspect, term=term, now_ms=now_ms), landed, True)

    async def report(self, broker: BrokerEntry, loads: Sequence[Load]) -> None:
        await self._again(lambda: self._coordinator.report(broker, loads))

    async def loads(self) -> Sequence[Load]:
        return await self._again(self._coordinator.loads)

    async def store_mark(self, mark: str = "", *, before: str = "") -> str:
        return await self._again(lambda: self._coordinator.store_mark(mark, before=before))

    def watch(self, callback: Callable[[], Awaitable[None]]) -> Callable[[], None]:
        return self._coordinator.watch(callback)

    async def close(self) -> None:
        await self._coordinator.close()

    async def _again(
        self,
        call: Callable[[], Awaitable[T]],
        landed: Callable[[], Awaitable[bool]] | None = None,
        after: T | None = None,
    ) -> T:
        """Call until no fault spoils it; the test's time limit ends it. `after` is the answer of a call that landed."""
        doubt = False
        while True:
            before = self._met()
            try:
                return await call()
            except MemqError as error:
                spoiled = isinstance(error, UnreachableError) or self._met() > before
                if (doubt or spoiled) and landed is not None and await landed():
                    return after  # type: ignore[return-value]
                if not spoiled:
                    raise
                doubt = True
            await pause()


async def pause() -> None:
    """Let a moment pass between two reads of a condition: the event that shows it may be lost."""
    over = asyncio.Event()
    asyncio.get_running_loop().call_later(PAUSE_S, over.set)
    await over.wait()
