"""ZooKeeper cache, invalidated by watches: a change costs one read instead of all.

A watch fires once, after a change or when the connection is lost. Then the mirror forgets the watched node, and the
next reader fetches it with a new watch. Since kazoo delivers answers and watches on different threads, a watch may
fire before its own read is answered. Such an answer is returned, but not cached. If an event is lost, a stale
answer would remain for as long as the session. So the mirror reads a part again each minute, all in half an hour.

`DecodedNodes` caches the decoded value of each node, and `MirroredValue` a value made of many of them, until any node
changes. The reason: an idle broker reads all assignments every 10 s, and the governor twice. Without this cache, 50,000
assignments took 60 ms each time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import islice
from typing import Generic, TypeVar

from memq.governor.zookeeper.session import Node, ZookeeperSession

T = TypeVar("T")
REFRESH_S = 60.0  # between two refreshes
REFRESHED_MIN, REFRESHED_SHARE = 64, 30  # a refresh reads this many nodes, or this fraction (1/30), if that is more
Value = TypeVar("Value")


class DecodedNodes(Generic[Value]):
    """Values of one kind, each with the node that it was decoded from."""

    def __init__(self, decode: Callable[[str, Node], Value]) -> None:
        self._decode = decode
        self._kept: dict[str, tuple[Node, Value]] = {}

    def values(self, paths: Sequence[str], nodes: Sequence[Node | None]) -> list[Value]:
        """Return the values of the existing nodes, in this order. The cache keeps only these.

        Raises: CorruptDataError.
        """
        kept: dict[str, tuple[Node, Value]] = {}
        for path, node in zip(paths, nodes, strict=True):
            if node is None:
                continue
            known = self._kept.get(path)
            kept[path] = known if known is not None and known[0] is node else (node, self._decode(path, node))
        self._kept = kept
        return [value for _, value in kept.values()]


class MirroredValue(Generic[Value]):
    """One value that is read from a mirror, and read again only after a change of the mirror.

    Callers share the value and must not change it.
    """

    def __init__(self, mirror: Mirror) -> None:
        self._mirror = mirror
        self._read: tuple[int, Value] | None = None

    async def value(self, read: Callable[[], Awaitable[Value]]) -> Value:
        """Return the current value. Raises: the errors of `read`."""
        before = self._mirror.stamp()
        if before is not None and self._read is not None and self._read[0] == before:
            return self._read[1]
        self._read = None
        found = await read()
        if before is not None and self._mirror.stamp() == before:  # `read` used cached nodes only: one consistent state
            self._read = before, found
        return found


class _Watch:
    """One watch, from the read that set it to its firing."""

    def __init__(self) -> None:
        self.fired = False


class Mirror:
    """Cached nodes and children. `changed` is called when a watch fires or a refresh finds a change."""

    def __init__(self, session: ZookeeperSession, changed: Callable[[], None]) -> None:
        self._session = session
        self._changed = changed
        self._nodes: dict[str, Node | None] = {}
        self._children: dict[str, list[str]] = {}
        self._changes = 0

    def stamp(self) -> int | None:
        """Return a number that grows with every read or loss of data; None without a connection."""
        return self._changes if self._session.up else None

    async def node(self, path: str) -> Node | None:
        """Return a node, None when it does not exist. Raises: UnreachableError, DeniedError."""
        await self._session.start()
        if self._session.up and path in self._nodes:
            return self._nodes[path]
        watch = _Watch()
        found = await self._session.find(path, lambda: self._fire(path, watch, self._nodes))
        if not watch.fired:
            self._nodes[path] = found
            self._changes += 1
        return found

    def known(self, path: str) -> Node | None:
        """Return the cached node, without a request; None when it must be read, or does not exist."""
        return self._nodes.get(path) if self._session.up else None

    async def nodes(self, paths: Sequence[str]) -> list[Node | None]:
        """Return several nodes."""
        await self._session.start()
        found = {path: self._nodes[path] for path in paths if path in self._nodes} if self._session.up else {}
        lacking = [path for path in paths if path not in found] if len(found) < len(paths) else []
        found.update(zip(lacking, await gathered(map(self.node, lacking)), strict=True))
        return [found[path] for path in paths]

    async def children(self, path: str) -> list[str]:
        """Return the names below a node, sorted. Raises: as `node`; NotFoundError."""
        await self._session.start()
        if self._session.up and path in self._children:
            return self._children[path]
        watch = _Watch()
        found = await self._session.children(path, lambda: self._fire(path, watch, self._children))
        if not watch.fired:
            self._children[path] = found
            self._changes += 1
        return found

    def forget(self, path: str) -> None:
        """Forget a node and the lists of its children and siblings: this process has changed it, or may have."""
        self._changes += 1
        self._nodes.pop(path, None)
        self._children.pop(path, None)
        self._children.pop(path.rpartition("/")[0], None)

    def clear(self) -> None:
        """Forget everything: after a reconnection all watches are gone."""
        self._changes += 1
        self._nodes.clear()
        self._children.clear()

    async def refresh(self) -> None:
        """Read the oldest cached nodes again, without a new watch: the event of a change may have been lost.

        Raises: UnreachableError, DeniedError.
        """
        count = max(REFRESHED_MIN, len(self._nodes) // REFRESHED_SHARE)
        await gathered(map(self._refresh_node, list(islice(self._nodes, count))))
        for path in list(self._children):
            found = await self._session.children(path)
            if found != self._children.get(path, found):
                self._fire(path, _Watch(), self._children)

    async def _refresh_node(self, path: str) -> None:
        found = await self._session.find(path)
        if path in self._nodes:
            if found == self._nodes[path]:
                self._nodes[path] = self._nodes.pop(path)  # moved to the end of the order
            else:
                self._fire(path, _Watch(), self._nodes)

    def _fire(self, path: str, watch: _Watch, kept: dict[str, Node | None] | dict[str, list[str]]) -> None:
        watch.fired = True
        self._changes += 1
        kept.pop(path, None)
        self._changed()


async def gathered(works: Iterable[Awaitable[T]]) -> list[T]:
    """Wait for all works, and only then raise the first error: none continues without an awaiter."""
    ends = await asyncio.gather(*works, return_exceptions=True)
    for end in ends:
        if isinstance(end, BaseException):
            raise end
    return [end for end in ends if not isinstance(end, BaseException)]
