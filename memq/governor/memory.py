"""A coordinator in memory, with several brokers: for tests, the simulation and `memq.testing`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from memq.clock import Clock, SystemClock
from memq.governor import Assignment, BrokerEntry, Load
from memq.governor.registry import Change, Registry
from memq.governor.watchers import Watchers
from memq.logs import EventLog
from memq.topic import Topic


class MemoryCluster:
    """What all coordinators of one cluster share."""

    def __init__(self, name: str = "memory", clock: Clock | None = None) -> None:
        self.name = name
        self.events = EventLog(clock or SystemClock())
        self.registry = Registry()
        self.handles: list[MemoryCoordinator] = []

    def apply(self, change: Change) -> None:
        """Make a change, and tell all watchers."""
        self.registry.apply(change)
        self.changed()

    def changed(self) -> None:
        """Tell the watchers of all coordinators."""
        for handle in self.handles:
            handle.watchers.changed()

    def expire(self, broker: BrokerEntry) -> None:
        """Let a broker's session end as if it had crashed: it is gone, what it owned is not released."""
        if self.registry.leave(broker):
            self.changed()


class MemoryCoordinator:
    """One process's door to a `MemoryCluster`. No thread and no waiting; what one changes, all see at once."""

    def __init__(self, shared: MemoryCluster) -> None:
        self._shared = shared
        self._registry = shared.registry
        self.watchers = Watchers(shared.events)
        shared.handles.append(self)

    @property
    def cluster(self) -> str:
        """See `Coordinator.cluster`."""
        return self._shared.name

    async def register(self, broker: BrokerEntry) -> None:
        """See `Coordinator.register`."""
        self._registry.enter(broker)
        self._shared.changed()

    async def unregister(self, broker: BrokerEntry) -> None:
        """See `Coordinator.unregister`."""
        released = self._registry.release(broker)
        self._registry.leave(broker)
        self._shared.apply(released)

    async def brokers(self) -> Sequence[BrokerEntry]:
        """See `Coordinator.brokers`."""
        return self._registry.brokers()

    async def topics(self) -> Sequence[Topic]:
        """See `Coordinator.topics`."""
        return self._registry.topics()

    async def create_topic(self, topic: Topic) -> None:
        """See `Coordinator.create_topic`."""
        self._shared.apply(self._registry.create_topic(topic))

    async def alter_topic(self, topic: Topic) -> Topic:
        """See `Coordinator.alter_topic`."""
        change = self._registry.alter_topic(topic)
        self._shared.apply(change)
        return change.stored[0]

    async def delete_topic(self, topic: Topic) -> None:
        """See `Coordinator.delete_topic`."""
        self._shared.apply(self._registry.delete_topic(topic))

    async def assignments(self) -> Sequence[Assignment]:
        """See `Coordinator.assignments`."""
        return self._registry.assignments()

    async def assignment(self, topic_id: str, partition: int) -> Assignment:
        """See `Coordinator.assignment`."""
        return self._registry.assignment(topic_id, partition)

    async def set_assignment(self, assignment: Assignment, *, term: int = 0) -> Assignment:
        """See `Coordinator.set_assignment`."""
        change = self._registry.set_assignment(assignment, term)
        self._shared.apply(change)
        return change.assignments[0]

    async def govern(self, broker: BrokerEntry) -> int:
        """See `Coordinator.govern`."""
        return self._registry.govern(broker)

    async def governor(self) -> str:
        """See `Coordinator.governor`."""
        return self._registry.governor()

    async def report(self, broker: BrokerEntry, loads: Sequence[Load]) -> None:
        """See `Coordinator.report`."""
        self._registry.report(broker, loads)

    async def loads(self) -> Sequence[Load]:
        """See `Coordinator.loads`."""
        return self._registry.loads()

    def watch(self, callback: Callable[[], Awaitable[None]]) -> Callable[[], None]:
        """See `Coordinator.watch`."""
        return self.watchers.watch(callback)

    async def close(self) -> None:
        """See `Coordinator.close`: ends this door's watchers, nothing of the cluster."""
        if self in self._shared.handles:
            self._shared.handles.remove(self)
        await self.watchers.close()
