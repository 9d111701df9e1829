"""Completes the delayed records of a state log's last snapshot (S9).

Theory. A snapshot is up to a minute old. Records that were held after it are in objects below `<cluster>/held/`, and
the index of each object says which. A hold that the snapshot knows is not taken again. An owner may name an object long
after its put, and a slow store shows a snapshot long after the moment of its state. So objects count that are up to
a dedup window older than the snapshot, less the error of two clocks. The window is longer than a producer waits for an
ack. The snapshot remembers ends for the whole window, so these objects have no hold with a forgotten end.

Records that were released after the snapshot are in the logs of their targets, under their producers and sequences.
They do not wait any more. Those that were cancelled after the snapshot are in objects of their own, from before the
answer on (`memq.holds.cancels`). Others wait again. If the lost log still has their entry, the report names them: it
lacks others, so nothing shows whether the entry counts.

A transaction with blocks in the log of a target was committed, for all targets. The blocks that other targets lack may
be younger than the snapshot; the indexes name their lane, and the shard that held it. If no target has any, nothing
shows the commit. A staged part whose transaction is committed has a mark in the store, and its records are restored by
the manifest.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from memq.broker.service_partitions.hosts import shard_name
from memq.broker.sweep.unproven_objects import is_decided
from memq.errors import CorruptDataError, NotFoundError, UnsupportedFormatError
from memq.format.held_object import CANCELLED_LANE, HeldBlock, HeldLane, HoldId, IndexedLane, Target, held_object_index
from memq.format.key import held_prefix
from memq.format.pointer import Pointer, read_pointer
from memq.format.state_log.held_run import HELD_ROWS
from memq.format.state_log.queue_run import QUEUE_ROWS
from memq.holds.decisions import DropDecision, HoldDecision, encode_decision
from memq.holds.machine import HoldMachine
from memq.holds.run_keeper import find_in_run
from memq.holds.spilled_holds import SpilledPlace
from memq.notification import NotificationQueue
from memq.notification.log_reader import all_entries
from memq.queues.decisions import EnqueueDecision, is_queue_lane, terms_of
from memq.queues.decisions import encode_decision as encode_queue_decision
from memq.queues.keeper import ENDED_KNOWN_MS
from memq.queues.machine import QueueMachine
from memq.state_log.run_store import RunReader, check_run
from memq.storage_handlers import StorageHandler
from memq.storage_handlers.confirmed_reads import ConfirmedReads, Way
from memq.topic import CLOCK_ERROR_MS, ReadPartition, Topic, read_partitions, shard_id

MARGIN_SHARE = 2  # of the time for which ends are known, between the put of an object and a snapshot without its holds

Findings = list[tuple[str, str]]
Young = dict[str, list[tuple[str, HeldLane]]]  # blocks that a snapshot does not know, with their objects, by lane


@dataclass(frozen=True, slots=True)
class CompletedHolds:
    """Objects and runs that can't be read, and the lanes of committed transactions, the oldest first."""

    findings: Findings
    committed: Sequence[str]


class RestoredHolds:
    """The delayed records of one restore. Raises: MemqError of store and queue."""

    def __init__(
        self, cluster: str, store: StorageHandler, queue: NotificationQueue, topics: Iterable[Topic], now_ms: int
    ) -> None:
        self._cluster = cluster
        self._store = store
        self._queue = queue
        self._topics = {topic.id: topic for topic in topics}
        self._now_ms = now_ms
        self._indexes: dict[str, tuple[IndexedLane, ...]] = {}
        self._modified_ms: dict[str, int] = {}
        self._listed = False

    async def complete(self, holds: HoldMachine, log: ReadPartition, states: Topic, stored_ms: int) -> CompletedHolds:
        """Add the holds that are younger than a snapshot of `stored_ms`, and end those that targets have.

        Of transactions, only committed ones get younger holds.
        """
        findings: Findings = []
        window_ms = max((topic.settings.dedup_window_ms for topic in self._topics.values()), default=0)
        since_ms = stored_ms - max(0, window_ms - 2 * CLOCK_ERROR_MS)
        young_lanes: Young = {}
        cancelled: list[HoldId] = []
        shards = _shards(log, states, holds.life)
        for key, lanes in (await self._objects(since_ms, findings)).items():
            self._find_young(holds, shards, key, lanes, young_lanes)
            cancelled += _cancelled_in(lanes, shards)
            young = tuple(
                HeldLane(lane.target, "", blocks)
                for lane in self._lanes_of(log, states, lanes)
                if (blocks := tuple(block for block in lane.blocks if holds.state_of(block.id) is None))
            )
            if young:
                holds.apply(encode_decision(HoldDecision(key, 0, young)))
        await self._drop(holds, cancelled)
        late = await self._due_in_runs(holds, findings)
        delivered = await self._in_logs(_wanted(holds, late, young_lanes)) | await self._restored_parts(holds)
        committed = _committed(holds, young_lanes, delivered)
        for lane in committed:
            for key, young_lane in young_lanes.get(lane, ()):
                holds.apply(encode_decision(HoldDecision(key, 0, (young_lane,))))
        holds.end_released(delivered, late, self._now_ms)
        return CompletedHolds(findings, committed)

    async def add_items(self, queues: QueueMachine, log: ReadPartition, states: Topic, stored_ms: int) -> Findings:
        """Add the queue items that are younger than a snapshot of `stored_ms`.

        Those that were acked after the snapshot come again, too. They come in the order of their arrival, which counts
        for ordered keys and dedupe keys. `complete` reports objects that can't be read, and this one runs.
        """
        since_ms, found = stored_ms - ENDED_KNOWN_MS // MARGIN_SHARE, dict[str, tuple[HeldLane, ...]]()
        for key, lanes in (await self._objects(since_ms, [])).items():
            young = tuple(
                HeldLane(lane.target, lane.lane, blocks)
                for lane in lanes
                if self._is_queued(log, lane, states)
                and (blocks := tuple(block for block in lane.blocks if not queues.is_known(block.id.producer)))
            )
            if young:
                found[key] = young
        for key in sorted(found, key=lambda key: min(map(_arrived_ms, found[key]))):
            queues.apply(encode_queue_decision(EnqueueDecision(key, 0, found[key])))
        reader, findings = RunReader(self._store, QUEUE_ROWS), Findings()
        for spilled in queues.spilled.runs.values():
            try:
                await check_run(reader, spilled.run)
            except (CorruptDataError, NotFoundError, UnsupportedFormatError) as error:
                findings.append((f"run '{spilled.run.key}'", str(error)))
        return findings

    def _is_queued(self, log: ReadPartition, lane: HeldLane, states: Topic) -> bool:
        """Whether a lane has items of a queue whose shard is this log."""
        number = zlib.crc32(lane.target.topic.encode()) % len(states.partitions)
        return is_queue_lane(lane.lane) and states.read_partition_of(number) == log

    async def any_of(self, log: ReadPartition, states: Topic, findings: Findings) -> bool:
        """Whether some object has held records or queue items of a state log.

        New findings are objects that can't be read.
        """
        unread: Findings = []
        shards, indexes = _shards(log, states, 0), (await self._objects(0, unread)).values()
        found = any(
            self._lanes_of(log, states, lanes)
            or any(self._is_queued(log, each, states) or _is_of(each, shards) for each in lanes)
            for lanes in indexes
        )
        findings += [each for each in unread if each not in findings]
        return found

    def _find_young(
        self, holds: HoldMachine, shards: set[int], key: str, lanes: Iterable[IndexedLane], found: Young
    ) -> None:
        """Add the blocks of transactions that a snapshot does not know."""
        for lane in lanes:
            if not _is_of(lane, shards) or lane.target.topic_id not in self._topics:
                continue
            known = [holds.open[each] for each in holds.lanes.get(lane.lane, ())]
            if any(hold.is_staged and hold.target == lane.target for hold in known):
                continue  # a staged part has replaced them
            blocks = tuple(block for block in lane.blocks if holds.state_of(block.id) is None)
            if blocks:
                found.setdefault(lane.lane, []).append((key, HeldLane(lane.target, lane.lane, blocks)))

    def _lanes_of(self, log: ReadPartition, states: Topic, lanes: Iterable[HeldLane]) -> list[HeldLane]:
        """Return the lanes with delayed records of a state log, for topics that exist."""
        return [
            lane
            for lane in lanes
            if not lane.lane and lane.target.topic_id in self._topics and self._is_in(log, lane.target, states)
        ]

    async def _restored_parts(self, holds: HoldMachine) -> set[HoldId]:
        """Return the staged parts of committed transactions: the restore takes their pieces from the manifest."""
        units = [each for found in holds.units.values() for each in found.values()]
        all_holds = [*holds.open.values(), *(hold for unit in units for hold in unit.holds)]
        decided: dict[str, bool] = {}
        for hold in all_holds:
            if hold.is_staged and hold.key not in decided:
                decided[hold.key] = await is_decided(self._store, hold.key)
        return {hold.block.id for hold in all_holds if decided.get(hold.key)}

    def _is_in(self, log: ReadPartition, target: Target, states: Topic) -> bool:
        """Whether a state log has the holds of a target."""
        number = zlib.crc32(shard_name(target.topic_id, target.partition).encode()) % len(states.partitions)
        return states.read_partition_of(number) == log

    async def _objects(self, since_ms: int, findings: Findings) -> Mapping[str, tuple[IndexedLane, ...]]:
        """Return the indexes of the objects that were stored since then.

        They are listed twice, because a store may leave out keys.
        """
        for _ in range(0 if self._listed else 2):
            async for entry in self._store.list(held_prefix(self._cluster)):
                self._modified_ms[entry.key] = entry.modified_ms
        self._listed = True
        found: dict[str, tuple[IndexedLane, ...]] = {}
        for key, modified_ms in sorted(self._modified_ms.items()):
            if modified_ms >= since_ms:
                try:
                    found[key] = await self._index(key)
                except (CorruptDataError, NotFoundError, UnsupportedFormatError) as error:
                    findings.append((f"object '{key}'", str(error)))
        return found

    async def _index(self, key: str) -> tuple[IndexedLane, ...]:
        async def once() -> tuple[IndexedLane, ...]:
            first, second = [held_object_index(await self._store.get(key)) for _ in range(2)]
            if first != second:  # an answer with another object is sound, too
                raise CorruptDataError(f"object '{key}' had two contents")
            return first

        if key not in self._indexes:
            self._indexes[key] = await ConfirmedReads().read([Way(f"object '{key}'", once)])
        return self._indexes[key]

    async def _drop(self, holds: HoldMachine, cancelled: Iterable[HoldId]) -> None:
        """Drop the holds that were cancelled after the snapshot."""
        places: dict[HoldId, SpilledPlace | None] = {}
        reader = RunReader(self._store, HELD_ROWS)
        for hold in cancelled:
            places[hold] = None
            for state in holds.spilled.runs.values() if hold not in holds.open else ():
                with suppress(CorruptDataError, NotFoundError, UnsupportedFormatError):  # `_due_in_runs` reports it
                    places[hold] = places[hold] or await find_in_run(reader, state, hold)
        holds.apply(encode_decision(DropDecision(self._now_ms, tuple(places), tuple(places.values()))))

    async def _due_in_runs(self, holds: HoldMachine, findings: Findings) -> dict[HoldId, tuple[Target, HeldBlock]]:
        """Return the holds in runs that are due by the clock of some broker; check that all runs can be read."""
        reader, found = RunReader(self._store, HELD_ROWS), dict[HoldId, tuple[Target, HeldBlock]]()
        until_ms = self._now_ms + CLOCK_ERROR_MS
        for state in holds.spilled.runs.values():
            try:
                await check_run(reader, state.run)
                async for some in reader.blocks(state.run, state.at):
                    for block, target, _ in some:
                        if block.due_ms <= until_ms and block.id not in state.dropped:
                            found[block.id] = target, block
                    if some and some[-1].block.due_ms > until_ms:
                        break
            except (CorruptDataError, NotFoundError, UnsupportedFormatError) as error:
                findings.append((f"run '{state.run.key}'", str(error)))
        return found

    async def _in_logs(self, wanted: Mapping[Target, set[HoldId]]) -> set[HoldId]:
        """Return those holds that the logs of their targets have.

        Raises: NotFoundError of the queue: its logs were created before, so this is no proof that one is empty.
        """
        found: set[HoldId] = set()
        for target, holds in wanted.items():
            topic = self._topics.get(target.topic_id)
            if topic is None or target.partition >= len(topic.partitions):
                continue
            await self._queue.create(
                read_partitions(topic), topic.settings.stale_publish_ms
            )  # as each start of a broker
            firsts: dict[int, list[HoldId]] = {}
            for hold in holds:
                firsts.setdefault(hold.producer, []).append(hold)
            async for entries in all_entries(self._queue, topic.read_partition_of(target.partition)):
                for entry in entries:
                    pointer = read_pointer(entry.body, newer="raise")
                    for each in pointer.producers if isinstance(pointer, Pointer) else ():
                        known = firsts.get(each.producer, ())
                        found |= {hold for hold in known if any(at <= hold.first < next_ for at, next_ in each.ranges)}
        return found


def _arrived_ms(lane: HeldLane) -> int:
    """Return when the first block of a lane of a queue arrived; at the latest, if they are delayed."""
    dedupe = terms_of(lane.lane).dedupe
    return dedupe.since_ms if dedupe is not None else min(block.due_ms for block in lane.blocks)


def _shards(log: ReadPartition, states: Topic, life: int) -> set[int]:
    """Return the ids of the service partitions with a state log."""
    numbers = range(len(states.partitions))
    return {shard_id(states.id, each, life) for each in numbers if states.read_partition_of(each) == log}


def _is_of(lane: IndexedLane, shards: set[int]) -> bool:
    """Whether a lane has records of a transaction of one of the shards."""
    is_other = lane.lane in ("", CANCELLED_LANE) or is_queue_lane(lane.lane)
    return not is_other and lane.shard in shards


def _cancelled_in(lanes: Iterable[IndexedLane], shards: set[int]) -> list[HoldId]:
    """Return the holds that the index of an object names as cancelled, of one of the shards."""
    found = (lane for lane in lanes if lane.lane == CANCELLED_LANE and lane.shard in shards)
    return [block.id for lane in found for block in lane.blocks]


def _wanted(
    holds: HoldMachine, late: Mapping[HoldId, tuple[Target, HeldBlock]], young: Young
) -> dict[Target, set[HoldId]]:
    """Return the holds that may have been released, by target. Staged parts have marks."""
    wanted: dict[Target, set[HoldId]] = {}
    for hold in holds.open.values():
        if not hold.is_staged:
            wanted.setdefault(hold.target, set()).add(hold.block.id)
    for target, units in holds.units.items():
        for unit in units.values():
            wanted.setdefault(target, set()).update(hold.block.id for hold in unit.holds if not hold.is_staged)
    for id_, (target, _) in late.items():
        wanted.setdefault(target, set()).add(id_)
    for lanes in young.values():
        for _, lane in lanes:
            wanted.setdefault(lane.target, set()).update(block.id for block in lane.blocks)
    return wanted


def _committed(holds: HoldMachine, young: Young, delivered: set[HoldId]) -> list[str]:
    """Return the lanes with a hold that its target has, the oldest first."""
    found = {holds.open[each].lane for each in delivered if each in holds.open}
    found |= {
        lane
        for lane, parts in young.items()
        if any(block.id in delivered for _, part in parts for block in part.blocks)
    }
    return sorted(found - {""}, key=lambda lane: [int(part) for part in lane.split(".")])
