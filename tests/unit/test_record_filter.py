"""Filters: which tags and headers are wanted, and what of a log is then neither fetched nor delivered."""

from __future__ import annotations

import re
import struct
from dataclasses import replace

import pytest

from memq.client.consumer.batch import Batch, Slice, TopicPartition
from memq.client.consumer.fetch import partition_cursor as cursor_module
from memq.client.consumer.fetch.cursor_outcomes import Counts, LeftOut, ReadyRange
from memq.client.consumer.fetch.partition_cursor import PartitionCursor
from memq.client.consumer.fetch.pointer_slot import WHOLE_BATCHES, PartChoice
from memq.client.consumer.record_filter import TAGS_MAX, RecordFilter, filter_of, runs_of, wanted_part
from memq.errors import InvalidFilterError, UnsupportedFormatError
from memq.format.batch import BlockPiece, numbered_entries
from memq.format.blocks.builder import BlockBuilder
from memq.format.blocks.columns import BlockReader
from memq.format.blocks.header import EXTENSIONS, parse_header, tag_bit
from memq.format.object import BlockEntry
from memq.format.pointer import decode_pointer
from memq.topic import Committed, Position
from tests.unit.cursor_reads import BEGINNING, position_at, records, shown
from tests.unit.queue_model import PARTITION, WINDOW_MS, Block, Log


class FilteredRead:
    """A reader with a filter: the fetched batches, what was delivered, and what was left out."""

    def __init__(
        self, log: Log, wanted: RecordFilter, end: Position | None = None, start: Position = BEGINNING
    ) -> None:
        self.cursor = PartitionCursor(PARTITION, start, window_ms=WINDOW_MS, wanted=wanted, end=end)
        self.cursor.begin()
        self.cursor.take_entries(shown(log))
        self.fetched: list[int] = []
        self.indexed: list[int] = []
        self.by_index: list[int] = []  # those of which only wanted blocks were fetched
        self.left_out: list[LeftOut] = []
        self.found: list[ReadyRange] = []
        self._log, self._wanted = log, wanted

    def read(self, *, damaged_index: bool = False) -> list[bytes | None]:
        while (slot := self.cursor.next_fetch()) is not None:
            self.cursor.start_fetch(slot)
            assert slot.pointer is not None
            pieces = self._log.pieces(slot.offset, slot.pointer)
            if slot.unwanted:
                self.indexed.append(slot.offset)
                entries = [BlockEntry.from_header(piece.header, 0) for piece in pieces if piece.header is not None]
                self.cursor.identify(slot, None if damaged_index else entries)
            elif slot.part is not None:
                entries = [BlockEntry.from_header(piece.header, 0) for piece in pieces if piece.header is not None]
                inside = [item for item in numbered_entries(entries) if item.first < slot.part[1]]
                before = [item for item in inside if item.first + item.entry.count <= slot.part[0]]
                passed = [each for each in inside[len(before) :] if self._wanted.excludes(each.entry.tag_bits)]
                numbers = {each.number for each in inside} - {each.number for each in (*before, *passed)}
                self.by_index.append(slot.offset)
                self.cursor.fetched(slot, [piece for piece in pieces if piece.number in numbers], before, passed)
            else:
                self.fetched.append(slot.offset)
                self.cursor.fetched(slot, pieces)
        while (delivery := self.cursor.deliver()) is not None:
            kept = wanted_part(delivery, self._wanted, self.cursor.counts, self.left_out)
            self.found += [kept] if kept is not None else []
        self.left_out += self.cursor.take_seen().left_out
        return [value for _, value in records(self.found)]


def tagged(producer: int, first: int, *tags: str | None, sealed_ms: int = 1) -> Block:
    return Block(producer, first, len(tags), sealed_ms=sealed_ms, tags=tags)


def test_batches_without_a_wanted_tag_are_not_fetched() -> None:
    log = Log()
    log.batch(tagged(1, 0, "a", "a"))
    log.batch(tagged(1, 2, "b", "b", "b"))
    log.batch(tagged(1, 5, None), tagged(2, 0, "c"))
    log.batch(tagged(1, 6, "b"))
    read = FilteredRead(log, RecordFilter("b"))
    assert read.read() == [b"1:2", b"1:3", b"1:4", b"1:6"]
    assert read.fetched == [1, 3]
    assert read.left_out == [LeftOut(0, 1, 0, 2, 1), LeftOut(0, 1, 5, 6, 1), LeftOut(0, 2, 0, 1, 1)]
    assert (read.cursor.counts.records, read.cursor.counts.filtered_records) == (4, 4)
    assert read.cursor.counts.gap_sequences == 0
    assert read.cursor.position == position_at(4)
    assert read.cursor.behind.totals.records == 8


def test_blocks_without_a_wanted_tag_are_left_out_of_a_fetched_batch() -> None:
    log = Log()
    log.batch(tagged(1, 0, "a"), tagged(1, 1, "b"), tagged(2, 0, "a"))
    read = FilteredRead(log, RecordFilter(["b"]))
    assert read.read() == [b"1:1"]
    assert read.left_out == [LeftOut(0, 1, 0, 1, 1), LeftOut(0, 2, 0, 1, 1)]
    assert read.cursor.counts.gap_sequences == 0


def test_tags_that_share_a_bit_are_told_apart_in_the_records() -> None:
    other = next(f"x{number}" for number in range(10_000) if tag_bit(f"x{number}") == tag_bit("b"))
    log = Log()
    log.batch(tagged(1, 0, other, "b", other))
    log.batch(tagged(1, 3, other))
    read = FilteredRead(log, RecordFilter("b"))
    assert read.read() == [b"1:1"]
    assert read.fetched == [0, 1]
    assert read.left_out == [LeftOut(0, 1, 3, 4, 1)]
    assert (read.cursor.counts.records, read.cursor.counts.filtered_records) == (1, 3)


@pytest.mark.parametrize("damaged", [False, True], ids=["by its index", "by its blocks"])
def test_a_batch_that_its_pointer_does_not_identify_is_identified(damaged: bool) -> None:
    log = Log()
    log.batch(tagged(1, 0, "a", "a"), tagged(1, 2, "a"), named=False)
    log.batch(tagged(1, 3, "b"))
    read = FilteredRead(log, RecordFilter("b"))
    assert read.read(damaged_index=damaged) == [b"1:3"]
    assert (read.indexed, read.fetched) == ([0], [0, 1] if damaged else [1])
    assert read.left_out == [LeftOut(0, 1, 0, 2, 1), LeftOut(0, 1, 2, 3, 1)]


def test_a_batch_of_several_minutes_is_identified_by_its_index() -> None:
    log = Log()
    log.batch(tagged(1, 0, "a", sealed_ms=59_999), tagged(1, 1, "a", sealed_ms=60_000))
    read = FilteredRead(log, RecordFilter("b"))
    assert read.read() == []
    assert read.indexed == [0]
    assert [each.base_ms for each in read.left_out] == [59_999, 60_000]


def test_a_copy_in_an_unwanted_batch_is_not_left_out() -> None:
    log = Log()
    log.batch(tagged(1, 0, "a"), tagged(1, 1, "a"), skip=(0,))
    read = FilteredRead(log, RecordFilter("b"))
    assert read.read() == []
    assert read.left_out == [LeftOut(0, 1, 1, 2, 1)]


def test_a_reader_stops_at_its_end_within_an_unwanted_batch() -> None:
    log = Log()
    log.batch(tagged(1, 0, "a", "a", "a"))
    read = FilteredRead(log, RecordFilter("b"), end=position_at(0, 2))
    assert read.read() == []
    assert read.cursor.position == position_at(0, 2)


@pytest.mark.parametrize(
    ("tags", "fetched"), [(("a", "a"), []), (("a", "b"), [0])], ids=["unwanted batch", "unwanted blocks"]
)
@pytest.mark.parametrize(
    ("start", "end", "left_out"),
    [
        (0, 2, [(0, 2)]),
        (0, 5, [(0, 3), (3, 5)]),
        (2, 4, [(2, 3), (3, 4)]),
        (4, 6, [(4, 6)]),
        (5, None, [(5, 6)]),
        (3, 9, [(3, 6)]),
    ],
)
def test_a_reader_leaves_out_only_records_between_its_start_and_its_end(
    tags: tuple[str, str], fetched: list[int], start: int, end: int | None, left_out: list[tuple[int, int]]
) -> None:
    log = Log()
    log.batch(tagged(1, 0, "a", "a", "a"), tagged(1, 3, "a", "a", "a"), tagged(2, 0, tags[1], sealed_ms=1))
    read = FilteredRead(
        log, RecordFilter("b"), None if end is None else position_at(0, min(end, 6)), position_at(0, start)
    )
    assert read.read() == ([] if end is not None or tags[1] == "a" else [b"2:0"])
    assert read.fetched == fetched
    wanted = [LeftOut(0, 1, first, next_, 1) for first, next_ in left_out]
    wanted += [LeftOut(0, 2, 0, 1, 1)] if end is None and tags[1] == "a" else []
    assert read.left_out == wanted
    assert read.cursor.counts.filtered_records == sum(each.next - each.first for each in wanted)
    assert read.cursor.counts.gap_sequences == 0


def mixed_log() -> Log:
    """Return two batches with wanted and other blocks, a skipped one, an unwanted copy, and a gap of sequences."""
    log = Log()
    log.batch(tagged(1, 0, "a", "a"), tagged(1, 2, "b", "a"), tagged(2, 0, "a"), tagged(2, 1, "b"), tagged(1, 4, "a"))
    log.batch(tagged(1, 4, "a"), tagged(1, 7, "b"), tagged(2, 0, "a"), tagged(3, 0, "b"), tagged(2, 2, None), skip=(2,))
    return log


@pytest.mark.parametrize("delivery_bytes", [1, 1_000_000])
@pytest.mark.parametrize("start", [(0, 0), (0, 1), (0, 3), (0, 5), (1, 0), (1, 2), (1, 4)])
@pytest.mark.parametrize("end", [(0, 1), (0, 4), (0, 6), (1, 1), (1, 4), (2, 0)])
def test_a_reader_that_fetches_only_wanted_blocks_gives_out_and_counts_the_same(
    monkeypatch: pytest.MonkeyPatch, start: tuple[int, int], end: tuple[int, int], delivery_bytes: int
) -> None:
    monkeypatch.setattr(cursor_module, "DELIVERY_BYTES", delivery_bytes)
    found = []
    for least in (1_000_000, 0):
        monkeypatch.setattr(cursor_module, "PART_BYTES_MIN", least)
        read = FilteredRead(mixed_log(), RecordFilter("b"), position_at(*end), position_at(*start))
        values = read.read()
        assert not (read.by_index if least else read.fetched)
        copies = read.cursor.counts.duplicate_records
        totals = read.cursor.behind.totals
        found.append(
            (values, read.left_out, read.cursor.counts, read.cursor.position, read.cursor.state, copies, totals)
        )
        assert read.cursor.held_bytes == 0
    assert found[0] == found[1]


def test_a_batch_without_a_wanted_block_before_its_end_is_passed_up_to_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cursor_module, "PART_BYTES_MIN", 0)
    read = FilteredRead(mixed_log(), RecordFilter("b"), position_at(0, 2))
    assert read.read() == []
    assert read.by_index == [0]
    assert (read.left_out, read.cursor.position) == ([LeftOut(0, 1, 0, 2, 1)], position_at(0, 2))


def test_an_index_that_saves_little_is_not_read_for_the_next_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cursor_module, "PART_BYTES_MIN", 0)
    log = Log()
    for number in range(WHOLE_BATCHES + 3):
        log.batch(tagged(1, 5 * number, "b", "b", "b", "b"), tagged(1, 5 * number + 4, "b" if number else "a"))
    read = FilteredRead(log, RecordFilter("b"))
    assert len(read.read()) == 5 * (WHOLE_BATCHES + 3) - 1
    assert read.by_index == [0, 1, WHOLE_BATCHES + 2]
    assert not PartChoice(RecordFilter(where="n = 1")).take()
    assert not PartChoice(None).take()


def test_a_batch_that_is_not_identified_is_counted_by_its_pointer() -> None:
    log = Log()
    log.batch(tagged(1, 0, "a", "a"), tagged(1, 2, "a"), named=False)
    read = FilteredRead(log, RecordFilter("b"))
    slot = read.cursor.next_fetch()
    assert slot is not None
    assert not slot.needs_index
    read.cursor.start_fetch(slot)
    read.cursor.identify(slot, ())
    assert read.read() == []
    assert (read.left_out, read.cursor.counts.filtered_records) == ([], 3)


def test_a_batch_that_retention_takes_before_its_index_was_read_is_a_gap() -> None:
    log = Log()
    log.batch(tagged(1, 0, "a"), named=False)
    read = FilteredRead(log, RecordFilter("b"))
    slot = read.cursor.next_fetch()
    assert slot is not None
    read.cursor.start_fetch(slot)
    read.cursor.expire(slot, 1)
    read.cursor.identify(slot, [])
    assert read.read() == []
    assert read.cursor.position == position_at(1)


def test_dropped_batches_are_identified_again() -> None:
    log = Log()
    log.batch(tagged(1, 0, "a"), named=False)
    log.batch(tagged(1, 1, "b"))
    read = FilteredRead(log, RecordFilter("b"))
    slot = read.cursor.next_fetch()
    assert slot is not None
    read.cursor.start_fetch(slot)
    read.cursor.drop_fetched()
    read.cursor.identify(slot, [])  # too late
    assert read.read() == [b"1:1"]
    assert (read.indexed, read.cursor.held_bytes) == ([0], 0)


def test_a_condition_chooses_records_by_their_headers() -> None:
    headers = ((("n", b"1"),), (), (("n", b"3"),), (("n", b"4"),))
    log = Log()
    log.batch(replace(Block(1, 0, 4), headers=headers), Block(2, 0, 2))
    read = FilteredRead(log, RecordFilter(where="n >= 3"))
    assert read.read() == [b"1:2", b"1:3"]
    assert read.left_out == [LeftOut(0, 2, 0, 2, 1)]
    absent = FilteredRead(log, RecordFilter(where="n IS NULL"))
    assert absent.read() == [b"1:1", b"2:0", b"2:1"]
    both = FilteredRead(log, RecordFilter(tags="a", where="n >= 3"))
    assert both.read() == []


def test_a_batch_has_only_its_wanted_records_in_each_form() -> None:
    headers = tuple((("n", b"%d" % number),) for number in range(4))
    log = Log()
    log.batch(replace(tagged(1, 0, "a", "b", "a", "b"), headers=headers))
    read = FilteredRead(log, RecordFilter(tags="a || b", where="n IN (1, 2)"), end=position_at(0, 3))
    assert read.read() == [b"1:1", b"1:2"]
    (delivery,) = read.found
    batch = Batch(TopicPartition("clicks", 0), (delivery.first, delivery.behind.position), delivery.slices, [], "o")
    assert len(batch) == 2
    assert batch.values() == [b"1:1", b"1:2"]
    assert [bytes(view or b"") for view in batch.memoryviews()] == [b"1:1", b"1:2"]
    assert list(batch.headers()) == [(("n", b"1"),), (("n", b"2"),)]
    assert [record.position for record in batch] == [position_at(0, 1), position_at(0, 2)]
    table = batch.arrow()
    assert table["value"].to_pylist() == [b"1:1", b"1:2"]
    assert table["tag"].to_pylist() == ["b", "a"]


def test_a_block_that_cannot_be_unpacked_stays_for_its_reader() -> None:
    log = Log()
    offset = log.batch(tagged(1, 0, "b", "a"))
    pointer = decode_pointer(log.entries[-1].body)
    (piece,) = log.pieces(offset, pointer)
    assert piece.header is not None
    bad = piece._replace(data=memoryview(bytes(piece.data[:-1])))
    wanted, counts, left = RecordFilter("b"), Counts(), list[LeftOut]()
    cursor = PartitionCursor(PARTITION, position_at(0), window_ms=WINDOW_MS)
    cursor.begin()
    cursor.take_entries(shown(log))
    slot = cursor.next_fetch()
    assert slot is not None
    cursor.start_fetch(slot)
    cursor.fetched(slot, [bad])
    delivery = cursor.deliver()
    assert delivery is not None
    kept = wanted_part(delivery, wanted, counts, left)
    assert kept is not None
    assert [part.records for part in kept.slices] == [2]
    assert not left


def test_a_block_of_a_newer_memq_stays_for_its_reader() -> None:
    """An error here lost the block, and the batch before it, which the user had not got yet."""
    builder = BlockBuilder()
    builder.append(struct.pack("<IHI", 6, 0x8000, 0), tag="b")  # read as an extension that must be understood
    data = builder.seal(producer_id=1, first_sequence=0, scope=1, now_ms=1, codec="none").data
    header = parse_header(data)
    header = header._replace(flags=header.flags | EXTENSIONS)
    piece = BlockPiece(0, 0, 1, header, memoryview(bytes(data)))
    with pytest.raises(UnsupportedFormatError):
        BlockReader(piece.data, header).values()
    here = Committed(position_at(0))
    delivery = ReadyRange(here.position, here, slices=(Slice(piece, 0, 1),))
    assert wanted_part(delivery, RecordFilter("b"), Counts(), []) == delivery


def test_runs_of_a_mask() -> None:
    assert list(runs_of(bytes([1, 1, 0, 1, 0, 0]), 1, 5)) == [(1, (1, 2)), (0, (2, 3)), (1, (3, 4)), (0, (4, 5))]
    assert list(runs_of(b"", 0, 0)) == []


@pytest.mark.parametrize(
    ("tags", "where"), [(None, None), ("*", None), (" * ", None)], ids=["no option", "a star", "a star with blanks"]
)
def test_no_option_is_no_filter(tags: str | None, where: str | None) -> None:
    assert filter_of(tags, where) is None


@pytest.mark.parametrize(
    ("tags", "text"),
    [
        ("", "lacks a tag at character 1"),
        ("A ||", "lacks a tag at character 5"),
        ("A || || B", "lacks a tag at character 5"),
        ("A | B", "has a single '|' at character 3"),
        ("A || B | C", "has a single '|' at character 8"),
        ("A || *", "has '*' with other tags, at character 5"),
        ([], "is empty"),
        (["A", ""], "an empty tag"),
        ("A || \ud800", "not valid Unicode"),
        (["\ud800"], "not valid Unicode"),
        ("||".join("A" * (TAGS_MAX + 1)), f"{TAGS_MAX} are allowed"),
        (["x" * 65_536], "over 65535 bytes"),
    ],
)
def test_malformed_tags_are_refused(tags: str | list[str], text: str) -> None:
    with pytest.raises(InvalidFilterError, match=re.escape(text)):
        filter_of(tags, None)


@pytest.mark.parametrize("tags", [5, b"A", ["A", 5], {"A": 1}])
def test_tags_of_another_type_are_refused(tags: object) -> None:
    with pytest.raises(TypeError, match=r"tags must be a text as 'A \|\| B' or a list of texts"):
        filter_of(tags, None)  # type: ignore[arg-type]


def test_a_list_holds_tags_that_the_text_can_not() -> None:
    log = Log()
    log.batch(tagged(1, 0, "a || b", " c", "a"))
    assert FilteredRead(log, RecordFilter(["a || b", " c"])).read() == [b"1:0", b"1:1"]
    assert FilteredRead(log, RecordFilter(" a||d")).read() == [b"1:2"]
