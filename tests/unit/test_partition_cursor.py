"""The machine of one read partition: order, dedup, positions, damage, expiry, and its states."""

from __future__ import annotations

from itertools import pairwise

import pytest
from awscrt.checksums import crc32c
from hypothesis import given
from hypothesis import strategies as st

from memq.client.consumer.fetch import partition_cursor as cursor_module
from memq.client.consumer.fetch.partition_cursor import SUCCESSORS, CursorState, PartitionCursor, successor
from memq.errors import CorruptDataError, PositionExpiredError, UnsupportedFormatError
from memq.format.blocks.columns import BlockReader
from memq.format.blocks.header import parse_header
from memq.format.object import BlockEntry
from memq.format.pointer import Adopted, decode_pointer
from memq.limits import BLOCK_HEADER_BYTES
from memq.notification import Entries, Entry
from memq.notification.stored_blocks import Copies
from memq.topic import Position, Totals
from tests.unit.cursor_reads import BEGINNING, cursor_from, position_at, read, records, retained, shown
from tests.unit.queue_model import WINDOW_MS, Block, Log


def set_paused(cursor: PartitionCursor, paused: bool) -> None:
    cursor.paused = paused


def polls_nothing(cursor: PartitionCursor) -> bool:
    return cursor.poll_offset is None


@st.composite
def logs(draw: st.DrawFn) -> Log:
    """A log of a few producers in order, with copies of whole blocks, skips, and control pointers in between."""
    log = Log()
    next_ = dict.fromkeys((1, 2, 3), 0)
    sent: list[Block] = []
    for _ in range(draw(st.integers(1, 8))):
        if draw(st.integers(0, 5)) == 0:
            log.control()
            continue
        blocks: list[Block] = []
        skip: list[int] = []
        for number in range(draw(st.integers(1, 4))):
            if sent and draw(st.integers(0, 2)) == 0:
                blocks.append(draw(st.sampled_from(sent)))
                if draw(st.booleans()):
                    skip.append(number)
                continue
            producer = draw(st.sampled_from([1, 2, 3]))
            block = Block(producer, next_[producer], draw(st.integers(1, 4)))
            next_[producer] += block.count + draw(st.sampled_from([0, 0, 2]))
            blocks.append(block)
            sent.append(block)
        log.batch(*blocks, skip=tuple(skip))
    return log


@given(logs(), st.integers(1, 4))
def test_every_block_is_delivered_once_and_in_order(log: Log, page: int) -> None:
    cursor = cursor_from(BEGINNING)
    found = records(read(log, cursor, page=page))
    values = [value for _, value in found]
    assert len(set(values)) == len(values)
    assert [position for position, _ in found] == sorted(position for position, _ in found)
    stored = {value for body in log.bodies.values() for value in _values_in(body)}
    assert set(values) == stored
    for producer in (b"1:", b"2:", b"3:"):
        numbers = [int(value[2:]) for value in values if value is not None and value.startswith(producer)]
        assert numbers == sorted(numbers)
    assert cursor.behind.totals == Totals(log.records, log.stored)
    assert cursor.held_bytes == 0


def _values_in(body: bytes) -> list[bytes]:
    log = Log()
    log.bodies[0] = body
    found = []
    at = 0
    while at < len(body):
        reader = BlockReader(body[at:])
        found += [value for value in reader.values() if value is not None]
        at += reader.header.length
    return found


@given(logs(), st.data())
def test_a_reader_that_resumes_anywhere_continues_exactly(log: Log, data: st.DataObject) -> None:
    whole = read(log, cursor_from(BEGINNING))
    positions = [BEGINNING, *[delivery.behind.position for delivery in whole], *[at for at, _ in records(whole)]]
    start = data.draw(st.sampled_from(positions))
    resumed = records(read(log, cursor_from(start)))
    assert resumed == [(position, value) for position, value in records(whole) if position >= start]


@given(logs(), st.data())
def test_a_range_ends_exactly_before_its_end(log: Log, data: st.DataObject) -> None:
    whole = records(read(log, cursor_from(BEGINNING)))
    end = data.draw(st.sampled_from([BEGINNING, position_at(log.next_offset), *[at for at, _ in whole]]))
    cursor = cursor_from(BEGINNING, end)
    assert records(read(log, cursor)) == [(position, value) for position, value in whole if position < end]
    assert cursor.state is CursorState.ENDED


@given(logs())
def test_deliveries_are_cut_at_a_bound_and_lose_nothing(log: Log) -> None:
    whole = records(read(log, cursor_from(BEGINNING)))
    bound, cursor_module.DELIVERY_BYTES = cursor_module.DELIVERY_BYTES, 1
    try:
        cut = read(log, cursor_from(BEGINNING))
    finally:
        cursor_module.DELIVERY_BYTES = bound
    assert records(cut) == whole
    assert all(len(delivery.slices) == 1 for delivery in cut)
    for left, right in pairwise(cut):
        assert left.behind.position <= right.first


def damage(log: Log, offset: int, at: int) -> None:
    body = bytearray(log.bodies[offset])
    body[at] ^= 1
    log.bodies[offset] = bytes(body)


def test_fail_stays_before_the_damaged_block_after_what_is_whole() -> None:
    log = Log()
    log.batch(Block(1, 0), Block(1, 3), Block(1, 6))
    damage(log, 0, len(Block(1, 0).data()) + BLOCK_HEADER_BYTES)
    cursor = cursor_from(BEGINNING)
    first, failed = read(log, cursor)
    assert [value for _, value in records([first])] == Block(1, 0).values()
    assert isinstance(failed.failure, CorruptDataError)
    assert "block 1 of object 'o/0' at 0:0:3" in str(failed.failure)
    assert "seek to 0:0:6" in failed.failure.hint
    assert cursor.position == position_at(0, 3)
    again = cursor.deliver()
    assert again is not None
    assert again.failure is not None
    assert cursor.position == position_at(0, 3)


def test_seek_behind_damage_continues() -> None:
    log = Log()
    log.batch(Block(1, 0), Block(1, 3), Block(1, 6))
    damage(log, 0, len(Block(1, 0).data()) + BLOCK_HEADER_BYTES)
    found = records(read(log, cursor_from(position_at(0, 6))))
    assert [value for _, value in found] == Block(1, 6).values()


def test_skip_passes_one_block_and_delivers_the_rest() -> None:
    log = Log()
    log.batch(Block(1, 0), Block(1, 3), Block(1, 6))
    damage(log, 0, len(Block(1, 0).data()) + BLOCK_HEADER_BYTES)
    cursor = cursor_from(BEGINNING, pass_damage=True)
    (delivery,) = read(log, cursor)
    assert [position for position, _ in records([delivery])] == [position_at(0, n) for n in (0, 1, 2, 6, 7, 8)]
    assert [piece.number for piece in delivery.damaged] == [1]
    assert (cursor.counts.damaged_blocks, cursor.counts.damaged_records) == (1, 3)


def test_batch_of_a_newer_format_is_never_skipped() -> None:
    log = Log()
    log.batch(Block(1, 0))
    body = bytearray(log.bodies[0])
    body[8] = 9  # the version
    body[4:8] = crc32c(bytes(body[8:])).to_bytes(4, "little")
    log.bodies[0] = bytes(body)
    (failed,) = read(log, cursor_from(BEGINNING, pass_damage=True))
    assert isinstance(failed.failure, UnsupportedFormatError)


def test_a_pointer_that_cannot_be_read_is_damage() -> None:
    log = Log()
    log.batch(Block(1, 0))
    log.entries[0] = Entry(0, 0, b"{")
    log.batch(Block(1, 3))
    (failed,) = read(log, cursor_from(BEGINNING))
    assert isinstance(failed.failure, CorruptDataError)
    cursor = cursor_from(BEGINNING, pass_damage=True)
    deliveries = read(log, cursor)
    assert [value for _, value in records(deliveries)] == Block(1, 3).values()
    assert cursor.counts.damaged_blocks == 1


def test_a_late_copy_is_dropped_by_who_starts_behind_the_first() -> None:
    log = Log()
    log.batch(Block(1, 0), Block(2, 0))
    start = position_at(log.batch(Block(1, 3)))
    log.batch(Block(2, 0), Block(1, 6))
    cursor = cursor_from(start)
    found = [value for _, value in records(read(log, cursor))]
    assert found == [*Block(1, 3).values(), *Block(1, 6).values()]
    assert cursor.counts.duplicate_records == 3


@pytest.mark.parametrize("start", [BEGINNING, position_at(1)], ids=["who read the first", "who starts behind it"])
@pytest.mark.parametrize(
    ("second", "delivered"),
    [
        (Block(1, 0), False),
        (Block(1, 0, sealed_ms=9), False),  # the same records, sealed once more
        (Block(1, 0, more=b"!"), True),
        (Block(1, 1, 2), True),
        (Block(1, 0, 2), True),
    ],
)
def test_a_block_under_seen_sequences_is_dropped_only_as_the_copy_that_it_is(
    start: Position, second: Block, delivered: bool
) -> None:
    log = Log()
    log.batch(Block(1, 0))
    log.batch(second, Block(1, 3))
    cursor = cursor_from(start)
    values = [value for _, value in records(read(log, cursor))]
    first = Block(1, 0).values() if start == BEGINNING else []
    assert values == first + (second.values() if delivered else []) + Block(1, 3).values()
    assert cursor.counts.conflicting_blocks == int(delivered)
    assert cursor.counts.duplicate_records == (0 if delivered else 3)
    conflicts = cursor.take_seen().conflicts
    assert [conflict.position for conflict in conflicts] == ([position_at(1)] if delivered else [])
    assert all("differs from what is known under the same sequences" in str(each.error) for each in conflicts)
    assert not any(cursor.take_seen())


def test_a_batch_may_hold_both_blocks_of_a_conflict() -> None:
    log = Log()
    log.batch(Block(1, 0), Block(1, 0, more=b"!"), Block(1, 0))
    cursor = cursor_from(BEGINNING)
    values = [value for _, value in records(read(log, cursor))]
    assert values == Block(1, 0).values() + Block(1, 0, more=b"!").values()
    assert (cursor.counts.conflicting_blocks, cursor.counts.duplicate_records) == (1, 3)


def test_a_third_block_is_compared_with_all_that_lie_before_it() -> None:
    log = Log()
    for more in (b"", b"!", b"", b"!"):
        log.batch(Block(1, 0, more=more))
    cursor = cursor_from(BEGINNING)
    assert [value for _, value in records(read(log, cursor))] == Block(1, 0).values() + Block(1, 0, more=b"!").values()
    assert (cursor.counts.conflicting_blocks, cursor.counts.duplicate_records) == (1, 6)


def test_where_the_first_one_can_not_be_read_sequences_decide() -> None:
    log = Log()
    log.batch(Block(1, 0))
    log.batch(Block(1, 0))
    cursor = cursor_from(position_at(1))
    cursor.look_back(log.entries[:1])
    cursor.begin()
    cursor.take_entries(Entries(log.entries[1:], log.next_offset))
    slot = cursor.next_fetch()
    assert slot is not None
    assert slot.pointer is not None
    cursor.start_fetch(slot)
    cursor.fetched(slot, log.pieces(slot.offset, slot.pointer))
    assert cursor.deliver() is None
    assert (cursor.comparing, cursor.deliverable, cursor.position) == (slot, False, position_at(1))
    cursor.drop_fetched()  # a pause in between: it is fetched, and compared, once more
    assert not slot.claims
    assert cursor.next_fetch() is slot
    cursor.start_fetch(slot)
    cursor.fetched(slot, log.pieces(slot.offset, slot.pointer))
    assert cursor.deliver() is None
    slot.compare({(1, 0, 3): Copies(unread=True)})
    assert cursor.deliver() is None
    assert (cursor.position, cursor.counts.duplicate_records) == (position_at(2), 3)


def test_ranges_that_a_pointer_could_not_name_come_from_the_index() -> None:
    log = Log()
    log.batch(Block(1, 0), named=False)
    start = position_at(log.batch(Block(1, 0), Block(1, 3)))
    cursor = cursor_from(start)
    (incomplete,) = cursor.look_back(log.entries[:1])
    cursor.note_index(incomplete, [BlockEntry.from_header(parse_header(Block(1, 0).data()), 0)])
    cursor.begin()
    assert [value for _, value in records(read(log, cursor))] == Block(1, 3).values()


def test_a_pointer_that_cannot_be_read_ends_no_look_back() -> None:
    log = Log()
    log.batch(Block(2, 0))
    log.entries[0] = Entry(0, 0, b"{")
    log.batch(Block(1, 0))
    cursor = cursor_from(position_at(2))
    assert cursor.look_back(log.entries) == []
    assert cursor.dedup_window.seen(0, 1, 0, 3) == [(0, 3)], "a copy of what is behind it is left out"


def test_expired_named_start_is_a_lasting_error() -> None:
    log = Log()
    for first in (0, 3, 6):
        log.batch(Block(1, first))
    del log.entries[:2]
    cursor = retained(Totals())
    for _ in range(2):
        (delivery,) = read(log, cursor)
        assert isinstance(delivery.failure, PositionExpiredError)
        assert delivery.failure.first == "0:2:0"
        assert "position 0:0:0 of topic 'clicks' is before 0:2:0" in str(delivery.failure)
        assert "6 records are gone" in str(delivery.failure)
    assert (cursor.position, cursor.counts.expired_offsets) == (BEGINNING, 0)


def test_a_position_with_more_records_before_it_than_the_first_one_left_is_expired() -> None:
    """Its log was cut, so nothing shows that the group has read what retention took."""
    log = Log()
    for first in (0, 3, 6):
        log.batch(Block(1, first))
    del log.entries[:2]
    (delivery,) = read(log, retained(Totals(7)))
    assert isinstance(delivery.failure, PositionExpiredError)
    assert "records are gone" not in str(delivery.failure), "how many is unknown"


@pytest.mark.parametrize(("known", "lost"), [(Totals(), 6), (Totals(4), 2), (Totals(6), 0), (Totals(7), 0), (None, 0)])
def test_expired_records_are_skipped_and_counted(known: Totals | None, lost: int) -> None:
    log = Log()
    for first in (0, 3, 6):
        log.batch(Block(1, first))
    del log.entries[:2]
    cursor = retained(known, skip=True)
    assert [value for _, value in records(read(log, cursor))] == Block(1, 6).values()
    assert (cursor.counts.expired_offsets, cursor.counts.expired_records) == (2, lost)


@pytest.mark.parametrize("known", [Totals(6), None])
def test_where_no_record_was_lost_nothing_is_said(known: Totals | None) -> None:
    log = Log()
    for first in (0, 3, 6):
        log.batch(Block(1, first))
    del log.entries[:2]
    assert [value for _, value in records(read(log, retained(known)))] == Block(1, 6).values()


@pytest.mark.parametrize(("known", "lost"), [(Totals(), 9), (None, 0)])
def test_retention_may_overtake_a_start_twice_before_its_first_record(known: Totals | None, lost: int) -> None:
    log = Log()
    for first in (0, 3, 6, 9):
        log.batch(Block(1, first))
    cursor = retained(known, skip=known is not None)
    cursor.begin()
    for first in (2, 3):
        cursor.take_gap(first, decode_pointer(log.entries[first].body).totals)
        assert cursor.deliver() is None
        assert cursor.take_moved_start() == (None if known is not None else position_at(first))
    del log.entries[:3]
    assert [value for _, value in records(read(log, cursor))] == Block(1, 9).values()
    assert (cursor.counts.expired_offsets, cursor.counts.expired_records) == (3, lost)


def test_a_start_moves_behind_a_batch_that_expired_while_it_was_fetched() -> None:
    log = Log()
    log.batch(Block(1, 0))
    cursor = retained(None)
    cursor.begin()
    cursor.take_entries(shown(log))
    slot = cursor.next_fetch()
    assert slot is not None
    cursor.start_fetch(slot)
    cursor.expire(slot, 1)
    assert cursor.deliver() is None
    assert (cursor.take_moved_start(), cursor.counts.expired_records) == (position_at(1), 0)


def test_a_reader_that_was_overtaken_gets_an_error() -> None:
    log = Log()
    log.batch(Block(1, 0))
    cursor = retained(None)
    assert len(records(read(log, cursor))) == 3
    for first in (3, 6, 9):
        log.batch(Block(1, first))
    del log.entries[:3]
    (delivery,) = read(log, cursor)
    assert isinstance(delivery.failure, PositionExpiredError)
    assert delivery.failure.first == "0:3:0"
    assert "6 records are gone" in str(delivery.failure)


def test_control_pointers_that_go_are_no_loss() -> None:
    log = Log()
    log.batch(Block(1, 0))
    cursor = retained(Totals())
    assert len(records(read(log, cursor))) == 3
    log.control(epoch=2)
    log.control(epoch=3)
    log.batch(Block(1, 3), epoch=3)
    del log.entries[:3]
    assert [value for _, value in records(read(log, cursor))] == Block(1, 3).values()


@pytest.mark.parametrize("skip", [True, False])
def test_a_batch_that_expired_while_it_was_fetched(*, skip: bool) -> None:
    log = Log()
    log.batch(Block(1, 0))
    cursor = retained(Totals(), skip=skip)
    cursor.begin()
    cursor.take_entries(shown(log))
    slot = cursor.next_fetch()
    assert slot is not None
    cursor.start_fetch(slot)
    cursor.expire(slot, 7)
    delivery = cursor.deliver()
    assert cursor.held_bytes == 0
    if skip:
        assert delivery is None
        assert (cursor.position, cursor.counts.expired_records) == (position_at(1), 3)
    else:
        assert delivery is not None
        assert isinstance(delivery.failure, PositionExpiredError)
        assert (delivery.failure.first, cursor.position) == ("0:7:0", BEGINNING)


def test_totals_follow_late_pointers_until_they_are_adopted() -> None:
    log = Log()
    log.control(epoch=1)
    log.batch(Block(1, 0), epoch=1)
    log.control(epoch=2)
    late = log.batch(Block(2, 0), epoch=1, late=True)
    cursor = cursor_from(BEGINNING)
    read(log, cursor)
    size = len(Block(2, 0).data())
    assert cursor.behind.totals == Totals(6, 2 * size)
    adopted = Adopted(offset=late, epoch=1, batch_sequence=late, records=3, bytes=size)
    log.batch(Block(1, 3), epoch=2, adopted=(adopted,))
    read(log, cursor)
    assert cursor.behind.totals == Totals(9, 3 * size) == Totals(log.records, log.stored)


def test_gaps_are_delivered_across_and_counted() -> None:
    log = Log()
    log.batch(Block(1, 0), Block(1, 10))
    log.batch(Block(1, 13), Block(1, 18))
    log.batch(Block(1, 21))
    cursor = cursor_from(BEGINNING)
    assert len(records(read(log, cursor))) == 15
    assert cursor.counts.gap_sequences == 7 + 2


def test_an_end_in_offsets_that_were_never_used_is_reached() -> None:
    log = Log()
    log.batch(Block(1, 0))
    cursor = cursor_from(BEGINNING, position_at(5))
    cursor.begin()
    cursor.take_entries(shown(log))
    assert cursor.poll_offset == 1
    slot = cursor.next_fetch()
    assert slot is not None
    cursor.start_fetch(slot)
    assert slot.pointer is not None
    cursor.fetched(slot, log.pieces(0, slot.pointer))
    cursor.take_entries(Entries([], 5))
    assert cursor.deliver() is not None
    assert cursor.state is CursorState.ENDED


def test_a_paused_cursor_delivers_and_holds_nothing() -> None:
    log = Log()
    log.batch(Block(1, 0))
    cursor = cursor_from(BEGINNING)
    cursor.begin()
    cursor.take_entries(shown(log))
    slot = cursor.next_fetch()
    assert slot is not None
    cursor.start_fetch(slot)
    assert cursor.held_bytes == slot.bytes
    set_paused(cursor, True)
    cursor.drop_fetched()
    assert slot.pointer is not None
    cursor.fetched(slot, log.pieces(0, slot.pointer))  # it comes too late
    assert (cursor.deliver(), cursor.next_fetch(), cursor.held_bytes) == (None, None, 0)
    set_paused(cursor, False)
    assert len(records(read(log, cursor))) == 3


def test_polling_stops_at_the_bound_and_continues_at_half_of_it() -> None:
    log = Log()
    for number in range(cursor_module.SLOTS_MAX):
        log.batch(Block(1, 3 * number))
    cursor = cursor_from(BEGINNING)
    cursor.begin()
    cursor.take_entries(shown(log))
    delivered = 0
    while polls_nothing(cursor):
        slot = cursor.next_fetch()
        assert slot is not None
        assert slot.pointer is not None
        cursor.start_fetch(slot)
        cursor.fetched(slot, log.pieces(slot.offset, slot.pointer))
        assert cursor.deliver() is not None
        delivered += 1
    assert delivered == cursor_module.SLOTS_MAX // 2


@pytest.mark.parametrize("state", list(CursorState))
@pytest.mark.parametrize("following", list(CursorState))
def test_the_table_of_states_is_kept(state: CursorState, following: CursorState) -> None:
    if following in SUCCESSORS[state]:
        assert successor(state, following) is following
    else:
        with pytest.raises(AssertionError):
            successor(state, following)


@pytest.mark.parametrize("state", [CursorState.LOOKING_BACK, CursorState.ENDED])
def test_outside_of_reading_nothing_is_polled_fetched_or_delivered(state: CursorState) -> None:
    log = Log()
    log.batch(Block(1, 0))
    cursor = cursor_from(BEGINNING)
    cursor.state = state
    cursor.take_entries(shown(log))
    assert (cursor.poll_offset, cursor.next_fetch(), cursor.deliver()) == (None, None, None)


def test_sequences_of_a_look_back_are_forgotten_with_the_window() -> None:
    log = Log()
    log.batch(Block(1, 0), time_ms=1)
    log.batch(Block(2, 0), time_ms=5 * WINDOW_MS)
    log.batch(Block(2, 3), time_ms=10 * WINDOW_MS)
    log.batch(Block(1, 0), Block(2, 3), time_ms=10 * WINDOW_MS + 1)
    cursor = cursor_from(Position(0, 3))
    assert [value for _, value in records(read(log, cursor))] == Block(1, 0).values()
    assert cursor.counts.duplicate_records == 3


def test_a_small_batch_is_fetched_as_a_whole_wherever_the_start_lies_in_it() -> None:
    log = Log()
    log.batch(Block(1, 0), Block(1, 3))
    cursor = cursor_from(Position(0, 0, 4))
    cursor.begin()
    cursor.take_entries(shown(log))
    slot = cursor.next_fetch()
    assert slot is not None
    cursor.start_fetch(slot)
    assert slot.part is None
