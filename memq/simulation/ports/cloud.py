"""Store, queue and coordinator of all nodes, in memory, on a node of their own that never fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from memq.errors import QueueError, StoreError, UnreachableError
from memq.governor.memory import MemoryCluster
from memq.notification.memory import MemoryQueue
from memq.simulation.ports.calls import Caller, Met
from memq.simulation.ports.coordinator import SimCoordinator
from memq.simulation.ports.failing_partition import FailingPartition
from memq.simulation.ports.faults import CallFaults, WorldFaults
from memq.simulation.ports.groups import StateLogs
from memq.simulation.ports.ownership_monitor import OwnershipMonitor
from memq.simulation.ports.queue import QueueObserver, SimQueue
from memq.simulation.ports.store import Sickness, SimStore
from memq.simulation.ports.takeover_monitor import TakeoverMonitor
from memq.simulation.ports.wrong_answers import WrongAnswerRates, WrongAnswers
from memq.simulation.world.node import SimNode
from memq.simulation.world.world import World
from memq.storage_handlers.memory import MemoryHandler
from memq.topic import ReadPartition

NAME = "cloud"


class Observer(QueueObserver):
    """Notified of changes of the store and the queue, in the same step. A subclass may check them."""

    def stored(self, key: str) -> None:
        """An object was stored, possibly again."""

    def deleted(self, key: str) -> None:
        """An object was deleted."""


@dataclass(frozen=True, slots=True)
class Doors:
    """One node's ports: store, queue and coordinator."""

    store: SimStore
    queue: SimQueue
    coordinator: SimCoordinator
    callers: tuple[Caller, Caller, Caller]

    def block(self, seconds: float, *, only: int | None = None) -> None:
        """Cut the node off from store (0), queue (1) and coordinator (2), or `only` from one of them."""
        for caller in self.callers if only is None else (self.callers[only],):
            until = caller.node.world.now + seconds
            caller.blocked_until = max(caller.blocked_until, until)


class Cloud:
    """The services themselves: `handler`, `queue` and `cluster` may be checked and damaged directly.

    Set `observer` before a node gets its doors.
    """

    def __init__(self, world: World, faults: WorldFaults, *, refuse: Literal["epoch", "age"] = "epoch") -> None:
        self.world = world
        self.faults = faults
        self.observer = Observer()
        self.node = world.spawn(NAME, _stay, offset_ms=0)
        self.handler = MemoryHandler(self.node.clock)
        self.queue = MemoryQueue(self.node.clock, refuse)
        self.cluster = MemoryCluster("sim", self.node.clock)
        self.sickness = Sickness()
        self.failing_partition = FailingPartition()
        self.monitor = OwnershipMonitor(world.fail, refuse)
        self.takeovers = TakeoverMonitor(world.fail)
        self.state_logs = StateLogs(lambda: self.observer, world.fail)
        self.wrong_answers = {
            name: WrongAnswers(world.random(f"lies/{name}"), faults.lies.get(name, WrongAnswerRates()))
            for name in ("store", "queue", "coordinator", "memory")
        }
        self._callers: list[Caller] = []
        self._queues: dict[SimNode, SimQueue] = {}  # of live processes

    def doors(self, node: SimNode) -> Doors:
        """Return one node's doors; the node's main must call it, because watchers run in its loop."""
        store = self._caller(node, "store", self.faults.store, StoreError)
        queue = self._caller(node, "queue", self.faults.queue, QueueError)
        coordinator = self._caller(node, "coordinator", self.faults.coordinator, UnreachableError)
        self._queues = {each: door for each, door in self._queues.items() if each.alive}
        door = self._queues[node] = SimQueue(
            queue, self.queue, self.observer, self.monitor, self.failing_partition, self._grows, self.state_logs
        )
        return Doors(
            SimStore(store, self.handler, self._stored, self._deleted, self.sickness, self.failing_partition),
            door,
            SimCoordinator(coordinator, self.cluster, self.monitor, self.takeovers),
            (store, queue, coordinator),
        )

    def _stored(self, key: str) -> None:
        self.monitor.stored(key, self.world.now)
        self.observer.stored(key)

    def _deleted(self, key: str) -> None:
        self.state_logs.deleted(key)
        self.observer.deleted(key)

    def cut_log(self, partition: ReadPartition, end: int) -> None:
        """Let the log of a partition lose all entries from offset `end` on, as an unclean election does.

        A process that has read beyond `end` gets errors for all lower ends until it starts again, as with Kafka.
        """
        log = self.queue.log(partition)
        del log.entries[max(0, end - log.begin) :]
        self.monitor.cuts(partition, end, self.world.now)
        self.observer.cut(partition, end)

    def _grows(self, node: SimNode, partition: ReadPartition, end: int) -> None:
        """A process publishes at `end`: kill the others that know a higher end by a young proof.

        If the log grows up to that end before the proof is old, they publish without a comparison. They would miss the
        pointers below that end.
        """
        for other, door in self._queues.items():
            if other is not node and other.alive and door.relies_on(partition, end):
                other.kill()

    def change_faults(self, faults: WorldFaults) -> None:
        """Use other faults for all later calls."""
        self.faults = faults
        for caller in self._callers:
            caller.faults = {"store": faults.store, "queue": faults.queue}.get(caller.name, faults.coordinator)

    def met(self) -> Met:
        """Return the counts of faults by kind of work."""
        found: Met = {}
        for caller in self._callers:
            for key, count in caller.met.items():
                found[key] = found.get(key, 0) + count
        return found

    def _caller(
        self,
        node: SimNode,
        name: str,
        faults: CallFaults,
        error: Callable[[str], StoreError | QueueError | UnreachableError],
    ) -> Caller:
        caller = Caller(node, self.node, name, faults, error, self.wrong_answers[name])
        self._callers.append(caller)
        return caller


async def _stay(_node: SimNode) -> None:
    await asyncio.get_running_loop().create_future()
