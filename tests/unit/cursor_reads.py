"""Reads of a log by a partition cursor: where it begins, and what it delivers."""

from __future__ import annotations

from memq.client.consumer.batch import Batch, TopicPartition
from memq.client.consumer.fetch.cursor_outcomes import ReadyRange
from memq.client.consumer.fetch.partition_cursor import CursorState, PartitionCursor
from memq.format.object import BlockEntry
from memq.format.pointer import decode_pointer, unskipped
from memq.notification import Entries
from memq.topic import Position, Totals
from tests.unit.queue_model import PARTITION, WINDOW_MS, Log


def shown(log: Log) -> Entries:
    """Return what a poll from the beginning on brings."""
    return Entries(log.entries, log.next_offset)


def read(log: Log, cursor: PartitionCursor, *, page: int = 3) -> list[ReadyRange]:
    """Poll, fetch and deliver until nothing more comes."""
    if cursor.state is CursorState.LOOKING_BACK:
        _look_back(log, cursor)
    found: list[ReadyRange] = []
    while True:
        offset = cursor.poll_offset
        if offset is not None:
            entries = [entry for entry in log.entries if entry.offset >= offset][:page]
            first = cursor.misses(log.span(), entries)
            if first is not None:
                cursor.take_gap(first, decode_pointer(log.entries[0].body).totals)
            cursor.take_entries(Entries(entries, entries[-1].offset + 1 if entries else max(offset, log.next_offset)))
        while (slot := cursor.next_fetch()) is not None:
            cursor.start_fetch(slot)
            assert slot.pointer is not None
            cursor.fetched(slot, log.pieces(slot.offset, slot.pointer))
        delivery = cursor.deliver()
        if (slot := cursor.comparing) is not None and slot.claims:
            slot.compare(log.copies(slot.claims, slot.offset))
            if delivery is None:
                continue
        if delivery is None and (cursor.poll_offset is None or cursor.poll_offset >= log.next_offset):
            return found
        if delivery is not None:
            found.append(delivery)
            if delivery.failure is not None:
                return found


def _look_back(log: Log, cursor: PartitionCursor) -> None:
    for entry in log.entries:
        if entry.offset < cursor.position.pointer_offset:
            for pointer in cursor.look_back([entry]):
                headers = [piece.header for piece in log.pieces(entry.offset, pointer)]
                blocks = [BlockEntry.from_header(header, 0) for header in headers if header is not None]
                cursor.note_index(pointer, unskipped(pointer, blocks))
    cursor.begin()


def records(deliveries: list[ReadyRange]) -> list[tuple[Position, bytes | None]]:
    """Return position and value of all that was delivered."""
    found: list[tuple[Position, bytes | None]] = []
    for delivery in deliveries:
        batch = Batch(TopicPartition("clicks", 0), (delivery.first, delivery.behind.position), delivery.slices, [], "o")
        found += [(record.position, record.value) for record in batch]
    return found


def cursor_from(start: Position, end: Position | None = None, *, pass_damage: bool = False) -> PartitionCursor:
    return PartitionCursor(PARTITION, start, window_ms=WINDOW_MS, end=end, pass_damage=pass_damage)


def position_at(offset: int, index: int = 0) -> Position:
    return Position(0, offset, index)


BEGINNING = position_at(0)


def retained(known: Totals | None, *, skip: bool = False) -> PartitionCursor:
    return PartitionCursor(PARTITION, BEGINNING, window_ms=WINDOW_MS, pass_expired=skip, known=known)
