"""The audit against the truth: no finding in a sound log, and one for each removed record.

The truth is the checker's: which sequences lie in the log, as the bytes in the store showed them when they landed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from memq.audit.checks.object_reads import ReadObject, read_by_ranges
from memq.audit.collector import audit
from memq.audit.finding import Kind
from memq.audit.verdict import FINDINGS_MAX, Verdict
from memq.errors import CorruptDataError, NotFoundError
from memq.format.blocks.header import Buffer
from memq.format.held_sequences import is_held
from memq.format.pointer import Location
from memq.notification import Entries, PointerReader, Span
from memq.simulation.world.node import EPOCH_MS
from memq.topic import ReadPartition, Topic
from tests.simulation.read_log import ReadLog
from tests.simulation.reader import LogEntry, Source, delivered_twice
from tests.simulation.shard_answers import ShardAnswers

WRONG = (Kind.CORRUPT, Kind.POINTER, Kind.BATCH_HOLE, Kind.FAULT, Kind.UNREAD, Kind.EARLY, Kind.UNRELEASED)


class BoundedQueue:
    """A queue whose logs end where `logs` end; later pointers are left out. See `memq.notification.PointerReader`."""

    def __init__(self, queue: PointerReader, logs: Mapping[ReadPartition, ReadLog]) -> None:
        self._queue = queue
        self._ends = {partition: len(log.entries) for partition, log in logs.items()}

    async def read(self, partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
        """See `PointerReader.read`."""
        return await self._queue.read(partition, offset, bytes_max)

    async def span(self, partition: ReadPartition) -> Span:
        """See `PointerReader.span`."""
        span = await self._queue.span(partition)
        end = min(span.end, self._ends.get(partition, 0))
        return Span(min(span.begin, end), end)

    async def seek_time(self, partition: ReadPartition, time_ms: int) -> int:
        """See `PointerReader.seek_time`."""
        return await self._queue.seek_time(partition, time_ms)

    async def wait(self, ends: dict[ReadPartition, int], timeout_s: float) -> None:
        """See `PointerReader.wait`."""
        await self._queue.wait(ends, timeout_s)


class WornQueue(BoundedQueue):
    """A queue whose pointer at one offset can't be read any more."""

    def __init__(
        self, queue: PointerReader, logs: Mapping[ReadPartition, ReadLog], partition: ReadPartition, offset: int
    ) -> None:
        super().__init__(queue, logs)
        self._worn = (partition, offset)

    async def read(self, partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
        """See `PointerReader.read`."""
        entries = await super().read(partition, offset, bytes_max)
        worn = (replace(entry, body=b"") if (partition, entry.offset) == self._worn else entry for entry in entries)
        return Entries(worn, entries.next)


class LackingQueue(WornQueue):
    """A queue that has lost the pointer at one offset, and does not show that."""

    async def read(self, partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
        """See `PointerReader.read`."""
        entries = await BoundedQueue.read(self, partition, offset, bytes_max)
        return Entries((each for each in entries if (partition, each.offset) != self._worn), entries.next)


class AuditRules:
    """Audits one topic in a queue and a store in memory, which `logs` describe; `fail` gets each finding.

    `shards` are those of held records.
    """

    def __init__(
        self,
        topic: Topic,
        queue: PointerReader,
        objects: Mapping[str, bytes],
        logs: Mapping[ReadPartition, ReadLog],
        fail: Callable[[str], None],
        shards: ShardAnswers,
    ) -> None:
        self._shards = shards
        self._topic = topic
        self._queue = queue
        self._objects = objects
        self._logs = logs
        self._fail = fail

    async def check(self, now_s: float, draw: random.Random) -> None:
        """Audit the log as it is, then as it would be without one thing that was drawn."""
        now_ms = int(EPOCH_MS + now_s * 1000)
        self._check_sound(*await self._settled_audit(now_ms))
        named = [
            (partition, entry)
            for partition, log in self._logs.items()
            for entry in log.entries[log.begin :]
            if entry.pointer.kind == "data"
        ]
        if named:
            await self._check_damaged(*draw.choice(named), now_ms, draw)
        units = [(partition, entry) for partition, log in self._logs.items() for entry in _units_once(log)]
        if units:
            await self._check_without_unit(*draw.choice(units), now_ms)

    async def _settled_audit(self, now_ms: int) -> tuple[Verdict, Mapping[ReadPartition, ReadLog]]:
        """Audit the logs up to their present ends: delayed records land later. Return these logs, too.

        It repeats until retention took no pointers meanwhile: else what was read is more than what is there.
        """
        while True:
            logs = {partition: log.snapshot() for partition, log in self._logs.items()}
            queue = BoundedQueue(self._queue, logs)
            verdict = await audit(
                self._topic, queue, object_reader(self._objects), now_ms, ask_released=self._shards.ask
            )
            if all(log.begin == self._logs[partition].begin for partition, log in logs.items()):
                return verdict, logs

    # ---- a sound log -------------------------------------------------------------------------------

    def _check_sound(self, verdict: Verdict, logs: Mapping[ReadPartition, ReadLog]) -> None:
        for kind in WRONG:
            found = verdict.finding(kind)
            holes = _batch_holes(logs.values(), self._topic.settings.late_ms) if kind is Kind.BATCH_HOLE else 0
            if found.count != holes:
                where = f": {found.findings[0]}" if found.findings else ""
                self._fail(f"the audit names {found.count} of '{kind.value}', not {holes}{where}")
        twice = [delivered_twice(log.entries[log.begin :]) for log in logs.values()]
        records = sum(ranges.total for sources in twice for ranges in sources.values())
        found = verdict.finding(Kind.DOUBLED)
        if found.count != records:
            where = f", the first at {found.findings[0]}" if found.findings else ""
            self._fail(f"the audit of a sound log names {found.count} of 'doubled'{where}, {records} are there twice")
        lying, landed = (_sequences(logs.values(), left=left) for left in (True, False))
        self._check_held(verdict, lying)
        for balance in verdict.balances:
            there = lying.pop((balance.partition, balance.producer), {})
            if balance.delivered != len(there):
                who = f"producer {balance.producer:016x} in partition {balance.partition}"
                self._fail(f"the audit counts {balance.delivered} records of {who}, {len(there)} are there")
            ever = landed.get((balance.partition, balance.producer), {})
            # Blocks acked with 1 may land after later ones. If retention took a later one then, it is an unproven hole.
            missed = [(hole, ever) for hole in balance.lost] + [(hole, there) for hole in balance.unproven]
            for (first, next_), found_there in missed:
                known = next((number for number in range(first, next_) if number in found_there), None)
                if known is not None:
                    self._fail(
                        f"the audit misses sequence {known} of producer {balance.producer:016x}, which was there"
                    )
        left_out = verdict.coverage.producers - len(verdict.balances)  # a verdict lists BALANCES_MAX of them
        if len(lying) > left_out:
            self._fail(f"the audit does not know the producers {list(lying)[:3]}")

    def _check_held(self, verdict: Verdict, lying: dict[Source, dict[int, None]]) -> None:
        """Check what the audit says of held records, and take them out of `lying`."""
        held = {source: found for source, found in lying.items() if is_held(min(found))}
        for source in held:
            del lying[source]
        records = sum(len(found) for found in held.values())
        if verdict.coverage.held != records:
            self._fail(f"the audit counts {verdict.coverage.held} held records, {records} are there")
        missing = missing_held(verdict)
        if missing > self._shards.lost_records:
            self._fail(
                f"the audit of a sound log misses {missing} held records: {verdict.finding(Kind.LOST).findings[0]}"
            )

    def sequences(self) -> dict[Source, dict[int, None]]:
        """Return the sequences that ever landed, by producer."""
        return _sequences(self._logs.values(), left=False)

    async def _check_without_unit(self, partition: ReadPartition, entry: LogEntry, now_ms: int) -> None:
        """Take a pointer with units away without a trace: the audit must call its records lost."""
        queue = LackingQueue(self._queue, self._logs, partition, entry.offset)
        objects = object_reader(self._objects)
        verdict = await audit(self._topic, queue, objects, now_ms, ask_released=self._shards.ask)
        records = sum(block.following - block.first for block in entry.blocks)
        missing = missing_held(verdict)
        if not self._logs[partition].begin and not records <= missing <= records + self._shards.lost_records:
            self._fail(f"the audit misses {missing} held records without pointer {entry.offset}, which has {records}")

    # ---- a damaged log -----------------------------------------------------------------------------

    async def _check_damaged(self, partition: ReadPartition, entry: LogEntry, now_ms: int, draw: random.Random) -> None:
        """Take an object, a byte or a pointer away: the audit must say so, and locate it.

        An object may have the batches of many pointers, of which a verdict names the first `FINDINGS_MAX`. Between the
        put of a manifest and the trim of the queue, a compacted batch is there twice: one of the two suffices.
        """
        log = self._logs[partition]
        if entry.offset >= log.queue_begin and entry.offset in log.moved:
            return
        queue, objects = self._queue, dict(self._objects)
        location = self._logs[partition].locations(entry)[0]
        how, kind = draw.choice([("object", Kind.CORRUPT), ("byte", Kind.CORRUPT), ("pointer", Kind.POINTER)])
        if how == "object":
            del objects[location.key]
        elif how == "byte":
            body = bytearray(objects[location.key])
            body[location.offset + draw.randrange(location.length)] ^= 1 << draw.randrange(8)
            objects[location.key] = bytes(body)
        else:
            queue = WornQueue(queue, self._logs, partition, entry.offset)
        verdict = await audit(self._topic, queue, object_reader(objects), now_ms)
        if entry.offset < self._logs[partition].begin:
            return  # retention took it meanwhile
        findings = verdict.finding(kind).findings
        if verdict.passed:
            self._fail(f"the audit says '{verdict.outcome.value}' without the {how} of pointer {entry.offset}")
        elif len(findings) < FINDINGS_MAX and all(finding.offset != entry.offset for finding in findings):
            self._fail(f"the audit does not name pointer {entry.offset}, whose {how} is damaged")


def _units_once(log: ReadLog) -> list[LogEntry]:
    """Return the pointers of a whole log in the queue with held records alone, none of which comes twice."""
    if log.begin or log.moved:
        return []
    counts = Counter(block.source for entry in log.entries for block in entry.blocks)
    return [
        entry
        for entry in log.entries
        if entry.blocks
        and not entry.pointer.skip
        and all(is_held(block.first) for block in entry.blocks)
        and all(
            counts[block.source] == sum(each.source == block.source for each in entry.blocks) for block in entry.blocks
        )
    ]


def missing_held(verdict: Verdict) -> int:
    """Return how many held records a verdict calls lost; those of producers are in its balances."""
    lost = sum(next_ - first for balance in verdict.balances for first, next_ in balance.lost)
    return verdict.finding(Kind.LOST).count - lost


def object_reader(objects: Mapping[str, bytes]) -> ReadObject:
    """Return what reads objects at once, and never fails for what is there."""

    async def read_range(store: str, key: str, offset: int, length: int) -> bytes:
        body = objects.get(key)
        if body is None:
            raise NotFoundError(f"object '{key}' of {store} does not exist")
        if offset + length > len(body):
            raise CorruptDataError(f"object '{key}' has {len(body)} bytes, asked for {length} from {offset}")
        return body[offset : offset + length]

    async def read(location: Location, *, whole: bool) -> Buffer:
        if not whole:
            return await read_range(location.store, location.key, location.offset, location.length)
        return await read_by_ranges(read_range, location)

    return read


def _batch_holes(logs: Iterable[ReadLog], late_ms: int) -> int:
    """Return how many batches are missing before others of their epoch, in logs that were cut.

    What follows within `late_ms` of the first pointer that retention left may be a copy of what it took. No batch
    before such a one is known to be missing.
    """
    numbers: dict[tuple[int, int], set[int]] = {}  # by write partition and epoch
    starts: dict[tuple[int, int], int | None] = {}
    for log in logs:
        copies_ms: dict[int, int] = {}  # by write partition
        for entry in log.entries[log.begin :] if log.cut_at is not None else ():
            pointer = entry.pointer
            expired = log.begin > 0 and pointer.totals.records > 0
            young = entry.time_ms > copies_ms.setdefault(pointer.partition, entry.time_ms + late_ms if expired else -1)
            epoch = (pointer.partition, pointer.epoch)
            starts.setdefault(epoch, 0 if young else None)
            if pointer.kind == "data":
                numbers.setdefault(epoch, set()).add(pointer.batch_sequence)
                if young:
                    start = starts[epoch]
                    starts[epoch] = pointer.batch_sequence if start is None else min(start, pointer.batch_sequence)
    found = ((numbers[epoch], start) for epoch, start in starts.items() if start is not None and epoch in numbers)
    return sum(max(batches) + 1 - start - sum(each >= start for each in batches) for batches, start in found)


def _sequences(logs: Iterable[ReadLog], *, left: bool) -> dict[Source, dict[int, None]]:
    """Return the sequences that ever landed, or those that retention has left, by producer."""
    found: dict[Source, dict[int, None]] = {}
    for log in logs:
        for entry in log.entries[log.begin if left else 0 :]:
            for block in entry.blocks:
                found.setdefault(block.source, {}).update(dict.fromkeys(range(block.first, block.following)))
    return found
