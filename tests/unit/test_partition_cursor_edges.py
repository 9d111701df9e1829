"""The machine of one read partition at its bounds: counts, comparisons, partial fetches, skips."""

from __future__ import annotations

from dataclasses import asdict, fields

import pytest
from msgspec.structs import replace

from memq.client.consumer.fetch import partition_cursor as cursor_module
from memq.client.consumer.fetch.cursor_outcomes import Counts, ReadyRange
from memq.client.consumer.fetch.partition_cursor import CursorState, PartitionCursor
from memq.client.consumer.fetch.pointer_slot import PointerSlot
from memq.errors import CorruptDataError, PositionExpiredError
from memq.format.batch import BlockPiece, numbered_entries
from memq.format.blocks.header import parse_header
from memq.format.object import BlockEntry
from memq.format.pointer import Location, decode_pointer, encode_pointer
from memq.notification import Entries, Entry, Span
from memq.notification.stored_blocks import Copies, claim_of, stored_block
from memq.topic import Position, Totals
from tests.unit.cursor_reads import BEGINNING, cursor_from, position_at, read, records, retained, shown
from tests.unit.queue_model import PARTITION, WINDOW_MS, Block, Log

SIZE = len(Block(1, 0).data())


def reading(log: Log, start: Position = BEGINNING, end: Position | None = None, **how: bool) -> PartitionCursor:
    """Return a cursor that has all pointers from `start` on, and looked back at none."""
    cursor = cursor_from(start, end, **how)
    cursor.begin()
    cursor.take_entries(
        Entries([entry for entry in log.entries if entry.offset >= start.pointer_offset], log.next_offset)
    )
    return cursor


def fetch(log: Log, cursor: PartitionCursor) -> PointerSlot:
    """Fetch the next batch as a whole."""
    slot = cursor.next_fetch()
    assert slot is not None
    assert slot.pointer is not None
    cursor.start_fetch(slot)
    cursor.fetched(slot, log.pieces(slot.offset, slot.pointer))
    return slot


def delivered(cursor: PartitionCursor, *, whole: bool = False) -> ReadyRange:
    delivery = cursor.deliver(whole=whole)
    assert delivery is not None
    return delivery


def damage(log: Log, offset: int, block: int = 0) -> None:
    """Turn a byte of a block's payload."""
    body = bytearray(log.bodies[offset])
    body[(block + 1) * SIZE - 1] ^= 1
    log.bodies[offset] = bytes(body)


def test_counts_of_several_partitions_add_up() -> None:
    one = Counts(*range(1, len(fields(Counts)) + 1))
    total = Counts(*[10] * len(fields(Counts)))
    total.add(one)
    assert list(asdict(total).values()) == [10 + each for each in asdict(one).values()]


@pytest.mark.parametrize(
    ("known", "compared"),
    [
        ([Block(1, 0)], True),
        ([Block(1, 0), Block(1, 0, more=b"!")], True),
        ([Block(1, 0, more=b"!")], False),
        ([Block(1, 3)], False),
        ([], False),
    ],
)
def test_a_batch_is_compared_when_each_block_under_the_claim_is_known(known: list[Block], compared: bool) -> None:
    log = Log()
    log.batch(Block(1, 0), Block(1, 0, more=b"?"), Block(1, 3), Block(1, 6), skip=(1,))
    damage(log, 0, 3)
    pointer = decode_pointer(log.entries[0].body)
    slot = PointerSlot(0, 0, pointer, pieces=log.pieces(0, pointer))
    copies = Copies(tuple(stored_block(parse_header(block.data())) for block in known))
    assert slot.is_compared(claim_of(parse_header(Block(1, 0).data())), copies) is compared
    assert slot.is_compared((9, 0, 3), Copies()), "it has no block of that producer"
    assert PointerSlot(0, 0, pointer).is_compared((1, 0, 3), Copies()), "nothing was fetched"


def test_a_look_back_counts_what_lies_before_the_start_and_nothing_else() -> None:
    log = Log()
    log.batch(Block(1, 0))
    log.batch(Block(1, 3))
    log.batch(Block(1, 6))
    log.entries[0] = Entry(0, 0, b"{")
    cursor = cursor_from(position_at(2))
    cursor.look_back(log.entries)
    assert cursor.behind.totals == Totals(6, 2 * SIZE)
    cursor.begin()
    cursor.take_entries(shown(log))
    fetch(log, cursor)
    assert [value for _, value in records([delivered(cursor)])] == Block(1, 6).values()


def test_a_reader_that_begins_at_its_end_has_ended() -> None:
    for end, state in (
        (position_at(3), CursorState.ENDED),
        (position_at(2), CursorState.ENDED),
        (position_at(3, 1), CursorState.READING),
    ):
        cursor = cursor_from(position_at(3), end)
        cursor.begin()
        assert cursor.state is state
    cursor = cursor_from(BEGINNING, position_at(3))
    cursor.begin()
    cursor.take_entries(Entries([], 3))
    assert cursor.state is CursorState.ENDED


def test_retention_has_passed_where_neither_log_nor_answer_has_the_next_offset() -> None:
    cursor = cursor_from(position_at(2))
    entry = Entry(5, 0, b"")
    for begin, entries, expected in ((3, [entry], 3), (7, [entry], 5), (4, [], 4), (2, [entry], None), (2, [], None)):
        assert cursor.misses(Span(begin, 9), entries) == expected


def test_answers_are_taken_once_and_in_their_state_alone() -> None:
    log = Log()
    log.batch(Block(1, 0))
    early = shown(log)
    log.batch(Block(1, 3))
    cursor = cursor_from(BEGINNING)
    cursor.take_entries(shown(log))
    cursor.begin()
    assert (cursor.next_fetch(), cursor.poll_offset) == (None, 0), "it did not read yet"
    cursor.take_entries(Entries(early, 0))
    assert cursor.poll_offset == 1
    cursor.take_entries(shown(log))
    cursor.take_entries(shown(log))
    assert [fetch(log, cursor).offset, fetch(log, cursor).offset, cursor.next_fetch()] == [0, 1, None]


def test_reader_of_whole_batches_stops_before_each_kind_of_damage() -> None:
    log = Log()
    for number in range(3):
        log.batch(Block(1, 3 * number))
    damage(log, 1)
    log.entries[2] = Entry(2, 0, b"{")
    cursor = reading(log, pass_damage=True)
    cursor.take_gap(9, Totals(6))
    fetch(log, cursor)
    fetch(log, cursor)
    assert delivered(cursor, whole=True).slices
    for number in (1, 2, 3):
        assert cursor.deliver(whole=True) is None
        assert cursor.position == position_at(number)
        cursor.deliver()
    assert cursor.deliver(whole=True) is None
    assert cursor.position == position_at(9)


def test_an_unreadable_pointer_is_named_with_the_position_behind_it() -> None:
    log = Log()
    log.batch(Block(1, 0))
    log.entries[0] = Entry(0, 0, b"{")
    failure = delivered(reading(log)).failure
    assert isinstance(failure, CorruptDataError)
    assert "seek to 0:1:0 to continue after it" in failure.hint
    (piece,) = delivered(reading(log, pass_damage=True)).damaged
    assert piece[:4] == (0, 0, 0, None), "its size is unknown"


@pytest.mark.parametrize("skip", [(), (0,)])
def test_blocks_before_the_start_that_were_not_fetched_count_as_seen(skip: tuple[int, ...]) -> None:
    log = Log()
    log.batch(Block(1, 0), Block(1, 3), skip=skip)
    log.batch(Block(1, 0), Block(1, 6))
    cursor = reading(log, position_at(0, 3))
    slot = cursor.next_fetch()
    assert slot is not None
    assert slot.pointer is not None
    cursor.start_fetch(slot)
    entries = numbered_entries([BlockEntry.from_header(parse_header(Block(1, 0).data()), 0)])
    cursor.fetched(slot, log.pieces(0, slot.pointer)[1:], entries)
    assert [value for _, value in records([delivered(cursor)])] == Block(1, 3).values()
    second = fetch(log, cursor)
    assert (cursor.deliver() is None) is (not skip)
    assert list(second.claims) == ([] if skip else [(1, 0, 3)])


def test_a_batch_has_moved_when_its_pointer_names_another_location() -> None:
    log = Log()
    log.batch(Block(1, 0))
    cursor = reading(log)
    slot = cursor.next_fetch()
    assert slot is not None
    pointer = slot.pointer
    assert pointer is not None
    assert not slot.move(log.entries[0], PARTITION)
    assert not slot.move(Entry(0, 0, b"{"), PARTITION)
    assert slot.pointer is pointer
    location = Location(store="main", key="o/elsewhere", offset=0, length=SIZE)
    assert slot.move(Entry(0, 0, encode_pointer(replace(pointer, locations=(location,)))), PARTITION)
    assert slot.pointer.locations == (location,)


@pytest.mark.parametrize(
    ("start", "end", "part"),
    [
        (position_at(0), None, None),
        (position_at(0, 4), None, (4, 9)),
        (position_at(0), position_at(0, 5), (0, 5)),
        (position_at(0, 4), position_at(0, 5), (4, 5)),
        (position_at(0), position_at(1), None),
    ],
)
def test_of_a_large_batch_only_the_wanted_records_are_fetched(
    start: Position, end: Position | None, part: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log()
    log.batch(Block(1, 0), Block(1, 3), Block(1, 6))
    for least, expected in ((3 * SIZE, part), (3 * SIZE + 1, None)):
        monkeypatch.setattr(cursor_module, "PART_BYTES_MIN", least)
        assert fetch(log, reading(log, start, end)).part == expected
    monkeypatch.setattr(cursor_module, "PART_BYTES_MIN", SIZE)
    log.batch(Block(1, 9), Block(1, 12))
    cursor = reading(log, position_at(0, 4), position_at(1, 5))
    assert [fetch(log, cursor).part, fetch(log, cursor).part] == [(4, 9), (0, 5)]


def test_seen_sequences_are_forgotten_with_the_window() -> None:
    log = Log()
    log.batch(Block(1, 0), time_ms=1)
    for number in (5, 10):
        log.batch(Block(2, number), time_ms=number * WINDOW_MS)
    log.batch(Block(1, 0), time_ms=10 * WINDOW_MS + 1)
    cursor = cursor_from(BEGINNING)
    assert len(read(log, cursor)) == 4
    assert cursor.counts.duplicate_records == 0


def test_totals_are_those_that_the_first_pointer_states() -> None:
    log = Log()
    log.batch(Block(1, 0))
    log.batch(Block(1, 3))
    cursor = reading(log, position_at(1))
    fetch(log, cursor)
    delivery = delivered(cursor)
    assert (delivery.totals, delivery.behind.totals) == (Totals(3, SIZE), Totals(6, 2 * SIZE))
    cursor = retained(Totals(), skip=True)
    cursor.begin()
    cursor.take_entries(Entries(log.entries[1:], 2))
    slot = cursor.next_fetch()
    assert slot is not None
    cursor.start_fetch(slot)
    cursor.expire(slot, 2)
    assert cursor.deliver() is None
    assert cursor.behind.totals == Totals(6, 2 * SIZE)


def test_a_start_within_a_batch_stays_where_it_is() -> None:
    log = Log()
    log.batch(Block(1, 0), Block(1, 3))
    cursor = reading(log, position_at(0, 1))
    fetch(log, cursor)
    assert len(records([delivered(cursor)])) == cursor.counts.records == 5
    damage(log, 0)
    cursor = reading(log, position_at(0, 1))
    fetch(log, cursor)
    assert delivered(cursor).failure is not None
    assert cursor.position == position_at(0, 1)
    expired = PartitionCursor(PARTITION, position_at(0, 1), window_ms=WINDOW_MS, known=Totals(1))
    expired.begin()
    expired.take_entries(shown(log))
    slot = expired.next_fetch()
    assert slot is not None
    expired.start_fetch(slot)
    expired.expire(slot, 1)
    failure = delivered(expired).failure
    assert isinstance(failure, PositionExpiredError)
    assert "5 records are gone" in str(failure)


def test_blocks_before_a_start_within_their_batch_count_as_seen() -> None:
    log = Log()
    log.batch(Block(1, 0), Block(1, 3))
    log.batch(Block(1, 0))
    cursor = cursor_from(position_at(0, 3))
    cursor.begin()
    assert [value for _, value in records(read(log, cursor))] == Block(1, 3).values()
    assert cursor.counts.duplicate_records == 3


def test_deliveries_end_with_the_block_that_fills_them_and_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log()
    log.batch(Block(1, 0), Block(1, 3), Block(1, 6))
    cursor = reading(log, end=position_at(0, 3))
    fetch(log, cursor)
    assert [(each.low, each.high) for each in delivered(cursor).slices] == [(0, 3)]
    monkeypatch.setattr(cursor_module, "DELIVERY_BYTES", parse_header(Block(1, 0).data()).raw_length)
    cursor = reading(log)
    slot = fetch(log, cursor)
    for judged in (1, 2, 3):
        assert len(delivered(cursor).slices) == 1
        assert slot.judged == judged
    assert cursor.deliver() is None


@pytest.mark.parametrize("damaged", [6, 9])
def test_a_batch_that_is_cut_otherwise_the_next_time_is_judged_from_its_start(
    damaged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log()
    log.batch(Block(1, 0), Block(1, 3), Block(1, 6))
    monkeypatch.setattr(cursor_module, "DELIVERY_BYTES", 1)
    cursor = reading(log)
    pieces = fetch(log, cursor).pieces or ()
    assert delivered(cursor).behind.position == position_at(0, 3)
    cursor.drop_fetched()
    slot = cursor.next_fetch()
    assert slot is not None
    cursor.start_fetch(slot)
    hidden = BlockPiece(0, 0, damaged, None, memoryview(b""), CorruptDataError("its length is wrong"))
    cursor.fetched(slot, [hidden, *(piece for piece in pieces if piece.first >= damaged)])
    assert delivered(cursor).failure is not None
    assert cursor.position == position_at(0, 3)


def test_copies_are_found_next_to_damaged_blocks() -> None:
    for damaged in (0, 1):
        log = Log()
        log.batch(Block(1, 0))
        second = [Block(1, 3), Block(1, 0)] if damaged == 0 else [Block(1, 0), Block(1, 3)]
        log.batch(*second)
        damage(log, 1, damaged)
        cursor = cursor_from(BEGINNING, pass_damage=True)
        assert [value for _, value in records(read(log, cursor))] == Block(1, 0).values()
        assert (cursor.counts.duplicate_records, cursor.counts.damaged_blocks) == (3, 1)
        ((partition, header),) = cursor.take_seen().copies
        assert (partition, header.first_sequence) == (0, 0)


@pytest.mark.parametrize(("second", "overlapping"), [(Block(1, 2), 1), (Block(1, 3), 0), (Block(1, 0), 0)])
def test_blocks_that_were_seen_in_part_are_delivered_and_counted(second: Block, overlapping: int) -> None:
    log = Log()
    log.batch(Block(1, 0))
    log.batch(second)
    cursor = cursor_from(BEGINNING)
    read(log, cursor)
    assert cursor.counts.overlapping_blocks == overlapping
