"""One node's view of the coordinator: the in-memory one behind calls that fail, hang and come late."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar, cast

from memq.errors import UnreachableError
from memq.governor import Assignment, BrokerEntry, Load, RuleKeeper
from memq.governor.memory import MemoryCluster, MemoryCoordinator
from memq.governor.watchers import Watchers
from memq.permissions import RuleSet
from memq.runtime.logs import EventLog
from memq.simulation.ports.calls import Caller
from memq.simulation.ports.ownership_monitor import OwnershipMonitor
from memq.simulation.ports.takeover_monitor import TakeoverMonitor
from memq.simulation.world.loop import SimTask
from memq.topic import Topic

WRITE_LIES = ("denied", "denied-landed")
T = TypeVar("T")


class SimRules:
    """See `memq.governor.RuleKeeper`; it notes the times of its reads.

    A stale answer breaks the promise of the port. The broker defends itself against single ones.
    """

    def __init__(self, caller: Caller, inner: RuleKeeper) -> None:
        self._caller = caller
        self._inner = inner
        self._before: RuleSet | None = None  # the true answer to the last read
        self.read_s = self.answered_s = 0.0  # when the last read with a true answer began, and ended
        self.failed_s = -math.inf  # when the last read without one ended

    async def read(self) -> RuleSet:
        """See `RuleKeeper.read`."""
        world = self._caller.node.world
        began_s, stale = world.now, self._caller.lie("stale")
        try:
            answer = await self._caller.call("rules", self._inner.read, lies=("denied",))
        except BaseException:  # also the time-out of the caller
            self.failed_s = world.now
            raise
        before, self._before = self._before, answer
        if stale and before is not None and before != answer:
            self.failed_s = world.now
            return before
        self.read_s, self.answered_s = began_s, world.now
        return answer

    async def replace(self, changed: RuleSet) -> RuleSet:
        """See `RuleKeeper.replace`."""
        return await self._caller.call(
            f"rules {changed.version}", lambda: self._inner.replace(changed), lies=WRITE_LIES
        )


class SimCoordinator:
    """See `memq.governor.Coordinator`. Watchers are called in the node's loop, a latency after the change."""

    def __init__(
        self, caller: Caller, shared: MemoryCluster, monitor: OwnershipMonitor, takeovers: TakeoverMonitor
    ) -> None:
        self._monitor = monitor
        self._takeovers = takeovers
        self._caller = caller
        self._shared = shared
        self._inner = MemoryCoordinator(shared)
        self.cluster = self._inner.cluster
        self.own_rules = SimRules(caller, self._inner.rules)
        self.rules: RuleKeeper = self.own_rules
        self._watchers = Watchers(EventLog(caller.node.clock))
        self._stop: Callable[[], None] | None = None
        self._watching = False
        self._dead = False
        self._ended: dict[str, None] = {}
        self._entry: BrokerEntry | None = None
        self.entered: BrokerEntry | None = None  # the last registered entry
        self._seen: dict[tuple[str, str], object] = {}  # the last true answer to each request
        caller.node.at_death(self._die)

    @property
    def session(self) -> str:
        """The session that this process has begun and not ended, "" for none."""
        entry = self._entry
        return "" if entry is None or entry.session in self._ended else entry.session

    async def register(self, broker: BrokerEntry) -> int | None:
        """See `Coordinator.register`."""
        self._entry = broker
        return await self._caller.call(f"register {broker.id}", lambda: self._register(broker), lies=WRITE_LIES)

    async def _register(self, broker: BrokerEntry) -> int:
        """Register it, unless its session ended or its process died meanwhile; return the service's time."""
        if self._dead or broker.session in self._ended:
            raise UnreachableError(f"session {broker.session} of broker '{broker.id}' has ended")
        await self._inner.register(broker)
        self.entered = broker
        return self._caller.service.clock.wall_ms()

    async def unregister(self, broker: BrokerEntry) -> None:
        """See `Coordinator.unregister`."""
        self._ended[broker.session] = None
        await self._caller.call(f"unregister {broker.id}", lambda: self._inner.unregister(broker))

    async def brokers(self) -> Sequence[BrokerEntry]:
        """See `Coordinator.brokers`."""
        return await self._read("brokers", self._inner.brokers)

    async def topics(self) -> Sequence[Topic]:
        """See `Coordinator.topics`."""
        return await self._read("topics", self._inner.topics)

    async def create_topic(self, topic: Topic) -> None:
        """See `Coordinator.create_topic`."""
        await self._caller.call(f"create {topic.name}", lambda: self._inner.create_topic(topic))

    async def alter_topic(self, topic: Topic) -> Topic:
        """See `Coordinator.alter_topic`."""
        return await self._caller.call(f"alter {topic.name}", lambda: self._inner.alter_topic(topic), lies=WRITE_LIES)

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
        return await self._read("assignments", self._inner.assignments)

    async def assignment(self, topic_id: str, partition: int) -> Assignment:
        """See `Coordinator.assignment`."""
        what = f"assignment {partition}"
        return await self._read(what, lambda: self._inner.assignment(topic_id, partition), of=topic_id)

    async def set_assignment(self, assignment: Assignment, *, term: int = 0) -> Assignment:
        """See `Coordinator.set_assignment`. A broker that writes its own session claims the epoch.

        The last draining broker takes a partition without an owner with the stored session and epoch: that is no claim.
        """
        node, task = self._caller.node, asyncio.current_task()
        claims = bool(assignment.session) and not term
        if claims and isinstance(task, SimTask):
            self._monitor.claiming((node.index, task.number))

        expires = self._caller.lie("expired")

        async def land() -> Assignment:
            if expires and self._entry is not None:
                self._shared.expire(self._entry)  # in the middle of the call; the next tick enters the broker again
            before = await self._inner.assignment(assignment.topic_id, assignment.partition)
            stored = await self._inner.set_assignment(assignment, term=term)
            if claims and (stored.session, stored.epoch) != (before.session, before.epoch):
                self._monitor.claimed(stored.topic_id, stored.partition, stored.epoch, node.index)
            return stored

        what = f"assign {assignment.partition} epoch {assignment.epoch} to '{assignment.broker}'"
        return await self._caller.call(what, land, lies=WRITE_LIES)

    async def govern(self, broker: BrokerEntry) -> int:
        """See `Coordinator.govern`."""
        return await self._caller.call(f"govern {broker.id}", lambda: self._inner.govern(broker), lies=WRITE_LIES)

    async def governor(self) -> str:
        """See `Coordinator.governor`."""
        return await self._caller.call("governor", self._inner.governor)

    async def take_over(self, suspect: BrokerEntry, *, term: int, now_ms: int) -> bool:
        """See `Coordinator.take_over`."""
        node = self._caller.node

        async def land() -> bool:
            taken = await self._inner.take_over(suspect, term=term, now_ms=now_ms)
            if taken:
                self._takeovers.taken_over(node.name, suspect, now_ms, node.world.now)
            return taken

        return await self._caller.call(f"take over {suspect.id}", land, lies=WRITE_LIES)

    async def report(self, broker: BrokerEntry, loads: Sequence[Load]) -> None:
        """See `Coordinator.report`."""
        await self._caller.call(f"report {broker.id}", lambda: self._inner.report(broker, loads), lies=WRITE_LIES)

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
            self._stop = self._inner.watch(self._notify)

    async def _read(self, what: str, ask: Callable[[], Coroutine[Any, Any, T]], *, of: str = "") -> T:
        """Return the answer; when it is drawn as stale, the previous answer."""
        stale = self._caller.lie("stale")
        answer = await self._caller.call(what, ask, lies=("denied",))
        before = cast("T", self._seen.get((what, of), answer))
        self._seen[what, of] = answer
        return before if stale else answer

    async def _notify(self) -> None:
        caller = self._caller
        if caller.lie("no-watch"):
            return
        blocked_s = max(0.0, caller.blocked_until - caller.node.world.now)
        caller.node.world.schedule(blocked_s + caller.draw_latency_s(), self._notify_node)

    def _notify_node(self) -> None:
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
