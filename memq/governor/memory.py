"""A coordinator in memory, with several brokers: for tests, the simulation and `memq.testing`."""

from __future__ import annotations

from collections.abc import Callable

from memq.governor import BrokerEntry
from memq.governor.local import LocalCoordinator
from memq.governor.registry import Registry, RegistryChange
from memq.governor.watchers import Watchers
from memq.runtime.clock import Clock, SystemClock
from memq.runtime.logs import EventLog


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
        """Let a broker's session end as if it had crashed: it is gone, what it owned is not released."""
        if self.registry.leave(broker):
            self.changed()


class MemoryCoordinator(LocalCoordinator):
    """One process's door to a `MemoryCluster`. No thread and no waiting.

    What one changes, all see at once.
    """

    def __init__(self, shared: MemoryCluster) -> None:
        super().__init__(shared.name, shared.registry, Watchers(shared.events))
        self._shared = shared
        shared.handles.append(self)

    async def close(self) -> None:
        """See `Coordinator.close`: ends this door's watchers, nothing of the cluster."""
        if self in self._shared.handles:
            self._shared.handles.remove(self)
        await self.watchers.close()

    async def _change(self, decide: Callable[[Registry], RegistryChange]) -> RegistryChange:
        change = decide(self._registry)
        self._shared.apply(change)
        return change

    def _changed(self) -> None:
        self._shared.changed()
