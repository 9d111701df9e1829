"""The objects of held blocks that no state names: the sweep may delete them (H5).

Theory. An owner stores an object first, and names it by a decision within half the safety age; if that was too late, it
stores the blocks again (`memq.holds.keeper`). The state names an object until all its blocks are dropped, or in the
logs of their targets. So an object that is older than the safety age, and that no state names, is garbage. The pass
lists the objects first, and reads the state logs last. If one log can't be read, it deletes nothing.

The same holds for the objects of queue items, from their enqueue until all items of a block are over.

A state names the objects of holds that are due late by its runs (H6), and those of queue items that are behind others.
All runs are read, block by block. A run names an object also after one of its holds was dropped, until the run is
merged, or was brought.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Container, Iterable

from memq.broker.service_partitions.machines import ServiceMachines
from memq.errors import CorruptDataError, LogLostError, NotFoundError
from memq.format.key import is_manifest_key
from memq.format.state_log.held_run import HELD_ROWS
from memq.format.state_log.queue_run import QUEUE_ROWS
from memq.format.state_log.run import BEFORE_ALL
from memq.holds.machine import HoldMachine
from memq.notification import PointerReader
from memq.queues.machine import QueueMachine
from memq.runtime.tasks import in_slices
from memq.state_log.log_reading import read_state_log
from memq.state_log.run_store import RunReader
from memq.state_log.snapshot_store import SnapshotStore
from memq.storage_handlers import StorageHandler
from memq.topic import ReadPartition, Topic, is_state_topic, read_partitions

UNHELD = "no state log names it"


class UnnamedHeld:
    """Finds the objects that state logs name, in one store and one queue."""

    def __init__(self, store: StorageHandler, queue: PointerReader) -> None:
        self._snapshots = SnapshotStore(store)
        self._store = store
        self._queue = queue

    async def named(self, topics: Iterable[Topic], keys: Container[str]) -> set[str]:
        """Return those of `keys` that the state logs name.

        Raises: LogLostError when there is no state log, or one is lost; CorruptDataError, UnsupportedFormatError for an
        entry; as store and queue.
        """
        named: set[str] = set()
        async for state in self._states(topics):
            named.update(key for key in (*state.holds.objects, *state.queues.objects) if key in keys)
            await self._add_late(state.holds, keys, named)
            await self._add_spilled(state.queues, keys, named)
        return named

    async def manifests(self, topics: Iterable[Topic]) -> set[str]:
        """Return the manifests that the state logs name: of parts of transactions that are not done.

        Raises: as `named`.
        """
        found: set[str] = set()
        async for state in self._states(topics):
            found.update(filter(is_manifest_key, state.holds.objects))
        return found

    async def _states(self, topics: Iterable[Topic]) -> AsyncIterator[ServiceMachines]:
        logs = [log for topic in topics if is_state_topic(topic.name) for log in read_partitions(topic)]
        if not logs:
            raise LogLostError("the coordinator knows no state log")
        for log in logs:
            yield await self._state_of(log)

    async def _add_late(self, state: HoldMachine, keys: Container[str], named: set[str]) -> None:
        """Add the keys that runs name."""
        reader = RunReader(self._store, HELD_ROWS)
        for each in state.spilled.runs.values():
            try:
                async for holds in reader.blocks(each.run, each.at):
                    named.update(hold.key for hold in holds if hold.key in keys)
            except NotFoundError as error:
                raise LogLostError(f"a state log names the run '{each.run.key}': {error}") from error

    async def _add_spilled(self, state: QueueMachine, keys: Container[str], named: set[str]) -> None:
        """Add the keys of the blocks of queue items that are in runs."""
        reader = RunReader(self._store, QUEUE_ROWS)
        for each in state.spilled.runs.values():
            left = len(each.ids)
            try:
                async for blocks in reader.blocks(each.run, BEFORE_ALL):
                    live = [block for block in blocks if block.block.id.producer in each.ids]
                    named.update(block.key for block in live if block.key in keys)
                    left -= len(live)
            except NotFoundError as error:
                raise LogLostError(f"a state log names the run '{each.run.key}': {error}") from error
            if left:
                raise CorruptDataError(f"run '{each.run.key}' lacks {left} blocks of the state that names it")

    async def _state_of(self, log: ReadPartition) -> ServiceMachines:
        machines = ServiceMachines()
        name = f"state log {log.partition} of topic '{log.topic}'"
        try:
            reading = await read_state_log(self._queue, log)
            if reading.empty:  # a log that was never opened has no entry either, but then it holds nothing
                raise LogLostError(f"the queue has no entry of {name}")
            last = reading.scan.snapshot
            saved = await self._snapshots.get(last) if last is not None else None
            await in_slices(reading.scan.begin_fold(machines.by_name, saved))
        except NotFoundError as error:
            raise LogLostError(f"{name}: {error}") from error
        except CorruptDataError as error:
            raise CorruptDataError(f"{name}: {error}") from error
        return machines
