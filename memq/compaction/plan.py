"""Selects pointers of a read partition for large objects: runs that are old enough. Pure."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Self

from memq.errors import InvalidSettingError
from memq.format.compaction_manifest import CompactionManifest, LeftPart, PartRef
from memq.format.key import is_large_object
from memq.format.pointer import Location, Pointer, named_since_ms, read_pointer
from memq.format.totals import contended_ms
from memq.limits import COMPACTION_POINTER_BYTES_MAX, MIB, OBJECT_BATCHES_MAX
from memq.notification import Entry, PointerReader, Span
from memq.notification.log_reader import entries_between, valid_span
from memq.settings import parse_size, parse_time_ms
from memq.topic import CLOCK_ERROR_MS, ReadPartition, TopicSettings

OBJECT_BYTES = 128 * MIB
OBJECT_BYTES_MAX = 256 * MIB  # a task holds one object in memory
POINTERS_MAX = OBJECT_BATCHES_MAX // 4  # of one part


class TailNeeds:
    """Computes the tail of a read partition that must stay; takes its pointers in order.

    In each write partition, the last pointer stays with the pointers that settle its totals (`memq.format.totals`).
    The last `opened` that names producers also stays.
    """

    def __init__(self) -> None:
        self._last_ms: dict[int, int] = {}
        self._newest: dict[int, tuple[int, int]] = {}  # epoch, and `named_since_ms` of its last pointer

    def take(self, entry: Entry, pointer: Pointer) -> None:
        """Take the next pointer."""
        writer = pointer.partition
        self._last_ms[writer] = max(entry.time_ms, self._last_ms.get(writer, entry.time_ms))
        if pointer.epoch >= self._newest.get(writer, (0, 0))[0]:
            self._newest[writer] = (pointer.epoch, named_since_ms(pointer, entry.time_ms))

    def since_ms(self, settings: TopicSettings) -> Mapping[int, int]:
        """Return by write partition the queue time from which on entries are needed."""
        settled_ms = contended_ms(settings.stale_publish_ms)
        return {
            writer: min(time_ms, self._newest[writer][1] or time_ms) - settled_ms
            for writer, time_ms in self._last_ms.items()
        }


class RepeatedBatches:
    """Finds the offsets where a log may be trimmed: those that separate no two pointers of one batch.

    Theory. The queue may be slow with a try to publish, so that the next try and later batches land before it: 5 6 7 5
    8. A log that begins with the second 5 shows no 6 and 7, as if it had lost them. Then the sweep keeps and reports
    their objects (`memq.broker.sweep.log_coverage`). So retention and compaction leave the first 5, too.

    First all pointers of the log go through `note`, in order, then those from its beginning through `take`.
    """

    def __init__(self) -> None:
        self._next: dict[tuple[int, int], int] = {}  # by writer and epoch: the number after the highest batch
        self._last: dict[tuple[int, int, int], int] = {}  # by repeated batch: the offset of its last pointer
        self._open: dict[tuple[int, int, int], None] = {}  # repeated batches with a pointer on both sides

    def note(self, entry: Entry, pointer: Pointer | None) -> None:
        """Note the next pointer, None for a damaged one."""
        if pointer is None or pointer.kind != "data":
            return
        epoch = (pointer.partition, pointer.epoch)
        next_ = self._next.get(epoch, 0)
        if pointer.batch_sequence < next_:
            self._last[*epoch, pointer.batch_sequence] = entry.offset
        self._next[epoch] = max(next_, pointer.batch_sequence + 1)

    def take(self, entry: Entry, pointer: Pointer | None) -> bool:
        """Take the next pointer; return whether the log may be trimmed after it."""
        if pointer is not None and pointer.kind == "data":
            batch = (pointer.partition, pointer.epoch, pointer.batch_sequence)
            if entry.offset < self._last.get(batch, 0):
                self._open[batch] = None
            else:
                self._open.pop(batch, None)
        return not self._open


def window_since_ms(settings: TopicSettings, now_ms: int) -> int:
    """Return the queue time from which on an opening at `now_ms` rebuilds the dedup window."""
    return now_ms - settings.dedup_window_ms - CLOCK_ERROR_MS


@dataclass(frozen=True, slots=True)
class CompactionRule:
    """Which entries are copied: those older than `age_ms`, in runs of about `object_bytes`.

    With `rest` the last run may be smaller.
    """

    age_ms: int
    object_bytes: int = OBJECT_BYTES
    rest: bool = False

    @classmethod
    def of(cls, age: str, object_bytes: str, *, rest: bool) -> Self:
        """Return the rule of a command's options, a time such as `7d` and a size. Raises: InvalidSettingError."""
        age_ms, size = parse_time_ms(age), parse_size(object_bytes)
        if age_ms is None or age_ms < 0:
            raise InvalidSettingError(f"--age '{age[:120]}' is no time", hint="write 7d, 12h or 90min")
        if size is None or not 0 < size <= OBJECT_BYTES_MAX:
            raise InvalidSettingError(
                f"--object-bytes '{object_bytes[:120]}' is no size of an object",
                hint=f"write 128MiB; at most {OBJECT_BYTES_MAX >> 20}MiB are allowed",
            )
        return cls(age_ms, size, rest)


def copied_location(pointer: Pointer | None) -> Location | None:
    """Return the location of the batch to copy; None when there is nothing to copy.

    Nothing is copied for a damaged pointer, one without a batch, and one into a large object.
    """
    if pointer is None or pointer.kind != "data" or is_large_object(pointer.locations[0].key):
        return None
    return pointer.locations[0]


async def spans_to_compact(
    queue: PointerReader,
    partition: ReadPartition,
    start: int,
    settings: TopicSettings,
    rule: CompactionRule,
    now_ms: int,
) -> AsyncIterator[Span]:
    """Yield the runs of entries from offset `start` on, in order; each becomes a large object.

    The pointers are read twice: the first time for the tail that an opening needs. Raises: as `PointerReader.read`;
    UnsupportedFormatError for a pointer of a newer version.
    """
    all_ = Span(start, (await valid_span(queue, partition)).end)
    before_ms = await _compact_before_ms(queue, partition, all_, settings, rule, now_ms)
    first, size, pointer_bytes, count = -1, 0, 0, 0
    next_ = start
    async for entry, pointer in entries_of(queue, partition, all_):
        if entry.time_ms >= before_ms:
            break
        location = copied_location(pointer)
        length = location.length if location is not None else 0
        full = size and size + length > rule.object_bytes
        if first >= 0 and (
            full or pointer_bytes + len(entry.body) > COMPACTION_POINTER_BYTES_MAX or count == POINTERS_MAX
        ):
            yield Span(first, next_)
            first = -1
        if first < 0:
            first, size, pointer_bytes, count = entry.offset, 0, 0, 0
        size, pointer_bytes, count = size + length, pointer_bytes + len(entry.body), count + 1
        next_ = entry.offset + 1
    if first >= 0 and (rule.rest or size >= rule.object_bytes):
        yield Span(first, next_)


async def entries_of(
    queue: PointerReader, partition: ReadPartition, span: Span
) -> AsyncIterator[tuple[Entry, Pointer | None]]:
    """Yield each entry of a span with its pointer, None for a damaged one.

    The queue has shown all of `span` before. A later answer may show an earlier end, where it would stop too soon.
    Raises: as `entries_between`; UnsupportedFormatError for a pointer of a newer version.
    """
    async for entries in entries_between(queue, partition, span.begin, span.end):
        for entry in entries:
            pointer = read_pointer(entry.body, newer="raise")
            yield entry, pointer if isinstance(pointer, Pointer) else None


async def trim_offset(queue: PointerReader, partition: ReadPartition, before: int) -> int:
    """Return the greatest offset, at most `before`, at which the log may be trimmed (`RepeatedBatches`).

    Raises: as `entries_of`.
    """
    span, repeated = await valid_span(queue, partition), RepeatedBatches()
    async for entry, pointer in entries_of(queue, partition, span):
        repeated.note(entry, pointer)
    trimmed_to, whole = span.begin, True
    async for entry, pointer in entries_of(queue, partition, Span(span.begin, min(before, span.end))):
        whole = repeated.take(entry, pointer)
        trimmed_to = entry.offset + 1 if whole else trimmed_to
    return before if whole else trimmed_to


def following(manifest: CompactionManifest, parts: tuple[PartRef, ...]) -> CompactionManifest:
    """Return the successor with more parts at its end."""
    return CompactionManifest(
        number=manifest.number + 1,
        cluster=manifest.cluster,
        topic=manifest.topic,
        topic_id=manifest.topic_id,
        partition=manifest.partition,
        next=parts[-1].next if parts else manifest.next,
        parts=manifest.parts + parts,
        left=manifest.left,
    )


def without(manifest: CompactionManifest, count: int, now_ms: int, kept_ms: int) -> CompactionManifest:
    """Return the successor without its first `count` parts; `left` names these for `kept_ms` or longer."""
    left = tuple(each for each in manifest.left if each.since_ms >= now_ms - 2 * kept_ms)
    return CompactionManifest(
        number=manifest.number + 1,
        cluster=manifest.cluster,
        topic=manifest.topic,
        topic_id=manifest.topic_id,
        partition=manifest.partition,
        next=manifest.next,
        parts=manifest.parts[count:],
        left=left + tuple(LeftPart(part=part, since_ms=now_ms) for part in manifest.parts[:count]),
    )


async def _compact_before_ms(
    queue: PointerReader,
    partition: ReadPartition,
    span: Span,
    settings: TopicSettings,
    rule: CompactionRule,
    now_ms: int,
) -> int:
    """Return the queue time below which entries are copied; the first later entry ends the compacted part."""
    needs = TailNeeds()
    async for entry, pointer in entries_of(queue, partition, span):
        if pointer is not None:
            needs.take(entry, pointer)
    age_ms = min(now_ms - rule.age_ms, window_since_ms(settings, now_ms))
    return min([age_ms, *needs.since_ms(settings).values()])
