"""ZooKeeper cache, invalidated by watches: a change costs one read instead of all.

A watch fires once, after a change or when the connection is lost; then what it watched is forgotten, and the next
reader fetches it with a new watch. kazoo's answers and watches come by different threads, so that a watch may fire
before the answer of its own read is here: what that answer says is returned, and not kept. An event that is lost
would leave an old answer here as long as the session lasts. So a part is read again each minute, all in half an hour.

`DecodedNodes` caches decoded values by version, and `MirroredValue` what was put together of them, once for each change
of any: at rest a broker reads all of it every 10 s, twice when it governs, and 50,000 assignments took 60 ms each time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import islice
from typing import Generic, TypeVar

from memq.governor.zookeeper.session import Node, ZookeeperSession

T = TypeVar("T")
REFRESH_S = 60.0  # between two refreshes
REFRESHED_MIN, REFRESHED_SHARE = 64, 30  # nodes that are read again at once: so many, or all divided by this
Value = TypeVar("Value")


class DecodedNodes(Generic[Value]):
    """Values of one kind, each with the node that it was decoded from."""

    def __init__(self, decode: Callable[[str, Node], Value]) -> None:
        self._decode = decode
        self._kept: dict[str, tuple[Node, Value]] = {}

    def values(self, paths: Sequence[str], nodes: Sequence[Node | None]) -> list[Value]:
        """Return what the nodes hold that are there, in this order. Only these are kept.

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
    """One value that is read from a mirror, and read again only when that has changed.

    Nobody may change it.
    """

    def __init__(self, mirror: Mirror) -> None:
        self._mirror = mirror
        self._read: tuple[int, Value] | None = None

    async def value(self, read: Callable[[], Awaitable[Value]]) -> Value:
        """Return the value as it is now. Raises: what `read` does."""
        before = self._mirror.stamp()
        if before is not None and self._read is not None and self._read[0] == before:
            return self._read[1]
        self._read = None
        found = await read()
        if before is not None and self._mirror.stamp() == before:  # nothing of it was new: it is of one moment
            self._read = before, found
        return found


class _Watch:
    """One watch, from the read that set it to its firing."""

    def __init__(self) -> None:
        self.fired = False


class Mirror:
    """`changed` is called after each change of what was read here."""

    def __init__(self, session: ZookeeperSession, changed: Callable[[], None]) -> None:
        self._session = session
        self._changed = changed
        self._nodes: dict[str, Node | None] = {}
        self._children: dict[str, list[str]] = {}
        self._changes = 0

    def stamp(self) -> int | None:
        """Return a mark that changes with every read or loss of data; None while nothing is cached."""
        return self._changes if self._session.up else None

    async def node(self, path: str) -> Node | None:
        """Return a node, None when it is not there. Raises: UnreachableError, DeniedError."""
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
        """Return a node as it was read last, without asking; None when it has to be read."""
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
        """Read a node again with those below and next to it: it changed from here, or may have."""
        self._changes += 1
        self._nodes.pop(path, None)
        self._children.pop(path, None)
        self._children.pop(path.rpartition("/")[0], None)

    def clear(self) -> None:
        """Forget everything: the watches went with the session."""
        self._changes += 1
        self._nodes.clear()
        self._children.clear()

    async def refresh(self) -> None:
        """Read again what was read longest ago, without a new watch: the event of a change may have been lost.

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
                self._nodes[path] = self._nodes.pop(path)  # the last one in order
            else:
                self._fire(path, _Watch(), self._nodes)

    def _fire(self, path: str, watch: _Watch, kept: dict[str, Node | None] | dict[str, list[str]]) -> None:
        watch.fired = True
        self._changes += 1
        kept.pop(path, None)
        self._changed()


async def gathered(works: Iterable[Awaitable[T]]) -> list[T]:
    """Wait for all tasks, and only then raise the first error: none continues unobserved."""
    ends = await asyncio.gather(*works, return_exceptions=True)
    for end in ends:
        if isinstance(end, BaseException):
            raise end
    return [end for end in ends if not isinstance(end, BaseException)]
