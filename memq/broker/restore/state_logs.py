"""Restores lost state logs from their snapshots, and the positions of groups in restored logs (S9).

A lost log gets one entry: it names a new snapshot, of the first free offset and of an epoch above all that were used.
Any entry proves the `opened` of its epoch, so an owner continues from this state. A restore that ends before this entry
has changed nothing.

Positions in a log that was made again are searched there (`memq.broker.restore.position_search`). They are part of the
new snapshot. In a state log that is whole they are a decision, in an epoch of the restore.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from memq.broker.restore.position_search import PositionSearch
from memq.broker.restore.restored_holds import RestoredHolds
from memq.broker.service_partitions.machines import ServiceMachines
from memq.errors import CorruptDataError, LogLostError, NotFoundError, QueueError, UnsupportedFormatError
from memq.format.held_object import HoldId
from memq.format.key import state_prefix, state_snapshot_key
from memq.format.pointer import Pointer, read_pointer
from memq.format.state_log.entry import (
    OpenedState,
    StateDecision,
    StateDecisions,
    StateEntry,
    decode_state_entry,
    encode_state_entry,
)
from memq.format.state_log.snapshot import SavedState
from memq.groups.machine import (
    GROUPS_MACHINE,
    GroupMachine,
    RestoredDecision,
    encode_decision,
    pack_positions,
    portions,
)
from memq.holds.decisions import HOLDS_MACHINE, DropDecision, HoldState, decode_decision
from memq.holds.machine import HoldMachine
from memq.notification import NotificationQueue, Publication
from memq.notification.log_reader import all_entries, valid_span
from memq.queues.decisions import QUEUES_MACHINE
from memq.queues.machine import QueueMachine
from memq.runtime.clock import Clock
from memq.state_log import Answer, StateMachine
from memq.state_log.log_reading import StateLogReading, read_state_log
from memq.state_log.snapshot_store import SnapshotStore
from memq.storage_handlers import StorageHandler
from memq.topic import Committed, Position, ReadPartition, Topic, read_partitions
from memq.transactions.machine import (
    TRANSACTIONS_MACHINE,
    TransactionMachine,
)

OWNER = "memq restore"
AGAIN_SHOWN_MAX = 20
EMPTY = SavedState(0, 0, 0, {})
GENERATION_GAP = 1_000_000  # more generations than a group makes between two snapshots
Moved = dict[str, dict[ReadPartition, Committed]]  # new positions by group


@dataclass(slots=True)
class RestoredStates:
    """The results of a topic of state logs: restored and whole logs, groups with new positions, findings."""

    restored: int = 0
    intact: int = 0
    groups: list[str] = field(default_factory=list)
    findings: list[tuple[str, str]] = field(default_factory=list)


class _Unread:
    """The machine of another service: a restore of a whole log does not need its state."""

    def apply(self, body: bytes) -> Answer:
        """See `StateMachine.apply`."""

    def snapshot(self) -> bytes:
        """See `StateMachine.snapshot`."""
        raise AssertionError("nobody reads this state")

    def restore(self, state: bytes) -> None:
        """See `StateMachine.restore`."""


class StateLogRestorer:
    """Restores the state logs of a cluster. No broker of the cluster may run meanwhile."""

    def __init__(
        self, cluster: str, store: StorageHandler, queue: NotificationQueue, clock: Clock, *, dry_run: bool = False
    ) -> None:
        self._cluster = cluster
        self._snapshots = SnapshotStore(store)
        self._store = store
        self._queue = queue
        self._clock = clock
        self._dry_run = dry_run
        self._renumbered: Mapping[ReadPartition, Topic] = {}
        self._held = RestoredHolds(cluster, store, queue, (), 0)

    async def restore(
        self,
        topic: Topic,
        epochs: Mapping[int, int],
        renumbered: Mapping[ReadPartition, Topic],
        topics: Iterable[Topic] = (),
    ) -> RestoredStates:
        """Restore the lost logs of a topic, and the positions in all its logs.

        `epochs` has the epoch of the assignment of each partition. `renumbered` are the read partitions that a restore
        has made again, with their topics. Delayed records are searched for in the logs of `topics`. A call after an
        interrupted one continues where that one ended.
        Raises: MemqError of store and queue.
        """
        self._renumbered = renumbered
        self._held = RestoredHolds(self._cluster, self._store, self._queue, topics, self._clock.wall_ms())
        result = RestoredStates()
        for log in read_partitions(topic):
            try:
                await self._restore(log, topic, epochs.get(log.partition, 0), result)
            except (CorruptDataError, UnsupportedFormatError) as error:
                result.findings.append((f"topic '{topic.name}' partition {log.partition}", str(error)))
        return result

    async def _restore(self, log: ReadPartition, topic: Topic, epoch: int, result: RestoredStates) -> None:
        machine = await self._whole(log)
        if machine is not None:
            result.intact += 1
            await self._move_positions(log, machine, epoch, result)
            return
        found = await self._snapshots.last(state_prefix(self._cluster, log.topic, log.topic_id, log.partition))
        result.findings += found.faults
        if found.saved is None and (found.faults or not await self._held.any_of(log, topic, result.findings)):
            return  # its first owner makes the log
        saved = found.saved or EMPTY  # a log younger than its first snapshot: the objects say what was held
        machine = GroupMachine()
        machine.restore(saved.machines.get(GROUPS_MACHINE, GroupMachine().snapshot()))
        groups = await self._moved(machine)
        packed = {name: pack_positions(positions) for name, positions in groups.items()}
        machine.apply(encode_decision(RestoredDecision(packed, GENERATION_GAP, all=True)))
        result.restored += 1
        result.groups += sorted(machine.groups)
        if self._dry_run:
            return
        await self._queue.create(read_partitions(topic), topic.settings.stale_publish_ms)
        if await self._whole(log) is not None:
            raise QueueError(
                f"topic '{topic.name}' partition {log.partition}: the queue has its log, and did not show it before",
                hint="run memq restore again",
            )
        span = await valid_span(self._queue, log)
        above = 1 + max(epoch, found.highest_epoch, await self._highest_epoch(log))
        holds = HoldMachine()
        holds.restore(saved.machines.get(HOLDS_MACHINE, holds.snapshot()))
        completed = await self._held.complete(holds, log, topic, found.stored_ms)
        result.findings += completed.findings
        if again := _waiting_again(holds, await self._dropped(log)):
            result.findings.append((f"topic '{topic.name}' partition {log.partition}", again))
        transactions = TransactionMachine(machine, holds)
        transactions.restore(saved.machines.get(TRANSACTIONS_MACHINE, transactions.snapshot()))
        for lane in completed.committed:
            transactions.end_committed(lane, self._clock.wall_ms())
        holds.renew(above)  # targets know numbers that were given after the snapshot
        queues = QueueMachine()
        queues.restore(saved.machines.get(QUEUES_MACHINE, b""))
        result.findings += await self._held.add_items(queues, log, topic, found.stored_ms)
        states = {
            **saved.machines,
            GROUPS_MACHINE: machine.snapshot(),
            HOLDS_MACHINE: holds.snapshot(),
            TRANSACTIONS_MACHINE: transactions.snapshot(),
        }
        if queue_state := queues.snapshot():
            states[QUEUES_MACHINE] = queue_state
        key = state_snapshot_key(self._cluster, log.topic, log.topic_id, log.partition, above, span.end)
        snapshot = await self._snapshots.put(SavedState(span.end, above, 0, states), key)
        offset = await self._publish(log, StateEntry(above, 0, snapshot))
        if offset != span.end:
            raise QueueError(
                f"topic '{topic.name}' partition {log.partition}: its first entry has offset {offset}, not {span.end}",
                hint="stop all brokers, and run memq restore again",
            )

    async def _whole(self, log: ReadPartition) -> GroupMachine | None:
        """Return the groups of a log with all entries that its state needs; None if it is lost.

        One answer is no proof of a loss. Raises: CorruptDataError of an entry; UnsupportedFormatError.
        """
        for _ in range(2):
            try:
                reading = await read_state_log(self._queue, log)
                if not reading.empty:
                    return await self._groups_of(reading)
            except (LogLostError, NotFoundError):
                continue
        return None

    async def _groups_of(self, reading: StateLogReading) -> GroupMachine:
        last = reading.scan.snapshot
        try:
            saved = await self._snapshots.get(last) if last is not None else None
        except CorruptDataError as error:
            raise LogLostError(str(error)) from error
        known = ServiceMachines()  # a transaction moves positions of groups
        machines: dict[str, StateMachine] = {name: _Unread() for name in reading.machines}
        machines |= {name: _Unread() for name in (saved.machines if saved is not None else ())}
        reading.scan.fold(lambda: machines | known.by_name(), saved)
        return known.groups

    async def _dropped(self, log: ReadPartition) -> set[HoldId]:
        """Return the holds that entries of a lost log drop. The log lacks others, so these may not count."""
        found = set[HoldId]()
        async for entries in all_entries(self._queue, log):
            for entry in entries:
                content = decode_state_entry(entry.body).content
                for decision in content.decisions if isinstance(content, StateDecisions) else ():
                    if decision.machine != HOLDS_MACHINE:
                        continue
                    with suppress(CorruptDataError):  # the report is no reason to restore nothing
                        body = decode_decision(decision.body)
                        found.update(body.holds if isinstance(body, DropDecision) else ())
        return found

    async def _highest_epoch(self, log: ReadPartition) -> int:
        reading = await read_state_log(self._queue, log)
        return reading.scan.highest_epoch

    async def _move_positions(
        self, log: ReadPartition, machine: GroupMachine, epoch: int, result: RestoredStates
    ) -> None:
        """Put the new positions of a whole log's groups into the log, in an epoch of the restore."""
        groups = await self._moved(machine)
        result.groups += sorted(groups)
        if not groups or self._dry_run:
            return
        above = 1 + max(epoch, await self._highest_epoch(log))
        await self._publish(log, StateEntry(above, 0, OpenedState(self._clock.wall_ms(), OWNER)))
        for number, decision in enumerate(_decisions(groups)):
            body = StateDecision(GROUPS_MACHINE, encode_decision(decision))
            await self._publish(log, StateEntry(above, number, StateDecisions((body,))))

    async def _publish(self, log: ReadPartition, entry: StateEntry) -> int:
        now_ms = self._clock.wall_ms()
        return await self._queue.publish(
            Publication(log, log.partition, entry.epoch, now_ms, encode_state_entry(entry))
        )

    # ---- positions ---------------------------------------------------------------------------------

    async def _moved(self, machine: GroupMachine) -> Moved:
        """Return the groups that know offsets of lost logs, with their new positions there."""
        wanted: dict[ReadPartition, list[Committed]] = {}
        for stored in machine.groups.values():
            for partition, committed in stored.positions.items():
                if partition in self._renumbered:
                    wanted.setdefault(partition, []).append(committed)
        found = {partition: await self._searched(partition, each) for partition, each in wanted.items()}
        moved: Moved = {}
        for name, stored in machine.groups.items():
            before = {partition: each for partition, each in stored.positions.items() if partition in found}
            changed = {
                partition: found[partition][each]
                for partition, each in before.items()
                if found[partition][each] != each
            }
            members = stored.membership.members.values()
            if changed or any(each.partition in self._renumbered for member in members for each in member.holds):
                moved[name] = changed
        return moved

    async def _searched(self, partition: ReadPartition, wanted: list[Committed]) -> dict[Committed, Committed]:
        try:
            begin = (await valid_span(self._queue, partition)).begin
        except NotFoundError:
            begin = 0  # in a dry run
        search = PositionSearch(self._renumbered[partition].settings, Position(partition.partition, begin))
        search.want(wanted)
        for take in (search.look, search.place):
            async for offset, pointer in self._pointers(partition):
                take(offset, pointer)
        return {each: search.result(each) for each in wanted}

    async def _pointers(self, partition: ReadPartition) -> AsyncIterator[tuple[int, Pointer]]:
        try:
            async for entries in all_entries(self._queue, partition):
                for entry in entries:
                    pointer = read_pointer(entry.body, newer="raise")
                    if isinstance(pointer, Pointer):
                        yield entry.offset, pointer
        except NotFoundError:
            return  # in a dry run


def _waiting_again(holds: HoldMachine, dropped: Iterable[HoldId]) -> str:
    """Return the text about delayed records that wait though an entry cancels them; "" without any."""
    again = sorted((each.producer, each.first) for each in dropped if holds.state_of(each) is HoldState.HELD)
    if not again:
        return ""
    named = ", ".join(f"{producer:016x}:{first}" for producer, first in again[:AGAIN_SHOWN_MAX])
    return f"delayed records wait again, though an entry of the log cancels them; blocks: {len(again)}, first {named}"


def _decisions(groups: Moved) -> Iterator[RestoredDecision]:
    """Yield the decisions about groups; only the first one of a group ends its generation."""
    for name, positions in groups.items():
        for number, portion in enumerate(portions(positions)):
            yield RestoredDecision({name: pack_positions(portion)}, gap=int(number == 0))
