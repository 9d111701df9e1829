"""What was read from ZooKeeper, kept as long as its watches hold: a change costs one read, not a read of everything.

A watch fires once, after a change or when the connection is lost; then what it watched is forgotten, and the next
reader fetches it with a new watch. kazoo's answers and watches come by different threads, so that a watch may fire
before the answer of its own read is here: what that answer says is returned, and not kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from memq.errors import NotFoundError
from memq.governor.zookeeper.session import Node, ZookeeperSession

T = TypeVar("T")


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
        """Return what stays the same as long as nothing is read anew or forgotten; None while nothing here holds."""
        return self._changes if self._session.up else None

    async def node(self, path: str) -> Node | None:
        """Return a node, None when it is not there. Raises: UnreachableError, DeniedError."""
        await self._session.start()
        if self._session.up and path in self._nodes:
            return self._nodes[path]
        watch = _Watch()
        found = await self._read(path, watch)
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
        """Read a node, and what lies below it and beside it, anew: it was changed from here, or may have been."""
        self._changes += 1
        self._nodes.pop(path, None)
        self._children.pop(path, None)
        self._children.pop(path.rpartition("/")[0], None)

    def clear(self) -> None:
        """Forget everything: the watches went with the session."""
        self._changes += 1
        self._nodes.clear()
        self._children.clear()

    async def _read(self, path: str, watch: _Watch) -> Node | None:
        """Read a node, or learn that it is not there; in both cases with a watch."""

        def fire() -> None:
            self._fire(path, watch, self._nodes)

        while True:
            try:
                return await self._session.read(path, fire)
            except NotFoundError:
                if not await self._session.exists(path, fire):
                    return None

    def _fire(self, path: str, watch: _Watch, kept: dict[str, Node | None] | dict[str, list[str]]) -> None:
        watch.fired = True
        self._changes += 1
        kept.pop(path, None)
        self._changed()


async def gathered(works: Iterable[Awaitable[T]]) -> list[T]:
    """Wait for all works, and raise the first error only then: none of them goes on unheard."""
    ends = await asyncio.gather(*works, return_exceptions=True)
    for end in ends:
        if isinstance(end, BaseException):
            raise end
    return [end for end in ends if not isinstance(end, BaseException)]
