"""The reference reader: the records that any reader must deliver, from pointers and objects alone. Pure.

It shares the formats with the product, and nothing else: no prefetch, no cache, memory without end. A reader that
starts at a position first reads the dedup window before it; the stream must then be the same.

A copy is a block with the sequences and the records of one before it. One with known sequences and other records is
delivered: see docs/adr/0013-one-identity-one-content.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from memq.format.blocks.columns import open_block
from memq.format.blocks.header import HEADERS, TIMESTAMP, BlockHeader, parse_header, scope_of
from memq.format.pointer import Pointer
from memq.format.ranges import RangeSet

Source = tuple[int, int]  # write partition, producer id
Fetch = Callable[[str, int, int], bytes]  # key, offset, length


class FindingError(AssertionError):
    """An entry of the log breaks a rule."""


def object_bytes(objects: Mapping[str, bytes], key: str, offset: int, length: int) -> bytes:
    """Return bytes of an object. Raises: FindingError."""
    body = objects.get(key)
    if body is None or offset + length > len(body):
        raise FindingError(f"object '{key}' has no bytes {offset}+{length}: pointer before object")
    return body[offset : offset + length]


RetryTopicRecord = tuple[int, bytes, tuple[tuple[str, bytes | None], ...]]  # index in the batch, value, headers


@dataclass(frozen=True, slots=True)
class LogBlock:
    """One block of a batch: its producer, and the index of its first record in the batch.

    `content` is the checksum of its records, without the time at which they were sealed.
    """

    source: Source
    first: int
    following: int
    record_index: int
    values: tuple[bytes, ...]
    checksum: int = 0
    content: int = 0


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One pointer with what it points to; `blocks` leaves out those that the pointer says to skip."""

    offset: int
    time_ms: int
    pointer: Pointer
    blocks: tuple[LogBlock, ...]


@dataclass(frozen=True, slots=True)
class Delivered:
    """One record of the stream: position in the queue, identity, value."""

    offset: int
    record_index: int
    source: Source
    sequence: int
    value: bytes


def read_retry_topic(pointer: Pointer, fetch: Fetch) -> list[RetryTopicRecord]:
    """Return the index, value and headers of each record that a sound pointer points to."""
    if pointer.kind != "data":
        return []
    location = pointer.locations[0]
    data = memoryview(fetch(location.key, location.offset, location.length))
    found: list[RetryTopicRecord] = []
    at = number = index = 0
    while at < len(data):
        length = parse_header(data, at).length
        block = open_block(data[at : at + length])
        values = block.values()
        headers = block.headers() if block.header.flags & HEADERS else [()] * len(values)
        if number not in pointer.skip:
            rows = enumerate(zip(values, headers, strict=True), index)
            found += [(row, value or b"", pairs) for row, (value, pairs) in rows]
        index, number, at = index + block.count, number + 1, at + length
    return found


def read_entry(offset: int, time_ms: int, pointer: Pointer, fetch: Fetch) -> LogEntry:
    """Read what a pointer points to, with all checks of the format.

    Raises: FindingError when object and pointer differ; what `fetch` and the format raise.
    """
    if pointer.kind != "data":
        return LogEntry(offset, time_ms, pointer, ())
    location = pointer.locations[0]
    data = memoryview(fetch(location.key, location.offset, location.length))
    blocks: list[LogBlock] = []
    at = number = records = 0
    skipped = dict.fromkeys(pointer.skip)
    while at < len(data):
        length = parse_header(data, at).length
        block = open_block(data[at : at + length])
        if number not in skipped:
            header = block.header
            if header.scope != scope_of(bytes.fromhex(pointer.topic_id), pointer.partition):
                raise FindingError(f"block {header.first_sequence} at {offset} belongs to another partition")
            values = tuple(value or b"" for value in block.values())
            source = (pointer.partition, header.producer_id)
            spans = (header.first_sequence, header.next_sequence)
            blocks.append(LogBlock(source, *spans, records, values, header.checksum, _content(header)))
        records += block.count
        number += 1
        at += length
    if records != pointer.records:
        raise FindingError(f"pointer at {offset} says {pointer.records} records, its batch holds {records}")
    return LogEntry(offset, time_ms, pointer, tuple(blocks))


def _content(header: BlockHeader) -> int:
    """Return the checksum of a block, as if records without a time of their own had been sealed at time 0."""
    return header.checksum if header.flags & TIMESTAMP else header.checksum_at(0)


class ReferenceReader:
    """Delivers each block once, in the order of the log."""

    def __init__(self) -> None:
        self._seen: dict[tuple[Source, int, int], list[int]] = {}  # contents, by source and sequences

    def look_back(self, entry: LogEntry) -> None:
        """Learn what an entry before the start holds."""
        if not entry.pointer.producers_complete:
            raise FindingError("pointer with cut producers: the simulation keeps batches smaller than that")
        self.take(entry)

    def take(self, entry: LogEntry) -> list[Delivered]:
        """Return what the entry delivers."""
        delivered: list[Delivered] = []
        for block in entry.blocks:
            seen = self._seen.setdefault((block.source, block.first, block.following), [])
            if block.content in seen:
                continue
            seen.append(block.content)
            delivered += [
                Delivered(entry.offset, block.record_index + number, block.source, block.first + number, value)
                for number, value in enumerate(block.values)
            ]
        return delivered


def delivered_twice(log: Iterable[LogEntry]) -> dict[Source, RangeSet]:
    """Return the sequences that lie in a log with different records, of which readers deliver all."""
    reader, once, twice = ReferenceReader(), dict[Source, RangeSet](), dict[Source, RangeSet]()
    for entry in log:
        for each in reader.take(entry):
            ranges = once.setdefault(each.source, RangeSet())
            if not ranges.add(each.sequence, each.sequence + 1):
                twice.setdefault(each.source, RangeSet()).add(each.sequence, each.sequence + 1)
    return twice


def resume(log: Sequence[LogEntry], offset: int, record_index: int, window_ms: int) -> list[Delivered]:
    """Return what a reader delivers that starts at a position of `log`, after a look back by `window_ms`.

    The window is measured in queue time, back from the pointer that the position names, as the queue's
    `seek_time` finds it: from the first entry that is young enough, whatever follows.
    """
    reader = ReferenceReader()
    start = next((index for index, entry in enumerate(log) if entry.offset >= offset), len(log))
    if start == len(log):
        return []
    least_ms = log[start].time_ms - window_ms
    first = next(index for index, entry in enumerate(log) if entry.time_ms >= least_ms)
    for entry in log[first:start]:
        reader.look_back(entry)
    return _behind(log[start:], reader, offset, record_index)


def _behind(log: Iterable[LogEntry], reader: ReferenceReader, offset: int, record_index: int) -> list[Delivered]:
    return [
        record
        for entry in log
        for record in reader.take(entry)
        if (record.offset, record.record_index) >= (offset, record_index)
    ]
