"""Rules of a restore of groups and delayed records, tried on a copy of the store: S9 and G5.

The queue loses everything. After the restore each group has the positions of the last snapshot: from there on it gets
each record that its position in the lost log had not passed. It may read others again. Each delayed record waits, or is
in the log of its partition, and not both. None waits of which a producer knows that it is cancelled. No block of a
transaction that is in the log is held again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from awscrt.checksums import crc32c

from memq.broker.restore.restore import Restorer
from memq.broker.restore.state_logs import StateLogRestorer
from memq.broker.service_partitions.machines import ServiceMachines
from memq.format.held_object import HoldId
from memq.format.key import state_prefix
from memq.format.pointer import decode_pointer
from memq.format.state_log.held_run import HELD_ROWS
from memq.groups.machine import GROUPS_MACHINE, GroupMachine
from memq.holds.machine import HoldMachine
from memq.notification.log_reader import all_entries
from memq.runtime.clock import Clock
from memq.state_log.log_reading import read_state_log
from memq.state_log.run_store import RunReader
from memq.state_log.snapshot_store import SnapshotStore
from memq.storage_handlers.memory import MemoryHandler
from memq.topic import Position, ReadPartition, Topic, read_partitions
from tests.simulation.read_log import ReadLog
from tests.simulation.reader import Delivered, ReferenceReader, object_bytes, read_entry
from tests.simulation.restore_rules import STORE, KilledError, LoopbackQueue

Positions = dict[tuple[str, ReadPartition], Position]


class StateRestoreRules:
    """Restores a topic and the groups of a cluster from its objects, as they are when the rules are made."""

    def __init__(
        self,
        cluster: str,
        topic: Topic,
        states: Topic,
        objects: Mapping[str, bytes],
        logs: Mapping[ReadPartition, ReadLog],
        fail: Callable[[str], None],
        waiting: Iterable[HoldId] = (),
        cancelled: Iterable[HoldId] = (),
    ) -> None:
        """`waiting` are the delayed records that wait, `cancelled` those of which a producer knows it."""
        self._cancelled = set(cancelled)
        self._waiting = set(waiting)
        self._cluster = cluster
        self._topic = topic
        self._states = states
        self._objects = dict(objects)
        self._logs = {partition: log.snapshot() for partition, log in logs.items() if partition.topic_id == topic.id}
        self._fetch = partial(object_bytes, self._objects)
        self._fail = fail
        self.checked = 0  # positions

    async def check(self, clock: Clock, draw: random.Random) -> None:
        """Lose the queue, restore it, perhaps in two runs, and compare what each group gets."""
        store, queue = MemoryHandler(clock), LoopbackQueue(clock)
        for key, body in self._objects.items():
            await store.put(key, [body], crc32c(body))
        before = await self._in_snapshots(store)
        entries = sum(len(log.entries) for log in self._logs.values())
        queue.left = draw.randrange(1 + entries + len(self._states.partitions))
        try:
            await self._restore(store, queue, clock)
        except KilledError:
            queue.left = -1
            await self._restore(store, queue, clock)
        after = await self._in_logs(store, queue)
        await self._check_holds(store, queue)
        streams = {partition: await self._stream(queue, partition) for partition in self._logs}
        for (group, partition), old in before.items():
            new = after.get((group, partition))
            if partition not in self._logs:
                continue
            if new is None:
                self._fail(f"group {group} has lost its position in {partition} by a restore")
                return
            self._compare(group, partition, (old, new), streams[partition])

    async def _restore(self, store: MemoryHandler, queue: LoopbackQueue, clock: Clock) -> None:
        await Restorer(self._cluster, STORE, store, queue, clock).restore(self._topic)
        renumbered = dict.fromkeys(read_partitions(self._topic), self._topic)
        restorer = StateLogRestorer(self._cluster, store, queue, clock)
        report = await restorer.restore(self._states, {}, renumbered, [self._topic])
        if report.findings:
            self._fail(f"a restore of groups finds {report.findings[0]}")

    async def _in_snapshots(self, store: MemoryHandler) -> Positions:
        """Return the positions in the last snapshot of each state log."""
        found: Positions = {}
        for log in read_partitions(self._states):
            last = await SnapshotStore(store).last(state_prefix(self._cluster, log.topic, log.topic_id, log.partition))
            if last.saved is not None:
                machine = GroupMachine()
                machine.restore(last.saved.machines[GROUPS_MACHINE])
                found |= _positions(machine)
        return found

    async def _in_logs(self, store: MemoryHandler, queue: LoopbackQueue) -> Positions:
        """Return the positions that an owner of each restored state log begins with."""
        found: Positions = {}
        for machines in await self._restored(store, queue):
            found |= _positions(machines.groups)
        return found

    async def _restored(self, store: MemoryHandler, queue: LoopbackQueue) -> list[ServiceMachines]:
        """Return the state of each restored state log."""
        found: list[ServiceMachines] = []
        for log in read_partitions(self._states):
            if log not in queue.logs:
                continue
            reading = await read_state_log(queue, log)
            if reading.scan.snapshot is not None:
                machines = ServiceMachines()
                reading.scan.fold(machines.by_name, await SnapshotStore(store).get(reading.scan.snapshot))
                found.append(machines)
        return found

    async def _check_holds(self, store: MemoryHandler, queue: LoopbackQueue) -> None:
        landed, kept = set[HoldId](), set[HoldId]()
        for log in self._logs.values():
            landed |= {HoldId(each.source[1], each.sequence) for each in log.stream}
            # What retention took after the snapshot is in no log: nothing shows the restore that it was released.
            kept |= {HoldId(each.source[1], each.sequence) for each in log.stream[log.begin_index :]}
        restored: set[HoldId] = set()
        for machines in await self._restored(store, queue):
            restored |= await _waiting_in(machines.holds, store)
            again = kept & _of_transactions(machines.holds)
            if again:
                self._fail(f"{len(again)} blocks of transactions are in the log, and held again after a restore")
        if restored & kept:
            self._fail(f"{len(restored & kept)} delayed records are in the log, and wait again after a restore")
        if restored & self._cancelled:
            self._fail(f"{len(restored & self._cancelled)} cancelled records wait again after a restore")
        lost = self._waiting - restored - landed
        if lost:
            least = min(hold.producer for hold in lost)
            self._fail(f"{len(lost)} delayed records are lost by a restore, the first is of producer {least}")

    async def _stream(self, queue: LoopbackQueue, partition: ReadPartition) -> list[Delivered]:
        """Return what a reader of a whole restored log gets."""
        reader = ReferenceReader()
        found: list[Delivered] = []
        async for entries in all_entries(queue, partition):
            for entry in entries:
                landed = read_entry(entry.offset, entry.time_ms, decode_pointer(entry.body), self._fetch)
                found += reader.take(landed)
        return found

    def _compare(
        self, group: str, partition: ReadPartition, places: tuple[Position, Position], stream: list[Delivered]
    ) -> None:
        old, new = places
        self.checked += 1
        log = self._logs[partition]
        left = log.stream[max(log.index_of(old.pointer_offset, old.record_index), log.begin_index) :]
        place = (new.pointer_offset, new.record_index)
        got = {(each.value, each.source) for each in stream if (each.offset, each.record_index) >= place}
        missing = [each.value for each in left if (each.value, each.source) not in got]
        if missing:
            words = f"{old} became {new}, and {len(missing)} records are not there, the first is {missing[0][:40]!r}"
            self._fail(f"group {group} skips records of {partition} after a restore: {words}")


def _positions(machine: GroupMachine) -> Positions:
    return {
        (group, partition): committed.position
        for group, stored in machine.groups.items()
        for partition, committed in stored.positions.items()
    }


def _of_transactions(holds: HoldMachine) -> set[HoldId]:
    """Return the blocks of transactions that are held, or released and not done; staged parts have other ids."""
    units = (unit for found in holds.units.values() for unit in found.values())
    found = (*holds.open.values(), *(hold for unit in units for hold in unit.holds))
    return {each.block.id for each in found if each.lane}


async def _waiting_in(holds: HoldMachine, store: MemoryHandler) -> set[HoldId]:
    """Return the delayed records that wait, those in runs included; not those of transactions."""
    found = {each.block.id for each in holds.open.values() if not each.lane}
    for units in holds.units.values():
        found.update(hold.block.id for unit in units.values() for hold in unit.holds if not hold.lane)
    for state in holds.spilled.runs.values():
        async for some in RunReader(store, HELD_ROWS).blocks(state.run, state.at):
            found.update(each.block.id for each in some if each.block.id not in state.dropped)
    return found
