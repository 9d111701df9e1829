"""One node's view of the coordinator: the in-memory one behind calls that fail, hang and come late."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from memq.errors import UnreachableError
from memq.governor import Assignment, BrokerEntry, Load
from memq.governor.memory import MemoryCluster, MemoryCoordinator
from memq.governor.watchers import Watchers
from memq.logs import EventLog
from memq.topic import Topic
from tests.simulation.calls import Caller
from tests.simulation.loop import SimTask
from tests.simulation.ownership_monitor import OwnershipMonitor


class SimCoordinator:
    """See `memq.governor.Coordinator`. Watchers are called in the node's loop, a latency after the change."""

    def __init__(self, caller: Caller, shared: MemoryCluster, monitor: OwnershipMonitor) -> None:
        self._monitor = monitor
        self._caller = caller
        self._shared = shared
        self._inner = MemoryCoordinator(shared)
        self._watchers = Watchers(EventLog(caller.node.clock))
        self._stop: Callable[[], None] | None = None
        self._watching = False
        self._dead = False
        self._ended: dict[str, None] = {}
        caller.node.at_death(self._die)

    @property
    def cluster(self) -> str:
        """See `Coordinator.cluster`."""
        return self._inner.cluster

    async def register(self, broker: BrokerEntry) -> None:
        """See `Coordinator.register`."""
        await self._caller.call(f"register {broker.id}", lambda: self._register(broker))

    async def _register(self, broker: BrokerEntry) -> None:
        """Enter it, unless its session said farewell or its process died while this was on its way."""
        if self._dead or broker.session in self._ended:
            raise UnreachableError(f"session {broker.session} of broker '{broker.id}' has ended")
        await self._inner.register(broker)

    async def unregister(self, broker: BrokerEntry) -> None:
        """See `Coordinator.unregister`."""
        self._ended[broker.session] = None
        await self._caller.call(f"unregister {broker.id}", lambda: self._inner.unregister(broker))

    async def brokers(self) -> Sequence[BrokerEntry]:
        """See `Coordinator.brokers`."""
        return await self._caller.call("brokers", self._inner.brokers)

    async def topics(self) -> Sequence[Topic]:
        """See `Coordinator.topics`."""
        return await self._caller.call("topics", self._inner.topics)

    async def create_topic(self, topic: Topic) -> None:
        """See `Coordinator.create_topic`."""
        await self._caller.call(f"create {topic.name}", lambda: self._inner.create_topic(topic))

    async def alter_topic(self, topic: Topic) -> Topic:
        """See `Coordinator.alter_topic`."""
        return await self._caller.call(f"alter {topic.name}", lambda: self._inner.alter_topic(topic))

    async def delete_topic(self, topic: Topic) -> None:
        """See `Coordinator.delete_topic`."""
        await self._caller.call(f"delete {topic.name}", lambda: self._inner.delete_topic(topic))

    async def current_topic(self, name: str) -> Topic | None:
        """See `Coordinator.current_topic`."""
        return await self._caller.call(f"current topic {name}", lambda: self._inner.current_topic(name))

    async def deleted(self, topic_id: str) -> bool:
        """See `Coordinator.deleted`."""
        return await self._caller.call(f"deleted {topic_id[:8]}", lambda: self._inner.deleted(topic_id))

    async def assignments(self) -> Sequence[Assignment]:
        """See `Coordinator.assignments`."""
        return await self._caller.call("assignments", self._inner.assignments)

    async def assignment(self, topic_id: str, partition: int) -> Assignment:
        """See `Coordinator.assignment`."""
        return await self._caller.call(f"assignment {partition}", lambda: self._inner.assignment(topic_id, partition))

    async def set_assignment(self, assignment: Assignment, *, term: int = 0) -> Assignment:
        """See `Coordinator.set_assignment`. A broker that enters its own session claims the epoch."""
        node, task = self._caller.node, asyncio.current_task()
        claims = bool(assignment.session) and not term
        if claims and isinstance(task, SimTask):
            self._monitor.claiming((node.index, task.number))

        async def land() -> Assignment:
            stored = await self._inner.set_assignment(assignment, term=term)
            if claims:
                self._monitor.claimed(stored.topic_id, stored.partition, stored.epoch, node.index)
            return stored

        what = f"assign {assignment.partition} epoch {assignment.epoch} to '{assignment.broker}'"
        return await self._caller.call(what, land)

    async def govern(self, broker: BrokerEntry) -> int:
        """See `Coordinator.govern`."""
        return await self._caller.call(f"govern {broker.id}", lambda: self._inner.govern(broker))

    async def governor(self) -> str:
        """See `Coordinator.governor`."""
        return await self._caller.call("governor", self._inner.governor)

    async def report(self, broker: BrokerEntry, loads: Sequence[Load]) -> None:
        """See `Coordinator.report`."""
        await self._caller.call(f"report {broker.id}", lambda: self._inner.report(broker, loads))

    async def loads(self) -> Sequence[Load]:
        """See `Coordinator.loads`."""
        return await self._caller.call("loads", self._inner.loads)

    def watch(self, callback: Callable[[], Awaitable[None]]) -> Callable[[], None]:
        """See `Coordinator.watch`."""
        if not self._watching:
            self._watching = True
            self._caller.service.loop.call_soon(self._begin)
        return self._watchers.watch(callback)

    def _begin(self) -> None:
        if self._watching:
            self._stop = self._inner.watch(self._tell)

    async def _tell(self) -> None:
        caller = self._caller
        blocked_s = max(0.0, caller.blocked_until - caller.node.world.now)
        caller.node.world.schedule(blocked_s + caller.draw_latency_s(), self._tell_node)

    def _tell_node(self) -> None:
        self._caller.node.loop.call_soon(self._watchers.changed)

    async def close(self) -> None:
        """See `Coordinator.close`."""
        self._forget()
        await self._watchers.close()

    def _die(self) -> None:
        self._dead = True
        self._forget()

    def _forget(self) -> None:
        self._watching = False
        if self._stop is not None:
            self._caller.service.loop.call_soon(self._stop)
        if self._inner in self._shared.handles:
            self._shared.handles.remove(self._inner)
