"""The open records of a listener: their order, due times and keys, and the floor to commit. Pure.

Theory. Records are taken in order and completed in any order. The floor of a partition is the position of its first
record that is not complete: this position is committed, and nothing behind it. A record that waits, for its due time or
for its key, is *kept*. A partition with too many kept records, or too many batches above its floor, is *stuck*: nothing
more is taken from it until some complete. So memory is bounded, and other partitions continue.

In order, a key of a topic has one record at work. Later records of the key are kept until it is complete.

Tries. A record may end the process of its handler each time. So the first record of an assignment is *begun*: the
committed position counts its try before its handler is called. The next member finds the count. It handles
CAREFUL_RECORDS records one by one, and begins each of them: then the count is of the record that ends the process, and
an answer takes the try back. The try of the first record stays until the record is complete: another one may end the
process meanwhile. An orderly end of the assignment takes the last try back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from memq.client.consumer.assigned import Assigned
from memq.client.consumer.batch import Record, TopicPartition
from memq.client.consumer.fetch.ready_batches import ReadyBatch
from memq.client.consumer.progress import LedgerEntry
from memq.client.listener.retry_records import OriginalRecord, read_retry
from memq.errors import InvalidRequestError
from memq.format.blocks.columns import RecordHeaders
from memq.limits import MIB, TRIED_MAX, TRIES_MAX
from memq.topic import Committed, Position, Totals

KEPT_RECORDS_MAX = 4_096  # of one partition
KEPT_BYTES_MAX = 8 * MIB
OPEN_BATCHES_MAX = 10_000  # of one partition, from its floor on
CAREFUL_RECORDS = 256  # of one partition, after a try without an answer
NO_ANSWER = "the process of its handler ended without an answer"
AHEAD_BYTES_MAX = 16 * MIB  # of fetched batches that are not taken yet
OrderKey = tuple[str, bytes]  # topic and key


@dataclass(slots=True, eq=False)
class OpenPartition:
    """One assignment of a partition.

    `closed`: nothing more is taken of it. `gone`: it was released, or lost.
    """

    assigned: Assigned
    place: TopicPartition
    closed: bool = False
    gone: bool = False
    kept: int = 0
    kept_bytes: int = 0
    working: int = 0  # records that were taken, and are neither kept nor complete
    batches: deque[OpenBatch] = field(default_factory=deque)  # from the floor on
    untaken: deque[OpenBatch] = field(default_factory=deque)
    tried: dict[int, int] = field(default_factory=dict)  # offsets of open records, with tries that had no answer yet
    begun: bool = False  # whether a record was begun in this assignment
    trying: int | None = None  # offset of the begun record whose handler has not answered
    beginning: Work | None = None  # its handler is called when the position with its try is stored
    careful: int = 0  # how many more records are handled one by one
    held_back: deque[Work] = field(default_factory=deque)  # kept until the partition is not busy

    @property
    def busy(self) -> bool:
        """Whether no other record may be handled now."""
        return self.beginning is not None or (self.careful > 0 and self.working > 0)

    def begin(self, offset: int) -> None:
        """Count a try of a record. If too many are tried, one with the fewest tries is forgotten."""
        self.begun, self.trying = True, offset
        self.tried[offset] = min(TRIES_MAX, self.tried.get(offset, 0) + 1)
        if len(self.tried) > TRIED_MAX:
            del self.tried[min(self.tried.keys() - {offset}, key=lambda each: (self.tried[each], each))]

    def take_back(self) -> None:
        """Take the try back that is counted and has no answer yet."""
        if self.trying is not None:
            tries = self.tried.pop(self.trying, 0) - 1
            if tries > 0:
                self.tried[self.trying] = tries
            self.trying = None

    @property
    def stuck(self) -> bool:
        """Whether nothing more is taken until records complete."""
        kept = self.kept >= KEPT_RECORDS_MAX or self.kept_bytes >= KEPT_BYTES_MAX
        return kept or len(self.batches) >= OPEN_BATCHES_MAX


@dataclass(slots=True, eq=False)
class OpenBatch:
    """A batch that is not complete; `following` is its next record to take, None after the last one."""

    partition: OpenPartition
    first: Position
    entry: LedgerEntry
    totals: Totals
    records: Iterator[Record]
    following: Record | None
    left: int  # records that are not taken yet, as far as known
    bytes: int  # their stored size
    open: dict[int, None] = field(default_factory=dict)  # offsets of taken records that are not complete, in order

    def take(self) -> Record:
        """Return the next record, which exists. Raises: CorruptDataError, UnsupportedFormatError."""
        record = self.following
        assert record is not None
        self.following = next(self.records, None)
        self.left = max(0, self.left - 1)
        self.open[record.offset] = None
        if self.following is None:
            self.records, self.left, self.bytes = iter(()), 0, 0
        return record

    @property
    def complete(self) -> bool:
        """Whether all records are complete."""
        return self.following is None and not self.open

    @property
    def floor(self) -> Position:
        """The position of the first record that is not complete; there is one."""
        offset = next(iter(self.open), None)
        if offset is None:
            assert self.following is not None
            offset = self.following.offset
        read_partition = self.partition.place.partition
        return Position.at_offset(read_partition, offset)


@dataclass(slots=True, eq=False)
class Work:
    """One attempt of one record. `headers` are those of the original.

    `fault` says why a record of the retry topic can't be read. `parked`: its key is parked, and it shall be, too.
    `unanswered`: the last try had no answer. `begun`: the position counts this try.
    """

    batch: OpenBatch
    record: Record
    origin: OriginalRecord
    headers: RecordHeaders
    attempt: int = 1
    due_ms: int = 0
    letter: str = ""
    error: str = ""
    fault: str = ""
    key: OrderKey | None = None  # None: no order
    holds_key: bool = False
    parked: bool = False
    unanswered: bool = False
    begun: bool = False

    @property
    def bytes(self) -> int:
        """The size in memory, about."""
        headers = sum(len(name) + len(value or b"") for name, value in self.headers)
        return 200 + len(self.record.value or b"") + len(self.record.key or b"") + headers


class OpenRecords:
    """The open records of one listener; times are Unix ms.

    Records of `retry_topic` wait for their due times.
    """

    def __init__(self, retry_topic: str, *, ordered: bool, ahead: int) -> None:
        self.parked: dict[OrderKey, Position | None] = {}  # keys; with the position of their last letter
        self._retry_topic = retry_topic
        self._ordered = ordered
        self._ahead = ahead
        self._partitions: dict[TopicPartition, OpenPartition] = {}
        self._turn: deque[OpenPartition] = deque()  # partitions with batches to take from
        self._ready: deque[Work] = deque()  # their keys are free now
        self._waiting: list[tuple[int, int, Work]] = []  # a heap by due time
        self._numbers = count()
        self._behind_key: dict[OrderKey, deque[Work]] = {}  # of each key at work: its later records

    # ---- batches --------------------------------------------------------------------------------

    def add(self, ready: ReadyBatch) -> None:
        """Add a batch. Raises: CorruptDataError, UnsupportedFormatError."""
        partition = self._partition_of(ready.assigned)
        records = iter(ready.batch)
        first = next(records, None)
        stored = sum(len(piece.data) for piece in ready.batch.pieces)
        batch = OpenBatch(
            partition, ready.batch.first, ready.entry, ready.totals, records, first, len(ready.batch), stored
        )
        partition.batches.append(batch)
        if first is None:  # all of it is damaged, and skipped
            self._settle(partition)
            return
        if not partition.untaken:
            self._turn.append(partition)
        partition.untaken.append(batch)

    def _partition_of(self, assigned: Assigned) -> OpenPartition:
        place = assigned.topic_partition
        found = self._partitions.get(place)
        if found is not None and found.assigned is assigned:
            return found
        if found is not None:
            self.close([place])
            self.drop([place])
        made = self._partitions[place] = OpenPartition(assigned, place, tried=dict(assigned.ledger.tried))
        made.careful = CAREFUL_RECORDS if made.tried else 0
        return made

    def close(self, places: Iterable[TopicPartition]) -> list[OpenPartition]:
        """Take nothing more from these partitions; return them.

        Their records at work may still complete.
        """
        found = [self._partitions[place] for place in places if place in self._partitions]
        for partition in found:
            partition.untaken.clear()
            partition.closed = True
            if partition in self._turn:
                self._turn.remove(partition)
        left = [work for *_, work in self._waiting if work.batch.partition.closed]
        self._waiting = sorted(entry for entry in self._waiting if not entry[2].batch.partition.closed)
        for key, behind in self._behind_key.items():
            self._behind_key[key] = deque(work for work in behind if not work.batch.partition.closed)
        ready, self._ready = self._ready, deque()
        for work in ready:
            (left if work.batch.partition.closed else self._ready).append(work)
        for partition in found:
            left += partition.held_back
            partition.held_back.clear()
            if partition.beginning is not None:
                left.append(partition.beginning)
                partition.beginning = None
            partition.take_back()
        for work in left:
            self._free_key(work)
        return found

    def close_all(self) -> None:
        """Take nothing more from any partition."""
        self.close(list(self._partitions))

    def drop(self, places: Iterable[TopicPartition]) -> None:
        """Forget these partitions: what completes then moves no floor."""
        for place in places:
            partition = self._partitions.pop(place, None)
            if partition is not None:
                partition.gone = True

    @property
    def wants_more(self) -> bool:
        """Whether another batch may be added."""
        free = [batch for partition in self._turn if not partition.stuck for batch in partition.untaken]
        return sum(batch.left for batch in free) < self._ahead and sum(batch.bytes for batch in free) < AHEAD_BYTES_MAX

    def stuck(self) -> set[TopicPartition]:
        """Return the partitions of which nothing more may be fetched."""
        return {place for place, each in self._partitions.items() if each.stuck and not each.closed}

    def working(self, partitions: Iterable[OpenPartition] | None = None) -> int:
        """Return how many records are at work: of these partitions, or of all."""
        found = self._partitions.values() if partitions is None else partitions
        return sum(partition.working for partition in found)

    # ---- records --------------------------------------------------------------------------------

    def take(self, now_ms: int) -> Work | None:
        """Return a record to work on now; None if none is ready.

        Raises: CorruptDataError, UnsupportedFormatError.
        """
        while True:
            work = self._next(now_ms)
            if work is None:
                return None
            partition = work.batch.partition
            if work.due_ms > now_ms and not work.holds_key:
                self._keep(work)
                heappush(self._waiting, (work.due_ms, next(self._numbers), work))
            elif partition.busy:
                self._keep(work)
                partition.held_back.append(work)
            elif self._has_key(work):
                work.parked = work.key in self.parked and not work.letter
                if self._must_begin(work):
                    self._begin(work)
                    continue
                partition.working += 1
                return work

    def _next(self, now_ms: int) -> Work | None:
        if self._ready:
            return self._unkept(self._ready.popleft())
        if self._waiting and self._waiting[0][0] <= now_ms:
            return self._unkept(heappop(self._waiting)[2])
        for _ in range(len(self._turn)):
            partition = self._turn[0]
            if partition.stuck or partition.busy:
                self._turn.rotate(-1)
                continue
            batch = partition.untaken[0]
            work = self._work_of(batch, batch.take())
            if batch.following is None:
                partition.untaken.popleft()
            if partition.untaken:
                self._turn.rotate(-1)
            else:
                self._turn.popleft()
            return work
        return None

    def _work_of(self, batch: OpenBatch, record: Record) -> Work:
        origin = OriginalRecord(batch.partition.place.topic, record.position, record.timestamp_ms)
        work = Work(batch, record, origin, record.headers)
        tries = batch.partition.tried.get(record.offset, 0)
        if origin.topic == self._retry_topic:
            try:
                note, work.headers = read_retry(record.headers)
            except InvalidRequestError as error:
                work.fault = str(error)
                return work
            work.origin, work.attempt, work.error, work.letter = note.origin, note.attempt, note.error, note.letter
            work.due_ms = note.due_ms
        if tries:
            work.attempt, work.error, work.unanswered = work.attempt + tries, NO_ANSWER, True
        if self._ordered and record.key is not None:
            work.key = (work.origin.topic, record.key)
        return work

    def _has_key(self, work: Work) -> bool:
        """Give a record its key if that is free; else keep the record behind the others of the key."""
        if work.key is None or work.holds_key:
            return True
        behind = self._behind_key.get(work.key)
        if behind is None:
            self._behind_key[work.key] = deque()
            work.holds_key = True
            return True
        self._keep(work)
        behind.append(work)
        return False

    def again(self, work: Work, due_ms: int, error: str) -> None:
        """Keep a record for its next attempt. It keeps its key."""
        work.batch.partition.working -= 1
        if work.batch.partition.closed:
            self._free_key(work)
            return
        work.attempt, work.error, work.due_ms, work.unanswered = work.attempt + 1, error, due_ms, False
        if work.begun and work.batch.partition.careful:
            work.batch.partition.take_back()
            work.begun = False
        self._keep(work)
        heappush(self._waiting, (due_ms, next(self._numbers), work))
        self._let_others(work.batch.partition)

    def complete(self, work: Work) -> None:
        """Note that a record is complete: the floor may move over it."""
        partition = work.batch.partition
        partition.working -= 1
        work.batch.open.pop(work.record.offset, None)
        partition.tried.pop(work.record.offset, None)
        if partition.trying == work.record.offset:
            partition.trying = None
        self._free_key(work)
        if not partition.gone:
            self._settle(partition)
        partition.careful = max(0, partition.careful - 1)
        self._let_others(partition)

    def abandon(self, work: Work) -> None:
        """Note that a record is no longer at work, and not complete.

        Its key stays at work: no later record passes.
        """
        work.batch.partition.working -= 1

    @property
    def next_due_ms(self) -> int | None:
        """When the first kept record is due."""
        return self._waiting[0][0] if self._waiting else None

    # ---- tries ----------------------------------------------------------------------------------

    @property
    def beginning(self) -> list[Work]:
        """The records whose handlers are called when the positions of their partitions are stored."""
        return [each.beginning for each in self._partitions.values() if each.beginning is not None]

    def begun(self, works: Iterable[Work]) -> None:
        """Note that the positions with the tries of these records are stored."""
        for work in works:
            partition = work.batch.partition
            if partition.beginning is work:
                partition.beginning = None
                self._ready.append(work)
                self._let_others(partition)

    def _must_begin(self, work: Work) -> bool:
        """Whether a try must be counted first: of the first record of an assignment, and of those one by one."""
        partition = work.batch.partition
        handled = not (work.begun or work.parked or work.fault)
        return handled and (not partition.begun or partition.careful > 0)

    def _begin(self, work: Work) -> None:
        work.begun, work.batch.partition.beginning = True, work
        work.batch.partition.begin(work.record.offset)
        self._keep(work)

    def _let_others(self, partition: OpenPartition) -> None:
        """Let the records that were held back be taken, if nothing else holds them back."""
        if not partition.busy:
            self._ready.extend(partition.held_back)
            partition.held_back.clear()

    # ---- floors ---------------------------------------------------------------------------------

    def settle_floors(self) -> None:
        """Report the floor of each partition to its ledger, before a commit."""
        for partition in self._partitions.values():
            if not partition.batches:
                continue
            batch, ledger = partition.batches[0], partition.assigned.ledger
            at = batch.floor
            ledger.note_tried(sorted(partition.tried.items()), Committed(at, batch.totals))
            if at == batch.first:
                continue  # the mark of this position is that of the pointer before
            committed = Committed(at, batch.totals.plus(at.record_index, 0), batch.entry.behind.mark)
            ledger.reach(batch.entry, committed)

    def _settle(self, partition: OpenPartition) -> None:
        while partition.batches and partition.batches[0].complete:
            partition.assigned.ledger.finish_entry(partition.batches.popleft().entry)

    # ---- kept records ---------------------------------------------------------------------------

    def _keep(self, work: Work) -> None:
        partition = work.batch.partition
        partition.kept += 1
        partition.kept_bytes += work.bytes

    def _unkept(self, work: Work) -> Work:
        partition = work.batch.partition
        partition.kept -= 1
        partition.kept_bytes -= work.bytes
        return work

    def _free_key(self, work: Work) -> None:
        """Give the key of a record to the next one behind it."""
        if work.key is None or not work.holds_key:
            return
        work.holds_key = False
        behind = self._behind_key[work.key]
        if behind:
            first = behind.popleft()
            first.holds_key = True
            self._ready.append(first)
        else:
            del self._behind_key[work.key]
