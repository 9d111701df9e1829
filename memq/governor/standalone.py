"""The coordinator of one broker without a cluster: topics and assignments in a SQLite file.

Only one process opens the file (see `DataFolder`), so the whole state is in memory; a change is committed with an
fsync before it counts. The membership is that one broker, in memory.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from memq.errors import MemqError, UnreachableError
from memq.governor.local import LocalCoordinator
from memq.governor.registry import Registry, RegistryChange
from memq.governor.topics_file import load_registry, store_changes, topics_file
from memq.governor.watchers import Watchers
from memq.runtime.clock import Clock
from memq.runtime.logs import EventLog
from memq.runtime.threads import ThreadPool

TOGETHER_MAX = 256  # changes that are stored at once


@dataclass(frozen=True, slots=True)
class _Request:
    """A change that waits for its turn: what decides on it, and who hears of it."""

    decide: Callable[[Registry], RegistryChange]
    done: asyncio.Future[RegistryChange]


class StandaloneCoordinator(LocalCoordinator):
    """Topics and assignments in the file at `path`, which it makes when it is not there.

    Raises at construction: CorruptDataError, UnsupportedFormatError, DeniedError, UnreachableError.
    """

    def __init__(self, path: Path, cluster: str, clock: Clock) -> None:
        self._file = topics_file(path)
        self._connection = self._file.connect()
        try:
            registry = load_registry(self._connection, self._file)
        except BaseException:
            self._connection.close()
            raise
        super().__init__(cluster, registry, Watchers(EventLog(clock)))
        self._in_doubt = False  # a commit failed or was left alone: what is in the file decides
        self._turn = asyncio.Lock()
        self._waiting: deque[_Request] = deque()
        self._pool = ThreadPool("coordinator", 1)

    async def close(self) -> None:
        """See `Coordinator.close`; closing twice is fine."""
        await self.watchers.close()
        await self._pool.close()
        self._connection.close()

    async def _change(self, decide: Callable[[Registry], RegistryChange]) -> RegistryChange:
        """Decide on the current state, store the change, and only then apply it.

        What waits may be stored together.
        """
        request = _Request(decide, asyncio.get_running_loop().create_future())
        request.done.add_done_callback(_hear)
        self._waiting.append(request)
        try:
            async with self._turn:
                while not request.done.done():
                    await self._store_waiting()
            return await request.done
        finally:
            request.done.cancel()  # who waits no more wants no change

    async def _store_waiting(self) -> None:
        """Store what waits and goes together, with one fsync: thousands of partitions may open at once."""
        if self._in_doubt:
            await self._reload()
        together = self._next_together()
        if not together:
            return
        changes = [change for _, change in together]
        self._in_doubt = True
        try:
            await self._pool.run(store_changes, self._connection, self._file, changes)
        except MemqError as error:
            _refuse(together, error)
            return
        except BaseException as error:
            _refuse(together, UnreachableError(f"a change was left half-way: {error!r}", hint="try again"))
            raise
        for request, change in together:
            self._registry.apply(change)
            if not request.done.done():
                request.done.set_result(change)
        self._in_doubt = False
        self._changed()

    def _next_together(self) -> list[tuple[_Request, RegistryChange]]:
        """Decide waiting requests in order: many for different partitions, or one that changes a topic."""
        together: list[tuple[_Request, RegistryChange]] = []
        touched: dict[tuple[str, int], None] = {}
        while self._waiting and len(together) < TOGETHER_MAX:
            request = self._waiting[0]
            change = self._decided(request)
            if change is None:
                self._waiting.popleft()
                continue
            places = [(entry.topic_id, entry.partition) for entry in change.assignments]
            of_topic = bool(change.stored or change.removed or change.mark)
            if together and (of_topic or any(place in touched for place in places)):
                break
            together.append((self._waiting.popleft(), change))
            if of_topic:
                break
            touched.update(dict.fromkeys(places))
        return together

    def _decided(self, request: _Request) -> RegistryChange | None:
        """Return the change of a request; None when nobody waits for it, or it was refused."""
        try:
            return None if request.done.done() else request.decide(self._registry)
        except MemqError as error:
            request.done.set_exception(error)
            return None

    async def _reload(self) -> None:
        loaded = await self._pool.run(load_registry, self._connection, self._file)
        for broker in self._registry.brokers():
            loaded.enter(broker)
        self._registry = loaded  # the term begins again with it: this process is the only one that governs
        self._in_doubt = False
        self._changed()

    def _changed(self) -> None:
        self.watchers.changed()


def _refuse(requests: Sequence[tuple[_Request, RegistryChange]], error: MemqError) -> None:
    for request, _ in requests:
        if not request.done.done():
            request.done.set_exception(error)


def _hear(done: asyncio.Future[RegistryChange]) -> None:
    """Take the error of a request whose caller went away, before asyncio complains that nobody did."""
    if not done.cancelled():
        done.exception()
