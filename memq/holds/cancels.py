"""Stores cancels as objects, so that a restore from the bucket drops cancelled records (S9).

A state log has each cancel, but its last snapshot may be older. So the ids of dropped holds are stored in an object
below `<cluster>/held/` before the answer `CANCELLED`. No state names such an object, so the sweep deletes it at the
safety age, long after the next snapshot.

The object is stored after the decision counts. If it came first, a restore could drop a hold that was released.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from memq.errors import MemqError, NotReadyError
from memq.format.held_object import HoldId, cancelled_object
from memq.holds.storing import StoringParts, put_held_object
from memq.runtime.tasks import TaskOwner


@dataclass(slots=True)
class _Batch:
    """Holds that share an object, and the result of its put: an error, or None."""

    holds: dict[HoldId, None] = field(default_factory=dict)
    ended: asyncio.Future[MemqError | None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class CancelledHolds:
    """Stores the cancelled holds of one service partition.

    Cancels that come while an object is stored share the next one.
    """

    def __init__(self, parts: StoringParts, tasks: TaskOwner) -> None:
        self._parts = parts
        self._tasks = tasks
        self._waiting: _Batch | None = None
        self._one = asyncio.Lock()

    async def store(self, holds: Iterable[HoldId]) -> None:
        """Store cancelled holds; return when the store has them. Raises: NotReadyError."""
        if self._tasks.stopped:
            raise NotReadyError("the service partition of these held records is closed")
        batch = self._waiting
        if batch is None:
            batch = self._waiting = _Batch()
            self._tasks.start(self._store(batch), "store cancelled holds")
        batch.holds.update(dict.fromkeys(holds))
        error = await asyncio.shield(batch.ended)
        if error is not None:
            raise error

    async def _store(self, batch: _Batch) -> None:
        error: MemqError | None = NotReadyError("the service partition of these held records was closed")
        try:
            async with self._one:
                self._waiting = None
                await self._put(batch.holds)
                error = None
        except NotReadyError as found:
            error = found
        finally:
            batch.ended.set_result(error)

    async def _put(self, holds: Iterable[HoldId]) -> None:
        await put_held_object(self._parts, [cancelled_object(holds, self._parts.shard)], "cancelled records")
