"""The objects of held blocks that no state names: the sweep may delete them (H5).

Theory. An owner stores an object first, and names it by a decision within half the safety age; if that was too late, it
stores the blocks again (`memq.holds.keeper`). The state names an object until all its blocks are dropped, or in the
logs of their targets. So an object that is older than the safety age, and that no state names, is garbage. The pass
lists the objects first, and reads the state logs last. If one log can't be read, it deletes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from memq.errors import CorruptDataError, LogLostError, NotFoundError
from memq.holds.machine import HoldMachine
from memq.notification import PointerReader
from memq.state_log.log_reading import read_state_log
from memq.state_log.snapshot_store import SnapshotStore
from memq.storage_handlers import StorageHandler
from memq.topic import ReadPartition, Topic, is_state_topic, read_partitions
from memq.transactions.machine import ServiceMachines

UNHELD = "no state log names it"


class UnnamedHeld:
    """Finds the objects that state logs name, in one store and one queue."""

    def __init__(self, store: StorageHandler, queue: PointerReader) -> None:
        self._snapshots = SnapshotStore(store)
        self._queue = queue

    async def named(self, topics: Iterable[Topic]) -> set[str]:
        """Return the keys that the state logs name.

        Raises: LogLostError when there is no state log, or one is lost; CorruptDataError, UnsupportedFormatError for an
        entry; as store and queue.
        """
        logs = [log for topic in topics if is_state_topic(topic.name) for log in read_partitions(topic)]
        if not logs:
            raise LogLostError("the coordinator knows no state log")
        named: set[str] = set()
        for log in logs:
            named |= (await self._state_of(log)).objects.keys()
        return named

    async def _state_of(self, log: ReadPartition) -> HoldMachine:
        machines = ServiceMachines()
        name = f"state log {log.partition} of topic '{log.topic}'"
        try:
            reading = await read_state_log(self._queue, log)
            if reading.empty:  # a log that was never opened has no entry either, but then it holds nothing
                raise LogLostError(f"the queue has no entry of {name}")
            last = reading.scan.snapshot
            reading.scan.fold(machines.by_name, await self._snapshots.get(last) if last is not None else None)
        except NotFoundError as error:
            raise LogLostError(f"{name}: {error}") from error
        except CorruptDataError as error:
            raise CorruptDataError(f"{name}: {error}") from error
        return machines.holds
