"""Coordinators with a registry in memory: their shared base, and a coordinator for several brokers.

`MemoryCoordinator` is for tests, the simulation and `memq.testing`; `memq.governor.standalone` has the durable one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence

from memq.governor import Assignment, BrokerEntry, Load, RuleKeeper
from memq.governor.registry import Registry, RegistryChange
from memq.governor.watchers import Watchers
from memq.permissions import RuleSet
from memq.runtime.clock import Clock, SystemClock
from memq.runtime.logs import EventLog
from memq.topic import Topic


class LocalRules:
    """See `memq.governor.RuleKeeper`; over the registry of a coordinator, with its way to change it."""

    def __init__(
        self,
        registry: Callable[[], Registry],
        change: Callable[[Callable[[Registry], RegistryChange]], Awaitable[RegistryChange]],
    ) -> None:
        self._registry = registry
        self._change = change

    async def read(self) -> RuleSet:
        """See `RuleKeeper.read`."""
        return self._registry().rules

    async def replace(self, changed: RuleSet) -> RuleSet:
        """See `RuleKeeper.replace`."""

        def decide(registry: Registry) -> RegistryChange:
            return RegistryChange(rules=changed if changed.version == registry.rules.version + 1 else None)

        await self._change(decide)
        return self._registry().rules


class LocalCoordinator(ABC):
    """A `Coordinator` that answers from `registry`; a subclass stores its changes."""

    def __init__(self, cluster: str, registry: Registry, watchers: Watchers) -> None:
        self.cluster = cluster
        self.watchers = watchers
        self.rules: RuleKeeper = LocalRules(lambda: self._registry, self._change)
        self._registry = registry

    @abstractmethod
    async def _change(self, decide: Callable[[Registry], RegistryChange]) -> RegistryChange:
        """Apply the change that `decide` returns, notify all watchers, and return it."""

    @abstractmethod
    def _changed(self) -> None:
        """Notify all watchers that the membership has changed."""

    async def register(self, broker: BrokerEntry) -> int | None:
        """See `Coordinator.register`."""
        self._registry.register(broker)
        self._changed()
        return None

    async def unregister(self, broker: BrokerEntry) -> None:
        """See `Coordinator.unregister`."""
        await self._change(lambda registry: registry.release(broker))
        self._registry.unregister(broker)
        self._changed()

    async def brokers(self) -> Sequence[BrokerEntry]:
        """See `Coordinator.brokers`."""
        return self._registry.brokers()

    async def topics(self) -> Sequence[Topic]:
        """See `Coordinator.topics`."""
        return self._registry.topics()

    async def create_topic(self, topic: Topic) -> None:
        """See `Coordinator.create_topic`."""
        await self._change(lambda registry: registry.create_topic(topic))

    async def alter_topic(self, topic: Topic) -> Topic:
        """See `Coordinator.alter_topic`."""
        return (await self._change(lambda registry: registry.alter_topic(topic))).stored[0]

    async def delete_topic(self, topic: Topic) -> None:
        """See `Coordinator.delete_topic`."""
        await self._change(lambda registry: registry.delete_topic(topic))

    async def current_topic(self, name: str) -> Topic | None:
        """See `Coordinator.current_topic`."""
        return next((topic for topic in self._registry.topics() if topic.name == name), None)

    async def deleted(self, topic_id: str) -> bool:
        """See `Coordinator.deleted`."""
        return self._registry.deleted(topic_id)

    async def assignments(self) -> Sequence[Assignment]:
        """See `Coordinator.assignments`."""
        return self._registry.assignments()

    async def assignment(self, topic_id: str, partition: int) -> Assignment:
        """See `Coordinator.assignment`."""
        return self._registry.assignment(topic_id, partition)

    async def set_assignment(self, assignment: Assignment, *, term: int = 0) -> Assignment:
        """See `Coordinator.set_assignment`."""
        return (await self._change(lambda registry: registry.set_assignment(assignment, term))).assignments[0]

    async def govern(self, broker: BrokerEntry) -> int:
        """See `Coordinator.govern`."""
        return self._registry.govern(broker)

    async def governor(self) -> str:
        """See `Coordinator.governor`."""
        return self._registry.governor()

    async def take_over(self, suspect: BrokerEntry, *, term: int, now_ms: int) -> bool:
        """See `Coordinator.take_over`."""
        taken = self._registry.take_over(suspect, term, now_ms)
        if taken:
            self._changed()
        return taken

    async def report(self, broker: BrokerEntry, loads: Sequence[Load]) -> None:
        """See `Coordinator.report`."""
        self._registry.report(broker, loads)

    async def loads(self) -> Sequence[Load]:
        """See `Coordinator.loads`."""
        return self._registry.loads()

    async def store_mark(self, mark: str = "", *, before: str = "") -> str:
        """See `MarkKeeper.store_mark`."""
        if mark:
            await self._change(lambda registry: registry.set_mark(mark, before))
        return self._registry.mark

    def watch(self, callback: Callable[[], Awaitable[None]]) -> Callable[[], None]:
        """See `Coordinator.watch`."""
        return self.watchers.watch(callback)


class MemoryCluster:
    """The state that all coordinators of one cluster share."""

    def __init__(self, name: str = "memory", clock: Clock | None = None) -> None:
        self.name = name
        self.events = EventLog(clock or SystemClock())
        self.registry = Registry()
        self.handles: list[MemoryCoordinator] = []

    def apply(self, change: RegistryChange) -> None:
        """Apply a change, and notify all watchers."""
        self.registry.apply(change)
        self.changed()

    def changed(self) -> None:
        """Notify the watchers of all coordinators."""
        for handle in self.handles:
            handle.watchers.changed()

    def expire(self, broker: BrokerEntry) -> None:
        """End a broker's session as a crash does: it leaves the membership, its partitions are not released."""
        if self.registry.unregister(broker):
            self.changed()


class MemoryCoordinator(LocalCoordinator):
    """One process's view of a `MemoryCluster`, without threads and waiting.

    All coordinators of the cluster see each change at once.
    """

    def __init__(self, shared: MemoryCluster) -> None:
        super().__init__(shared.name, shared.registry, Watchers(shared.events))
        self._shared = shared
        shared.handles.append(self)

    async def close(self) -> None:
        """See `Coordinator.close`. Ends the watchers of this coordinator only."""
        if self in self._shared.handles:
            self._shared.handles.remove(self)
        await self.watchers.close()

    async def _change(self, decide: Callable[[Registry], RegistryChange]) -> RegistryChange:
        change = decide(self._registry)
        self._shared.apply(change)
        return change

    def _changed(self) -> None:
        self._shared.changed()
