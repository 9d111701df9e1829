"""Commits consumed positions: one request for all partitions, one at a time, each value once."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable
from contextlib import suppress

from memq.client.consumer.assigned import Assigned
from memq.client.consumer.fetch.fetch_scheduler import FetchScheduler
from memq.client.consumer.fetch.ready_batches import ReadyBatches
from memq.client.consumer.group.session import GroupSession
from memq.errors import FencedError, RetryableError
from memq.runtime.clock import backoff_s
from memq.runtime.logs import EventLog
from memq.runtime.network import Runtime
from memq.topic import Committed, ReadPartition

_RETRY_S_BASE = 0.05
_RETRY_S_MAX = 1.0


class Committer:
    """Commits the prefixes of the partitions that are read."""

    def __init__(
        self, reading: FetchScheduler, group: GroupSession, handouts: ReadyBatches, runtime: Runtime, events: EventLog
    ) -> None:
        self.commits = 0
        self._runtime = runtime
        self._events = events
        self._reading = reading
        self._group = group
        self._handouts = handouts
        self._busy = asyncio.Lock()

    async def commit_surely(self) -> None:
        """Commit all partitions however long the queue is away, while this member is in its group.

        Raises: GenerationFencedError when a partition is another member's by now, or may be.
        """
        for failures in itertools.count(1):
            try:
                await self.commit()
            except RetryableError as error:
                self._events.warning("consumer.commit-retry", f"{type(error).__name__}: {error.args[0]}; trying again")
            else:
                return
            await asyncio.sleep(backoff_s(self._runtime.random, failures, base_s=_RETRY_S_BASE, most_s=_RETRY_S_MAX))

    async def commit(self, partitions: Iterable[ReadPartition] | None = None) -> None:
        """Store what is done in these partitions, or in all.

        Raises: GenerationFencedError when a partition is another member's by now; RetryableError.
        """
        async with self._busy:
            self._handouts.settle()
            due: dict[ReadPartition, tuple[Assigned, Committed]] = {}
            for partition in self._reading.assigned if partitions is None else partitions:
                assigned = self._reading.assigned.get(partition)
                committed = assigned.ledger.due if assigned is not None else None
                if assigned is not None and committed is not None:
                    due[partition] = (assigned, committed)
            if not due:
                return
            observers = [assigned.observer for assigned, _ in due.values() if assigned.observer is not None]
            for observer in observers:
                observer.begin_storing()
            try:
                await self._group.commit({partition: committed for partition, (_, committed) in due.items()})
                self.commits += 1
                for partition, (assigned, committed) in due.items():
                    self._reading.stored[partition] = committed
                    assigned.ledger.stored(committed)
                    if assigned.observer is not None:
                        assigned.observer.store(committed, self._runtime.clock.wall_ms())
            finally:
                for observer in observers:
                    observer.end_storing()

    async def commit_quietly(self, partitions: Iterable[ReadPartition] | None = None) -> None:
        """Commit what can be committed: what fails now is tried again later, or is another member's."""
        with suppress(RetryableError, FencedError):
            await self.commit(partitions)

    async def commit_at_close(self, timeout_s: float) -> None:
        """Commit for the last time, within `timeout_s`."""
        with suppress(TimeoutError, FencedError):
            async with asyncio.timeout(timeout_s):
                await self.commit_surely()

    async def run(self, interval_ms: int) -> None:
        """Commit every `interval_ms` until cancelled."""
        while True:
            await asyncio.sleep(interval_ms / 1000)
            await self.commit_quietly()
