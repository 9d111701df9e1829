"""Coordinators on a ZooKeeper in memory, on a scripted session, and with retries on virtual time."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from memq.errors import (
    AlreadyExistsError,
    MemqError,
    NotFoundError,
    VersionConflictError,
)
from memq.governor import BrokerEntry
from memq.governor.zookeeper import coordinator as coordinator_module
from memq.governor.zookeeper import layout
from memq.governor.zookeeper.coordinator import ZookeeperCoordinator
from memq.governor.zookeeper.session import (
    CheckVersion,
    CreateNode,
    DeleteNode,
    Node,
    Operation,
    SetData,
)
from memq.governor.zookeeper.settings import ZookeeperAddress, ZookeeperSettings
from memq.runtime.runtime import Runtime
from tests.skipping_loop import LoopClock, run_skipping, skip, skipping_runtime


def run(scenario: Callable[..., Awaitable[None]], *coordinators: ZookeeperCoordinator) -> None:
    async def work() -> None:
        try:
            async with asyncio.timeout(30):
                await scenario(*coordinators)
        finally:
            for each in coordinators:
                await each.close()

    asyncio.run(work())


ADDRESS = ZookeeperAddress("nowhere:2181", "/memq")
PATH = layout.broker_path("b1")
Step = Callable[[], Awaitable[None]]


def broker(session: str = "s1", *, draining: bool = False) -> BrokerEntry:
    return BrokerEntry(id="b1", session=session, address="here:1", draining=draining)


class FakeSession:
    """A session with a ZooKeeper in memory. `before` and `after` run next to the next changes, `finds` are answers."""

    def __init__(self, _: object, __: object, ___: object, connected: Callable[[bool], None]) -> None:
        self.nodes: dict[str, Node] = {}
        self.number = 1
        self.up = True
        self.before: deque[Step] = deque()
        self.after: deque[Step] = deque()
        self.finds: deque[Node | MemqError | None] = deque()
        self._connected = connected

    def lose(self) -> None:
        """End the session, and begin another one."""
        self.nodes = {path: node for path, node in self.nodes.items() if not node.session}
        self.number += 1
        self._connected(True)

    async def start(self) -> None:
        """Nothing to connect."""

    async def close(self) -> None:
        """Nothing to end."""

    async def catch_up(self, path: str) -> None:
        """Nothing lags."""

    async def create_missing(self, paths: Sequence[str]) -> None:
        for path in paths:
            self.nodes[path] = Node(b"", 0, 0)

    async def find(self, path: str, watch: Callable[[], None] | None = None) -> Node | None:
        if path == PATH and self.finds:
            found = self.finds.popleft()
            if isinstance(found, MemqError):
                raise found
            return found
        return self.nodes.get(path)

    async def children(self, path: str, watch: Callable[[], None] | None = None) -> list[str]:
        return sorted(name.rpartition("/")[2] for name in self.nodes if name.rpartition("/")[0] == path)

    async def change(self, *operations: Operation) -> None:
        if self.before:
            await self.before.popleft()()
        nodes = dict(self.nodes)
        for operation in operations:
            self._apply(nodes, operation)
        self.nodes = nodes
        if self.after:
            await self.after.popleft()()

    def _apply(self, nodes: dict[str, Node], operation: Operation) -> None:
        found = nodes.get(operation.path)
        if isinstance(operation, CreateNode):
            if found is not None:
                raise AlreadyExistsError(operation.path)
            nodes[operation.path] = Node(operation.data, 0, self.number if operation.ephemeral else 0)
            return
        assert not isinstance(operation, CheckVersion)
        if found is None:
            raise NotFoundError(operation.path)
        if operation.version not in (-1, found.version):
            raise VersionConflictError(operation.path)
        if isinstance(operation, SetData):
            nodes[operation.path] = Node(operation.data, found.version + 1, found.session)
        elif isinstance(operation, DeleteNode):
            del nodes[operation.path]


def with_fake_session(
    monkeypatch: pytest.MonkeyPatch, work: Callable[[ZookeeperCoordinator, FakeSession], Awaitable[None]]
) -> None:
    made: list[FakeSession] = []

    def session(*parts: Any) -> FakeSession:
        made.append(FakeSession(*parts))
        return made[-1]

    monkeypatch.setattr(coordinator_module, "ZookeeperSession", session)

    async def run() -> None:
        coordinator = ZookeeperCoordinator(ADDRESS, ZookeeperSettings(), skipping_runtime(), "test")
        try:
            await work(coordinator, made[0])
        finally:
            await coordinator.close()

    run_skipping(run())


async def entered(coordinator: ZookeeperCoordinator) -> list[BrokerEntry]:
    """Return who is in the cluster, when all that is due in the next minute was done."""
    await skip(60)
    return list(await coordinator.brokers())


class NotedRandom(random.Random):
    """Notes the longest pause that each draw allows, and returns it."""

    def __init__(self) -> None:
        super().__init__(1)
        self.bounds: list[float] = []

    def uniform(self, a: float, b: float) -> float:
        self.bounds.append(b)
        return b


class InlinePool:
    """Runs what it gets at once, in place of a pool of threads: virtual time waits for no thread."""

    def __init__(self, *_: object) -> None:
        """It has no threads."""

    async def run(self, call: Callable[..., object], *parts: object) -> object:
        return call(*parts)

    async def close(self) -> None:
        """It has no threads."""


def with_coordinator(
    work: Callable[[ZookeeperCoordinator], Awaitable[None]], chance: random.Random | None = None
) -> None:
    """Run `work` with a coordinator on virtual time."""

    async def run() -> None:
        runtime = Runtime(clock=LoopClock(), random=chance or random.Random(1))
        one = ZookeeperCoordinator(ADDRESS, ZookeeperSettings(), runtime, "test")
        try:
            await work(one)
        finally:
            await one.close()

    run_skipping(run())
