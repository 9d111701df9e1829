"""Failures on demand: a store and a queue in memory that fail chosen calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from memq.client.producer.fields import check_kind
from memq.errors import InvalidRequestError, MemqError, QueueError, StoreError
from memq.notification import Entries, Membership, Publication
from memq.notification.memory import MemoryQueue
from memq.runtime.clock import Clock
from memq.storage_handlers import Buffer
from memq.storage_handlers.memory import MemoryHandler
from memq.topic import Committed, ReadPartition

CALLS = (
    "store.put",
    "store.get",
    "store.delete",
    "queue.publish",
    "queue.read",
    "queue.join",
    "queue.heartbeat",
    "queue.commit",
)
FAILURES_MAX = 10_000


class Faults:
    """Planned failures by call; each is used once."""

    def __init__(self) -> None:
        self._planned: dict[str, deque[MemqError]] = {call: deque() for call in CALLS}

    def plan(self, call: str, times: int, error: MemqError | None) -> None:
        """Let the next `times` calls fail. Raises: InvalidRequestError for a call that is not in CALLS.

        TypeError.
        """
        if error is not None and not isinstance(error, MemqError):
            raise TypeError(f"error must be a MemqError, as a failed call raises it, not {type(error).__name__}")
        check_kind("times", times, int)
        planned = self._planned.get(call)
        if planned is None:
            raise InvalidRequestError(f"call '{call}' can't be made to fail", hint=f"use one of {', '.join(CALLS)}")
        if not 0 <= times <= FAILURES_MAX:
            raise InvalidRequestError(f"times = {times} is outside 0 to {FAILURES_MAX}")
        kind = StoreError if call.startswith("store.") else QueueError
        planned.extend(error or kind(f"{call} fails as planned") for _ in range(times))

    def left(self, call: str) -> int:
        """Return how many planned failures were not met yet."""
        return len(self._planned[call])

    def meet(self, call: str) -> None:
        """Raise the next planned failure of a call, if there is one."""
        if self._planned[call]:
            raise self._planned[call].popleft()


class FaultyStore(MemoryHandler):
    """The memory store; a call that fails has done nothing."""

    def __init__(self, clock: Clock, faults: Faults) -> None:
        super().__init__(clock)
        self._faults = faults

    async def put(self, key: str, buffers: Sequence[Buffer], checksum: int) -> None:
        """See `ObjectWriter.put`."""
        self._faults.meet("store.put")
        await super().put(key, buffers, checksum)

    async def get(self, key: str, *, checked: bool = True) -> bytes:
        """See `ObjectReader.get`."""
        self._faults.meet("store.get")
        return await super().get(key, checked=checked)

    async def get_range(self, key: str, offset: int, length: int) -> bytes:
        """See `ObjectReader.get_range`."""
        self._faults.meet("store.get")
        return await super().get_range(key, offset, length)

    async def delete(self, key: str) -> None:
        """See `ObjectWriter.delete`."""
        self._faults.meet("store.delete")
        await super().delete(key)


class FaultyQueue(MemoryQueue):
    """The memory queue; a call that fails has done nothing."""

    def __init__(self, clock: Clock, faults: Faults) -> None:
        super().__init__(clock)
        self._faults = faults

    async def publish(self, publication: Publication) -> int:
        """See `PointerWriter.publish`."""
        self._faults.meet("queue.publish")
        return await super().publish(publication)

    async def read(self, partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
        """See `PointerReader.read`."""
        self._faults.meet("queue.read")
        return await super().read(partition, offset, bytes_max)

    async def join(
        self, group: str, member: str, partitions: Sequence[ReadPartition], session_timeout_ms: int
    ) -> Membership:
        """See `Groups.join`."""
        self._faults.meet("queue.join")
        return await super().join(group, member, partitions, session_timeout_ms)

    async def heartbeat(
        self, group: str, member: str, generation: int, released: Sequence[ReadPartition] = ()
    ) -> Membership:
        """See `Groups.heartbeat`."""
        self._faults.meet("queue.heartbeat")
        return await super().heartbeat(group, member, generation, released)

    async def commit(self, group: str, member: str, generation: int, positions: dict[ReadPartition, Committed]) -> None:
        """See `Groups.commit`."""
        self._faults.meet("queue.commit")
        await super().commit(group, member, generation, positions)
