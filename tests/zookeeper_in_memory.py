"""ZooKeeper in memory behind the part of kazoo's client that memq uses: sessions, versions, watches, transactions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from kazoo.exceptions import BadVersionError, NodeExistsError, NoNodeError, NotEmptyError, RolledBackError
from kazoo.protocol.states import KazooState, ZnodeStat

from memq.governor.zookeeper.coordinator import ZookeeperCoordinator
from memq.governor.zookeeper.settings import ZookeeperAddress, ZookeeperSettings
from memq.runtime.runtime import Runtime

Watch = Callable[[object], None]


class Result:
    """An answer that has arrived."""

    def __init__(self, value: object = None, exception: Exception | None = None) -> None:
        self.value = value
        self.exception = exception

    def rawlink(self, callback: Callable[[Result], None]) -> None:
        callback(self)


class Silence(Result):
    """An answer that never arrives."""

    def rawlink(self, callback: Callable[[Result], None]) -> None:
        """The callback is never called."""


MODIFIED_MS = 1_760_000_000_000  # of all nodes


class MemoryZookeeper:
    """Nodes by path as data, version and the session that owns them; watches fire once.

    While it is `silent`, it answers nothing. While it is `deaf`, it loses the events of changes. `refusal` is its
    answer to reads. `before_commit` runs once, before the next transaction, and `before_get` of a path before its next
    reading.
    """

    def __init__(self) -> None:
        self.nodes: dict[str, tuple[bytes, int, int]] = {"/": (b"", 0, 0)}
        self.sessions = 0
        self.clients: list[MemoryKazoo] = []
        self.requests: list[tuple[str, str]] = []
        self.silent = False
        self.deaf = False
        self.refusal: Exception | None = None
        self.before_commit: Callable[[], object] | None = None
        self.before_get: dict[str, Callable[[], object]] = {}
        self._watches: dict[tuple[str, str], list[Watch]] = {}

    def client(self, *_: object) -> MemoryKazoo:
        """Return a new client, as `make_client` does."""
        self.clients.append(MemoryKazoo(self))
        return self.clients[-1]

    def coordinator(self, cluster: str = "test", **settings: Any) -> ZookeeperCoordinator:
        """Return a coordinator; `make_client` must be replaced by `client`."""
        address = ZookeeperAddress("nowhere:2181", "/memq")
        return ZookeeperCoordinator(address, ZookeeperSettings(**settings), Runtime(), cluster)

    def watch(self, kind: str, path: str, watch: Watch | None) -> None:
        if watch is not None:
            self._watches.setdefault((kind, path), []).append(watch)

    def apply(self, operations: list[tuple[str, str, bytes, int, int]]) -> list[object]:
        """Do all operations or none; return a result for each."""
        nodes = dict(self.nodes)
        for at, (kind, path, data, version, owner) in enumerate(operations):
            error = self._do(nodes, kind, path, data, version, owner)
            if error is not None:
                return [error if each == at else RolledBackError() for each in range(len(operations))]
        before, self.nodes = self.nodes, nodes
        for path in before.keys() | nodes.keys():
            if before.get(path) != nodes.get(path):
                self._fire("data", path)
            if (path in before) != (path in nodes):
                self._fire("children", path.rpartition("/")[0])
        return [True] * len(operations)

    def end(self, session: int) -> None:
        """End a session, with its nodes."""
        owned = [path for path, (_, _, owner) in self.nodes.items() if owner == session]
        self.apply([("delete", path, b"", -1, 0) for path in owned])

    def names(self, path: str) -> list[str]:
        return [each.rpartition("/")[2] for each in self.nodes if each.rpartition("/")[0] == path and each != "/"]

    def _do(self, nodes: dict[str, Any], kind: str, path: str, data: bytes, version: int, owner: int) -> object:
        found = nodes.get(path)
        if kind == "create":
            if found is not None:
                return NodeExistsError()
            if path.rpartition("/")[0] not in nodes and path.count("/") > 1:
                return NoNodeError()
            nodes[path] = (data, 0, owner)
            return None
        if found is None:
            return NoNodeError()
        if version not in (-1, found[1]):
            return BadVersionError()
        if kind == "set":
            nodes[path] = (data, found[1] + 1, found[2])
        elif kind == "delete":
            if any(each.startswith(f"{path}/") for each in nodes):
                return NotEmptyError()
            del nodes[path]
        return None

    def _fire(self, kind: str, path: str) -> None:
        for watch in self._watches.pop((kind, path), ()):
            if not self.deaf:
                watch(None)


class MemoryTransaction:
    """See `kazoo.client.TransactionRequest`."""

    def __init__(self, client: MemoryKazoo) -> None:
        self._client = client
        self._operations: list[tuple[str, str, bytes, int, int]] = []

    def create(self, path: str, data: bytes, *, ephemeral: bool) -> None:
        self._operations.append(("create", path, data, -1, self._client.number if ephemeral else 0))

    def set_data(self, path: str, data: bytes, version: int) -> None:
        self._operations.append(("set", path, data, version, 0))

    def delete(self, path: str, version: int) -> None:
        self._operations.append(("delete", path, b"", version, 0))

    def check(self, path: str, version: int) -> None:
        self._operations.append(("check", path, b"", version, 0))

    def commit_async(self) -> Result:
        server = self._client.server
        server.requests.append(("commit", " ".join(kind for kind, *_ in self._operations)))
        hook, server.before_commit = server.before_commit, None
        if hook is not None:
            hook()
        return Silence() if server.silent else Result(server.apply(self._operations))


class MemoryKazoo:
    """See `kazoo.client.KazooClient`; it connects at once, unless the server is silent."""

    def __init__(self, server: MemoryZookeeper) -> None:
        self.server = server
        self.number = 0
        self.connected = False
        self.client_state = ""
        self.ended = 0
        self._listeners: list[Callable[[str], None]] = []

    @property
    def client_id(self) -> tuple[int, bytes]:
        return self.number, b"password"

    def add_listener(self, listener: Callable[[str], None]) -> None:
        self._listeners.append(listener)

    def start_async(self) -> None:
        if not self.server.silent:
            self.connect()

    def connect(self) -> None:
        """Connect with a new session."""
        self.server.sessions += 1
        self.number = self.server.sessions
        self.take(KazooState.CONNECTED)

    def take(self, state: str) -> None:
        """Change the state of the connection."""
        self.connected = state == KazooState.CONNECTED
        for listener in self._listeners:
            listener(state)

    def expire(self) -> None:
        """Lose the session, and connect with a new one."""
        self.server.end(self.number)
        self.take(KazooState.LOST)
        self.connect()

    def stop(self) -> None:
        self.ended += 1
        self.connected = False
        self.server.end(self.number)

    def close(self) -> None:
        self.ended += 1

    def transaction(self) -> MemoryTransaction:
        return MemoryTransaction(self)

    def get_async(self, path: str, watch: Watch | None = None) -> Result:
        return self._asked("get", path, watch)

    def exists_async(self, path: str, watch: Watch | None = None) -> Result:
        return self._asked("exists", path, watch)

    def get_children_async(self, path: str, watch: Watch | None = None) -> Result:
        return self._asked("children", path, watch)

    def sync_async(self, path: str) -> Result:
        return self._asked("sync", path, None)

    def ensure_path_async(self, path: str) -> Result:
        return self._asked("ensure", path, None)

    def _asked(self, kind: str, path: str, watch: Watch | None) -> Result:
        self.server.requests.append((kind, path))
        hook = self.server.before_get.pop(path, None) if kind == "get" else None
        if hook is not None:
            hook()
        if self.server.silent:
            return Silence()
        if self.server.refusal is not None:
            return Result(exception=self.server.refusal)
        found = self.server.nodes.get(path)
        if kind == "sync":
            return Result(path)
        if kind == "ensure":
            if found is None:
                self.server.apply([("create", path, b"", -1, 0)])
            return Result(True)
        if found is None and kind != "exists":
            return Result(exception=NoNodeError())
        self.server.watch("children" if kind == "children" else "data", path, watch)
        if kind == "children":
            return Result(self.server.names(path))
        stat = (
            ZnodeStat(0, 0, 0, MODIFIED_MS, found[1], 0, 0, found[2], len(found[0]), 0, 0)
            if found is not None
            else None
        )
        return Result(stat if kind == "exists" or found is None else (found[0], stat))


async def settled(turns: int = 20) -> None:
    """Return after so many turns of the loop, in which all answers of a server in memory have arrived."""
    for _ in range(turns):
        await asyncio.sleep(0)
