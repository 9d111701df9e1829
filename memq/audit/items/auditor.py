"""Reads state logs, snapshots and objects of a cluster, and audits the items of its queues."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from memq.audit.items.fold import WORDS, Block, ItemFold, decode_saved
from memq.audit.items.report import ItemFault, ItemFinding, ItemVerdict
from memq.audit.opened_topic import opened_topic
from memq.errors import CorruptDataError, MemqError, NotFoundError
from memq.format.blocks.header import check_block
from memq.format.held_object import held_object_index
from memq.format.key import held_prefix
from memq.format.state_log.entry import OpenedState, StateDecisions, StateEntry, StateSnapshot, decode_state_entry
from memq.format.state_log.queue_run import QUEUE_ROWS, QueueRunEntry
from memq.format.state_log.run import BEFORE_ALL
from memq.format.state_log.snapshot import SavedState
from memq.limits import MIB
from memq.notification import PointerReader
from memq.notification.log_reader import entries_between, valid_span
from memq.queues.decisions import QUEUES_MACHINE, ItemState, SavedQueues, is_queue_lane, queue_scope
from memq.queues.runs.spilled import SavedRun, ids_in
from memq.runtime.runtime import Runtime
from memq.state_log.run_store import RunReader, check_run
from memq.state_log.snapshot_store import SnapshotStore
from memq.storage_handlers import StorageHandler
from memq.storage_handlers.confirmed_reads import ConfirmedReads, Way, check_missing
from memq.topic import STATE_TOPIC, ReadPartition, read_partitions

READ_BYTES = 1 * MIB
READS_AT_ONCE = 8
YOUNG_MS = 60_000  # the decision about a younger object may not be in the log yet


async def audit_items(brokers: str, queue: str = "") -> ItemVerdict:
    """Audit a running cluster: read its state logs through brokers, objects and snapshots from its store.

    Return the verdict on the items of a queue, of all queues if it is empty.
    Raises: UnreachableError; DeniedError if the store does not open here; as `ItemAuditor.audit`.
    """
    runtime = Runtime()
    async with opened_topic(brokers, STATE_TOPIC, runtime, direct=True) as opened:
        store = next(iter(opened.stores.values()))  # the one of new objects
        auditor = ItemAuditor(opened.cluster, store, opened.queue, runtime.clock.wall_ms())
        return await auditor.audit(read_partitions(opened.topic), queue)


class LogEntry(NamedTuple):
    """An entry of a state log, which may be void."""

    offset: int
    entry: StateEntry


@dataclass(slots=True)
class ShardItems:
    """The items of one shard by its log, and findings.

    `since_ms` is the Unix time at which the base of the fold was stored; 0 if the log is whole from its first entry on.
    `has_gap`: the log lacks entries.
    """

    shard: int
    fold: ItemFold
    since_ms: int = 0
    has_gap: bool = False
    entries: int = 0
    snapshots: int = 0
    findings: list[ItemFinding] = field(default_factory=list)


class ItemAuditor:
    """Audits queue items: `store` has snapshots and objects, `queue` has the state logs.

    `now_ms` is the present Unix time.
    """

    def __init__(self, cluster: str, store: StorageHandler, queue: PointerReader, now_ms: int) -> None:
        self._cluster = cluster
        self._store = store
        self._queue = queue
        self._now_ms = now_ms
        self._snapshots = SnapshotStore(store)
        self._runs = RunReader(store, QUEUE_ROWS)

    async def audit(self, logs: Sequence[ReadPartition], queue: str = "") -> ItemVerdict:
        """Return the verdict on the items of a queue, of all queues if it is empty.

        Raises: as the queue; UnsupportedFormatError for entries of a newer release; StoreError if the store can't list.
        """
        verdict = ItemVerdict(queue)
        objects = {entry.key: entry.modified_ms async for entry in self._store.list(held_prefix(self._cluster))}
        shards = [await self.shard(log) for log in logs]
        for log, shard in zip(logs, shards, strict=True):
            verdict.add(shard.findings)
            verdict.shards += 1
            verdict.entries += shard.entries
            verdict.snapshots += shard.snapshots
            verdict.former += shard.fold.former
            for block in shard.fold.blocks.values():
                if block.place is not None and queue in ("", block.queue):
                    verdict.states.update(WORDS[block.peek(number).state] for number in range(block.count))
            await self._check_payloads(log, shard, verdict)
            await self._check_runs(log, shard, verdict)
        await self._find_unnamed(objects, shards, verdict)
        return verdict

    # ---- the log ---------------------------------------------------------------------------------

    async def shard(self, log: ReadPartition) -> ShardItems:
        """Fold a state log, and compare the snapshots that it names. Raises: as `audit`."""
        entries, first, findings = await self._entries(log)
        named = list(_named(entries))
        saved: dict[int, SavedState] = {}
        for snapshot in named:
            try:
                saved[snapshot.offset] = await self._snapshots.get(snapshot)
            except (NotFoundError, CorruptDataError) as error:
                if snapshot is named[-1]:  # the owner deletes earlier ones
                    findings.append(_unread(log, f"snapshot '{snapshot.key}' of the log can't be read: {error}"))
        base = None if first == 0 else min((offset for offset in saved if offset >= first), default=None)
        if first and base is None:
            findings.append(_unread(log, f"the log begins at offset {first}, and no snapshot has the state before it"))
            return ShardItems(log.partition, ItemFold(log.partition), findings=findings)
        state = None if base is None else _queues_of(saved[base])
        in_runs: dict[int, QueueRunEntry] = {}
        for run in state.runs if state is not None else ():
            try:
                in_runs |= await self._blocks_in(run)
            except MemqError as error:
                findings.append(_unread(log, f"run '{run.run.key}' of the first snapshot can't be read: {error}"))
                return ShardItems(log.partition, ItemFold(log.partition), findings=findings)
        fold = ItemFold(log.partition, state, in_runs)
        shard = ShardItems(log.partition, fold, findings=findings)
        if base is not None:
            key = next(each.key for each in named if each.offset == base)
            shard.since_ms = max([entry.modified_ms async for entry in self._store.list(key)], default=self._now_ms)
        self._fold(shard, entries, saved, base)
        return shard

    def _fold(self, shard: ShardItems, entries: list[LogEntry], saved: dict[int, SavedState], base: int | None) -> None:
        """Fold the entries that count (S1) from the base on."""
        epoch, number = (0, 0) if base is None else (saved[base].epoch, saved[base].number)
        left = sorted(offset for offset in saved if offset >= (base or 0))
        for offset, entry in entries:
            while left and left[0] <= offset:
                self._compare(shard, saved, left.pop(0))
            if offset < (base or 0):
                continue
            if isinstance(entry.content, OpenedState):
                if entry.epoch > epoch:
                    epoch, number = entry.epoch, 0
                continue
            if (entry.epoch, entry.number) < (epoch, number):
                continue
            if (entry.epoch, entry.number) > (epoch, number):
                shard.has_gap = True
                text = f"the state log lacks an entry before offset {offset}"
                shard.findings.append(ItemFinding(ItemFault.FAULT, shard.shard, text))
            epoch, number = entry.epoch, entry.number + 1
            shard.entries += 1
            if isinstance(entry.content, StateDecisions):
                for machine, body in entry.content.decisions:
                    if machine == QUEUES_MACHINE:
                        shard.fold.apply(body)
        for offset in left:
            self._compare(shard, saved, offset)
        shard.findings += shard.fold.take_findings()

    def _compare(self, shard: ShardItems, saved: dict[int, SavedState], offset: int) -> None:
        state = _queues_of(saved[offset])
        shard.snapshots += 1
        if state is not None:
            shard.fold.compare(state, offset)
        elif shard.fold.blocks:
            text = f"the snapshot at offset {offset} has no queues"
            shard.findings.append(ItemFinding(ItemFault.LOST, shard.shard, text, items=len(shard.fold.blocks)))

    async def _entries(self, log: ReadPartition) -> tuple[list[LogEntry], int, list[ItemFinding]]:
        """Return the entries after the last hole of offsets, the offset at which they begin, and findings."""
        span = await valid_span(self._queue, log)
        entries: list[LogEntry] = []
        findings: list[ItemFinding] = []
        first = next_ = span.begin
        async for page in entries_between(self._queue, log, span.begin, span.end, READ_BYTES):
            for each in page:
                if each.offset > next_:  # a trim between two reads, or a loss
                    entries, first = [], each.offset
                next_ = each.offset + 1
                try:
                    entries.append(LogEntry(each.offset, decode_state_entry(each.body)))
                except CorruptDataError as error:
                    text = f"the entry at offset {each.offset} can't be read: {error}"
                    findings.append(ItemFinding(ItemFault.FAULT, log.partition, text))
        return entries, first, findings

    async def _blocks_in(self, saved: SavedRun) -> dict[int, QueueRunEntry]:
        """Return the blocks that are in a run of a snapshot. Raises: as `RunReader`."""
        left, found = set(ids_in(saved.ids)), dict[int, QueueRunEntry]()
        async for entries in self._runs.blocks(saved.run, BEFORE_ALL):
            found |= {each.block.id.producer: each for each in entries if each.block.id.producer in left}
        return found

    # ---- objects ---------------------------------------------------------------------------------

    async def _check_payloads(self, log: ReadPartition, shard: ShardItems, verdict: ItemVerdict) -> None:
        """Read the payload of each block with a live item; name those that are missing or damaged."""
        stored = [block for block in shard.fold.blocks.values() if block.place is not None and not block.is_stream]
        wanted = [block for block in stored if block.is_needed]
        wanted = [block for block in wanted if verdict.queue in ("", block.queue)]
        limit = asyncio.Semaphore(READS_AT_ONCE)

        async def fault_of(block: Block) -> tuple[ItemFault, str] | None:
            async with limit:
                return await self._fault_of(block, verdict)

        faults = await asyncio.gather(*map(fault_of, wanted))
        if not any(faults):
            return
        later = (await self.shard(log)).fold.blocks  # an item that has ended meanwhile needs no payload
        for block, fault in zip(wanted, faults, strict=True):
            known = later.get(block.id)
            if fault is not None and known is not None and known.is_needed:
                live = list(known.numbers(ItemState.READY, ItemState.LEASED, ItemState.DEAD))
                where = block.queue, block.id_of(live[0]), len(live)
                verdict.add([ItemFinding(fault[0], log.partition, fault[1], *where)])

    async def _check_runs(self, log: ReadPartition, shard: ShardItems, verdict: ItemVerdict) -> None:
        """Read each run that the state names; name those that are missing or damaged."""
        for run in list(shard.fold.runs.named.values()):
            try:
                await check_run(self._runs, run)
            except MemqError as error:
                if run.key not in (await self.shard(log)).fold.runs.named:
                    continue  # its blocks were brought meanwhile, and the sweep has deleted it
                fault = ItemFault.MISSING if isinstance(error, NotFoundError) else ItemFault.UNREAD
                fault = ItemFault.CORRUPT if isinstance(error, CorruptDataError) else fault
                verdict.add([ItemFinding(fault, log.partition, f"run '{run.key}' can't be read: {error}")])

    async def _fault_of(self, block: Block, verdict: ItemVerdict) -> tuple[ItemFault, str] | None:
        place = block.place
        assert place is not None, "blocks that ended before the log have no payload"

        async def read() -> bytes:
            data = bytes(await self._store.get_range(block.key, place.offset, place.length))
            header = check_block(data, queue_scope(block.queue))
            if header.producer_id != block.id:
                raise CorruptDataError(f"object '{block.key}' has block {header.producer_id:016x} there")
            return data

        try:
            verdict.bytes += len(await ConfirmedReads().read([Way(f"object '{block.key}'", read)]))
            verdict.objects += 1
        except NotFoundError:
            try:
                await check_missing(self._store, block.key)
            except MemqError as error:
                return ItemFault.UNREAD, str(error)
            return ItemFault.MISSING, f"the store has no object '{block.key}'"
        except CorruptDataError as error:
            return ItemFault.CORRUPT, f"object '{block.key}': {error}"
        except MemqError as error:
            return ItemFault.UNREAD, f"object '{block.key}' can't be read: {error}"
        return None

    async def _find_unnamed(self, objects: dict[str, int], shards: Iterable[ShardItems], verdict: ItemVerdict) -> None:
        """Name the blocks of objects that no decision in the logs names.

        If all logs are whole, their enqueue got no answer. If a log lacks entries, such items may be lost.
        """
        shards = list(shards)
        since_ms = max((shard.since_ms for shard in shards), default=0)
        has_gap = any(shard.has_gap for shard in shards)
        known = {id_ for shard in shards for id_ in shard.fold.blocks}
        named = {block.key for shard in shards for block in shard.fold.blocks.values() if block.place is not None}
        for key, modified_ms in objects.items():
            if key in named or modified_ms <= since_ms or modified_ms > self._now_ms - (0 if has_gap else YOUNG_MS):
                continue
            try:
                lanes = held_object_index(await self._store.get(key))
            except NotFoundError:
                continue  # the sweep deletes what no log names
            except MemqError as error:
                verdict.add([ItemFinding(ItemFault.UNREAD, 0, f"object '{key}' can't be read: {error}")])
                continue
            for lane in lanes if any(is_queue_lane(each.lane) for each in lanes) else ():
                for block in lane.blocks:
                    if is_queue_lane(lane.lane) and block.id.producer not in known:
                        queue, id_ = lane.target.topic, f"{block.id.producer:016x}"
                        fault = ItemFault.LOST if has_gap else ItemFault.UNNAMED
                        text = f"object '{key}' has it, and no enqueue in the log"
                        count = block.next - block.id.first
                        verdict.add([ItemFinding(fault, 0, text, queue, f"{queue}:{id_}:0", count)])


def _named(entries: Iterable[LogEntry]) -> Iterator[StateSnapshot]:
    """Yield the snapshots whose entries count, also without the begin of their epoch (S2)."""
    highest = (0, -1)
    for _, entry in entries:
        own = entry.epoch, -1 if isinstance(entry.content, OpenedState) else entry.number
        if own > highest:
            highest = own
            if isinstance(entry.content, StateSnapshot):
                yield entry.content


def _unread(log: ReadPartition, text: str) -> ItemFinding:
    return ItemFinding(ItemFault.UNREAD, log.partition, text)


def _queues_of(saved: SavedState) -> SavedQueues | None:
    return decode_saved(saved.machines.get(QUEUES_MACHINE, b""))
