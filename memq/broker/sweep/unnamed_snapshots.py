"""The snapshots and runs of state logs that no later owner needs: the sweep may delete them (S7, H6).

Theory. An owner stores a snapshot first and then publishes the entry that names it, within half the safety age. It
deletes the snapshot before. So a snapshot without an entry is left if its owner died between the two, or between a trim
and the deletion. Two witnesses must agree before such an object goes:

- The log. It names a later snapshot by an entry that counts. Epochs and offsets only grow in a log, so the later one
  has the higher epoch or the same, and the higher offset. No entry of the log names the object, not even a void one.
- The store. The later snapshot is there, whole. It has all decisions of the earlier one.

If the log names no later snapshot, the object stays: it may be the last state of a log that the queue has lost, which
`memq restore` needs. A snapshot of a lower epoch with a higher offset is of a log that was cut, or restored. It stays
until the log has a snapshot beyond its offset.

A run of held records or of queue items goes by the same rule. The log is one witness: its state does not name the run.
The store is the other one: no snapshot there names it, also none that no entry names, because `memq restore` may take
it. An owner names a run within half the safety age after its put. So one that is older than the safety age has no name
to come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from memq.broker.service_partitions.machines import ServiceMachines
from memq.broker.sweep.orphan_objects import Claim
from memq.errors import CorruptDataError, LogLostError, NotFoundError, UnsupportedFormatError
from memq.format.key import is_run_key, parse_state_key
from memq.holds.decisions import HOLDS_MACHINE
from memq.holds.machine import HoldMachine
from memq.notification import PointerReader
from memq.queues.decisions import QUEUES_MACHINE
from memq.queues.machine import QueueMachine
from memq.runtime.tasks import in_slices
from memq.state_log.log_reading import StateLogReading, read_state_log
from memq.state_log.snapshot_store import SnapshotStore
from memq.storage_handlers import ObjectEntry, StorageHandler
from memq.topic import ReadPartition

SUPERSEDED = "no entry names it, and a later snapshot of its state log is stored"
RUN_UNNAMED = "neither its state log nor a stored snapshot names it"


def partition_prefix(key: str, cluster: str) -> str:
    """Return the prefix of the snapshots of a log, by the key of one of their parts; "" for another key."""
    found = parse_state_key(key)
    known = key.startswith(f"{cluster}/") if is_run_key(key) else found is not None and found.cluster == cluster
    return key.rpartition("/")[0].rpartition("/")[0] + "/" if known else ""


def log_of(prefix: str, topic_id: str) -> ReadPartition:
    """Return the state log below whose prefix snapshots are."""
    _cluster, _state, topic, _id, partition, _ = prefix.split("/")
    return ReadPartition(topic, topic_id, int(partition))


def lost_state_log(log: ReadPartition) -> Claim:
    """Return the claim of a state log that the queue has lost."""
    text = f"topic '{log.topic}' partition {log.partition}: the queue has lost the state log of"
    return Claim(text, "memq restore makes it again from the last snapshot")


def unknown_state_topic(prefix: str) -> Claim:
    """Return the claim of a topic of state logs that the coordinator does not know."""
    text = f"'{prefix}': the coordinator does not know the topic of"
    return Claim(text, "restore a backup of the coordinator, or check its setting")


class UnnamedSnapshots:
    """Finds the snapshots that may go, in one store and one queue."""

    def __init__(self, store: StorageHandler, queue: PointerReader) -> None:
        self._snapshots = SnapshotStore(store)
        self._queue = queue

    async def superseded(self, log: ReadPartition, entries: Mapping[str, ObjectEntry]) -> list[str] | Claim:
        """Return those of `entries`, runs and parts of snapshots of `log`, that may go.

        If the queue has lost the log, return a claim.

        Raises: as store and queue; CorruptDataError, UnsupportedFormatError of an entry; LogLostError.
        """
        try:
            reading = await read_state_log(self._queue, log)
        except NotFoundError:
            return lost_state_log(log)
        if reading.empty:
            return lost_state_log(log)
        runs = [key for key in entries if is_run_key(key)]
        if runs:
            try:
                named = await self._runs(log, reading, partition_prefix(runs[0], runs[0].partition("/")[0]))
            except (CorruptDataError, NotFoundError):  # a snapshot that can't be read may name all of them
                named = set(runs)
            runs = [key for key in runs if key not in named]
        return runs + await self._snapshots_in(reading, entries)

    async def _runs(self, log: ReadPartition, reading: StateLogReading, prefix: str) -> set[str]:
        """Return the runs that the log or a stored snapshot names.

        Raises: as `SnapshotStore.all`; LogLostError.
        """
        machines, last = ServiceMachines(), reading.scan.snapshot
        try:
            saved = await self._snapshots.get(last) if last is not None else None
            await in_slices(reading.scan.begin_fold(machines.by_name, saved))
        except NotFoundError as error:
            raise LogLostError(f"state log {log.partition} of topic '{log.topic}': {error}") from error
        named = {*machines.holds.spilled.runs, *machines.queues.spilled.runs}
        for saved in await self._snapshots.all(prefix):
            holds, queues = HoldMachine(), QueueMachine()
            if HOLDS_MACHINE in saved.machines:
                for _ in holds.begin_restore(saved.machines[HOLDS_MACHINE]):
                    await asyncio.sleep(0)  # let the event loop do other work
            for _ in queues.begin_restore(saved.machines.get(QUEUES_MACHINE, b"")):
                await asyncio.sleep(0)
            named |= holds.spilled.runs.keys() | queues.spilled.runs.keys()
        return named

    async def _snapshots_in(self, reading: StateLogReading, entries: Mapping[str, ObjectEntry]) -> list[str]:
        last = reading.scan.snapshot
        place = parse_state_key(f"{last.key}/0000") if last is not None else None
        if last is None or place is None:
            return []
        found: list[str] = []
        for key in entries:
            named = parse_state_key(key)
            if named is None or key.rpartition("/")[0] in reading.named:
                continue
            if named.epoch <= place.epoch and named.offset < place.offset:
                found.append(key)
        if not found:
            return []
        try:
            await self._snapshots.get(last)
        except (NotFoundError, CorruptDataError, UnsupportedFormatError):
            return []  # its owner has replaced it meanwhile, or it is lost: then an earlier one is the last state
        return found
