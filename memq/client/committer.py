"""Stores what a consumer has done: one request for all partitions, one at a time, never what was stored already."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress

from memq.client.group_session import GroupSession
from memq.client.handouts import Handouts
from memq.client.reading import Assigned, Reading
from memq.errors import FencedError, RetryableError
from memq.topic import Committed, ReadPartition


class Committer:
    """Commits the prefixes of the partitions that are read."""

    def __init__(self, reading: Reading, group: GroupSession, handouts: Handouts) -> None:
        self.commits = 0
        self._reading = reading
        self._group = group
        self._handouts = handouts
        self._busy = asyncio.Lock()

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
            await self._group.commit({partition: committed for partition, (_, committed) in due.items()})
            self.commits += 1
            for assigned, committed in due.values():
                assigned.ledger.stored(committed)

    async def commit_quietly(self, partitions: Iterable[ReadPartition] | None = None) -> None:
        """Commit what can be committed: what fails now is tried again later, or is another member's."""
        with suppress(RetryableError, FencedError):
            await self.commit(partitions)

    async def commit_at_close(self, timeout_s: float) -> None:
        """Commit for the last time, within `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.commit_quietly()

    async def run(self, interval_ms: int) -> None:
        """Commit every `interval_ms` until cancelled."""
        while True:
            await asyncio.sleep(interval_ms / 1000)
            await self.commit_quietly()
