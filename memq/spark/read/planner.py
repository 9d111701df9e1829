"""Cuts a topic into the splits of Spark tasks, by pointers. Pure.

A block that was sent again may be in the queue twice within the dedup window W, and is read once. A task reads only a
few batches. So the driver, which takes all pointers in order, compares the sequences with those of earlier batches. It
passes to each task the sequences of its batches that were seen before: nearly always none.

Pointers show that a batch has copies, but not that the first blocks can be read. If damage ends the read, that is
enough. If damage is skipped, the driver names the batches with the first blocks, and the task reads them. It does the
same without a queue: then only those batches show whether a copy has the same content.

Tasks read batches. The ranges of a read partition's tasks follow each other without a gap: one task ends at the
position where the next begins. So the ranges cover pointers without records too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from msgspec import structs
from pyspark.sql.datasource import InputPartition

from memq.client.consumer.fetch.cursor_outcomes import LeftOut
from memq.client.consumer.fetch.pointer_slot import left_out_of
from memq.errors import MemqError
from memq.format.batch import BlockPiece
from memq.format.blocks.header import StoredBlock
from memq.format.pointer import Pointer, ProducerRanges
from memq.format.ranges import Range, RangeSet
from memq.limits import MIB
from memq.notification import Entry
from memq.notification.dedup_window import DedupWindow
from memq.notification.stored_blocks import stored_block
from memq.spark.read.pruning import ReadFilter
from memq.spark.stores import StoreUrls
from memq.topic import Position, ReadPartition

Seen = tuple[int, Range]  # producer, sequences
BATCHES_MAX = 1 << 16
PARTS_MAX = 4_096  # batches of one task
# Number of tasks that share a small read, if each is worth its own cost. It is independent of a machine's cores: a
# repeated read must be cut the same way, because a low-latency write of its rows identifies records by batch and task.
SPREAD_TASKS = 8
SPREAD_BYTES_MIN = 8 * MIB


@dataclass(frozen=True, slots=True)
class TaskRange:
    """A range of a read partition, exclusive of `end`: that of a micro-batch, or of one of its tasks.

    `writers` are the write partitions in it.
    """

    partition: ReadPartition
    writers: tuple[int, ...]
    begin: Position
    end: Position

    @property
    def name(self) -> str:
        """The topic's name."""
        return self.partition.topic

    @property
    def id(self) -> str:
        """The topic's id."""
        return self.partition.topic_id


@dataclass(frozen=True, slots=True)
class TaskAudit:
    """A task's reporting data: the stream's name, brokers, interval (ms), and its ranges."""

    name: str
    brokers: tuple[str, ...]
    interval_ms: int
    stretches: tuple[TaskRange, ...]


def stretches_of(
    splits: Sequence[Split], homes: Iterable[ReadPartition], ranges: Mapping[ReadPartition, TaskRange]
) -> list[tuple[TaskRange, ...]]:
    """Return the stretches of each split. `homes` has the read partition of each of their parts, in order.

    A range without any part goes to the first split.
    """
    if not splits:
        return []
    begins: dict[ReadPartition, list[tuple[int, Position]]] = {partition: [] for partition in ranges}
    each = iter(homes)
    for number, split in enumerate(splits):
        for part in split.parts:
            found = begins[next(each)]
            if not found or found[-1][0] != number:
                found.append((number, Position(part.partition, part.offset, part.low)))
    tasks: list[list[TaskRange]] = [[] for _ in splits]
    for partition, found in begins.items():
        covered = ranges[partition]
        numbers = [number for number, _ in found] or [0]
        cuts = [covered.begin, *(begin for _, begin in found[1:]), covered.end]
        for number, begin, end in zip(numbers, cuts[:-1], cuts[1:], strict=True):
            tasks[number].append(replace(covered, begin=begin, end=end))
    return [tuple(stretches) for stretches in tasks]


class EarlierBatches:
    """The batches of one read partition that passed in the last `window_ms` of queue time, at least."""

    def __init__(self, window_ms: int) -> None:
        self._window_ms = window_ms
        self._batches: deque[tuple[int, Pointer]] = deque()
        self._forgotten_ms: int | None = None  # batches up to this time may be missing

    def note(self, time_ms: int, pointer: Pointer) -> None:
        """Remember a batch; its pointer must name all its producers."""
        self._batches.append((time_ms, pointer))
        while self._batches[0][0] < time_ms - 2 * self._window_ms:  # the dedup window forgets later, in slices
            self._batches.popleft()
        if len(self._batches) > BATCHES_MAX:
            self._forgotten_ms, _ = self._batches.popleft()

    def holders(self, time_ms: int, pointer: Pointer, seen: Sequence[Seen]) -> tuple[Pointer, ...]:
        """Return the batches that hold some of these sequences; none if one of them may be forgotten.

        Without batches, the sequences count as seen.
        """
        if self._forgotten_ms is not None and self._forgotten_ms >= time_ms - 2 * self._window_ms:
            return ()
        return tuple(
            earlier for _, earlier in self._batches if earlier.partition == pointer.partition and _holds(earlier, seen)
        )


def is_seen(seen: Iterable[Seen], producer: int, first: int, next_: int) -> bool:
    """Whether all of these sequences were seen."""
    found = RangeSet()
    for each, (low, high) in seen:
        if each == producer:
            found.add(low, high)
    return not found.holes(first, next_)


def _holds(pointer: Pointer, seen: Sequence[Seen]) -> bool:
    return any(
        low < next_ and first < high
        for producer, (first, next_) in seen
        for each in pointer.producers
        if each.producer == producer
        for low, high in each.ranges
    )


def sound_copies(seen: Iterable[Seen], batches: Iterable[tuple[Pointer, Sequence[BlockPiece]]]) -> tuple[Seen, ...]:
    """Return the part of `seen` in sound blocks of these batches that their pointers do not skip."""
    sound: dict[int, RangeSet] = {}
    for block in sound_blocks(batches):
        sound.setdefault(block.producer_id, RangeSet()).add(block.first_sequence, block.next_sequence)
    return tuple(
        (producer, whole)
        for producer, (first, next_) in seen
        if producer in sound
        for whole in RangeSet(sound[producer].holes(first, next_)).holes(first, next_)
    )


def sound_blocks(batches: Iterable[tuple[Pointer, Sequence[BlockPiece]]]) -> Iterator[StoredBlock]:
    """Yield the sound blocks of these batches, without those that their pointers skip."""
    for pointer, pieces in batches:
        for piece in pieces:
            if piece.header is not None and piece.number not in pointer.skip:
                yield stored_block(piece.header)


@dataclass(frozen=True, slots=True)
class BatchPart:
    """A task's part of one batch: records `low` up to `high` (exclusive; None: to its end).

    `seen` are the sequences that earlier batches had. If damage is skipped, they count as seen only in sound blocks of
    `earlier`, unless that is empty. `copies` are stored blocks with some of these sequences, and perhaps other records.
    With `by_index`, blocks that can't match are not fetched.
    `cause` is the error of an unreadable pointer. An `orphan` is a batch that no pointer would have named.
    An `unwanted` batch is only reported to the audit: its blocks are `left_out`, or in its index if that is None.
    """

    partition: int
    offset: int
    pointer: Pointer | None
    low: int = 0
    high: int | None = None
    seen: tuple[Seen, ...] = ()
    earlier: tuple[Pointer, ...] = ()
    copies: tuple[StoredBlock, ...] = ()
    by_index: bool = False
    orphan: bool = False
    cause: MemqError | None = None
    unwanted: bool = False
    left_out: tuple[LeftOut, ...] | None = None

    @property
    def bytes(self) -> int:
        """Number of stored bytes of the batch; 0 if it is unwanted."""
        return self.pointer.locations[0].length if self.pointer is not None and not self.unwanted else 0


@dataclass(frozen=True, slots=True)
class TaskSettings:
    """Settings shared by all tasks of a read, without keys."""

    urls: StoreUrls
    wanted: ReadFilter
    prefetch_bytes: int
    skip_damaged: bool
    dedup: bool
    missing_s: float
    tags: str | None = None
    where: str | None = None


class Split(InputPartition):
    """The batches that one task reads, in order, and their settings; None without batches.

    PySpark sends tasks the reader in its state before the call of `partitions`, so the settings are here.
    """

    def __init__(self, parts: Sequence[BatchPart], settings: TaskSettings | None) -> None:
        super().__init__(None)
        self.parts = tuple(parts)
        self.settings = settings
        self.audit: TaskAudit | None = None  # what it reports, where a report is wanted


class PartitionPlan:
    """One read partition from `start` to `end` (exclusive): the window before it, then pointers.

    With `names_unwanted`, batches without a wanted tag are parts, too: the audit is to know them.
    """

    def __init__(
        self,
        start: Position,
        end: Position,
        window_ms: int,
        wanted: ReadFilter,
        *,
        dedup: bool,
        keep_earlier: bool = False,
        names_unwanted: bool = False,
    ) -> None:
        self._start = start
        self._end = end
        self._wanted = wanted
        self._dedup = dedup
        self._names_unwanted = names_unwanted
        self._dedup_window = DedupWindow(window_ms)
        self._earlier = EarlierBatches(window_ms) if dedup and keep_earlier else None

    def extend(self, start: Position, end: Position) -> None:
        """Continue at the end of the plan, after a whole batch; seen sequences stay seen."""
        assert start == self._end, f"plan continues at {start}, not at {self._end}"
        assert not start.record_index, f"plan continues inside of a batch, at {start}"
        self._start, self._end = start, end

    def needs_index(self, pointer: Pointer) -> bool:
        """Whether the index is needed: the pointer does not name exactly the producers that readers get."""
        return self._dedup and (bool(pointer.skip) or not pointer.producers_complete)

    def look_back(self, time_ms: int, pointer: Pointer) -> None:
        """Take a pointer of the window before the start."""
        self._dedup_window.advance(time_ms)
        self._note(time_ms, pointer)

    def take(self, entry: Entry, pointer: Pointer | MemqError, *, orphan: bool = False) -> BatchPart | None:
        """Take the next entry; return its part to read, None if there is none."""
        low = self._start.record_index if entry.offset == self._start.pointer_offset else 0
        high = self._end.record_index if entry.offset == self._end.pointer_offset else None
        partition = self._start.read_partition
        if not isinstance(pointer, Pointer):
            return BatchPart(partition, entry.offset, None, cause=pointer)
        if pointer.kind != "data":
            return None
        self._dedup_window.advance(entry.time_ms)
        seen = self._seen(pointer) if self._dedup else ()
        earlier = self._earlier.holders(entry.time_ms, pointer, seen) if self._earlier and seen else ()
        self._note(entry.time_ms, pointer)
        if not self._wanted.may_match(pointer):
            if not self._names_unwanted:
                return None
            named = left_out_of(pointer) if not low and high is None else None
            left_out = tuple(named) if named is not None else None
            return BatchPart(partition, entry.offset, self._slim(pointer), low, high, unwanted=True, left_out=left_out)
        by_index = not self._wanted.surely_matches(pointer)
        held = tuple(self._slim(each) for each in earlier)
        return BatchPart(
            partition, entry.offset, self._slim(pointer), low, high, seen, held, by_index=by_index, orphan=orphan
        )

    def _seen(self, pointer: Pointer) -> tuple[Seen, ...]:
        return tuple(
            (producer.producer, seen)
            for producer in pointer.producers
            for first, next_ in producer.ranges
            for seen in self._dedup_window.seen(pointer.partition, producer.producer, first, next_)
        )

    def _note(self, time_ms: int, pointer: Pointer) -> None:
        if self._earlier is not None:
            self._earlier.note(time_ms, pointer)
        if self._dedup:
            for producer in pointer.producers:
                for first, next_ in producer.ranges:
                    self._dedup_window.note(pointer.partition, producer.producer, first, next_)

    def _slim(self, pointer: Pointer) -> Pointer:
        """Return the pointer without the fields that a task does not need. Without dedup, nothing is skipped."""
        return structs.replace(
            pointer,
            producers=(),
            producers_complete=False,
            adopted=(),
            ended=(),
            named=(),
            extra={},
            skip=pointer.skip if self._dedup else (),
        )


def with_blocks(pointer: Pointer, blocks: Iterable[tuple[int, int, int]]) -> Pointer:
    """Return the pointer with all producers of its batch: (producer, first, next) of each block."""
    return structs.replace(
        pointer, producers=tuple(ProducerRanges(each, ((first, next_),)) for each, first, next_ in blocks)
    )


def spread_bytes(parts: Sequence[BatchPart], bytes_max: int) -> int:
    """Return the bound of a split's stored bytes that divides a small read evenly.

    A small read in one task would leave the other cores idle: 128 MiB with zstd are two seconds of one core. The bound
    is the least one, within 3 %, that makes at most `SPREAD_TASKS` splits.
    """
    low = max(SPREAD_BYTES_MIN, -(-sum(part.bytes for part in parts) // SPREAD_TASKS))
    if low >= bytes_max or _splits(parts, low) <= SPREAD_TASKS:
        return min(low, bytes_max)
    high, step = bytes_max, low // 32
    while high - low > step:
        middle = (low + high) // 2
        low, high = (low, middle) if _splits(parts, middle) <= SPREAD_TASKS else (middle, high)
    return high


def _splits(parts: Sequence[BatchPart], bytes_max: int) -> int:
    """Return the number of splits with this bound."""
    number = size = 0
    for part in parts:
        size += part.bytes
        if not number or size > bytes_max:
            number, size = number + 1, part.bytes
    return number


def split_parts(parts: Iterable[BatchPart], bytes_max: int, settings: TaskSettings) -> list[Split]:
    """Group parts, in order, into splits of about `bytes_max` stored bytes."""
    splits: list[Split] = []
    held: list[BatchPart] = []
    size = 0
    for part in parts:
        if held and (size + part.bytes > bytes_max or len(held) >= PARTS_MAX):
            splits.append(Split(held, settings))
            held, size = [], 0
        held.append(part)
        size += part.bytes
    if held:
        splits.append(Split(held, settings))
    return splits
