"""How a copied topic is cut: from any block's end on, and whatever comes behind the plan's end, the cut is the same."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest

from memq.client.bulk.import_plan import (
    BLOCK_BYTES_MAX,
    BLOCK_RECORDS_MAX,
    Cut,
    Cutter,
    decode_plan,
    encode_plan,
    producer_of,
)
from memq.client.producer.fields import RecordColumns, RecordFields
from memq.client.producer.window import ProducerWindow
from memq.client.producer.window_events import Acked, Opened, OpenStream, Room, Sealed, UnackedBlock, WriteBlock
from memq.format.blocks.columns import open_block
from tests.unit.blocks import seal

Source = list[tuple[int, RecordFields]]


def source(seed: int, count: int = 3_000) -> Source:
    """Records with offsets that leave gaps, of sizes up to more than a block takes."""
    rng = random.Random(seed)
    found, offset = [], rng.randrange(1_000)
    for _ in range(count):
        offset += 1 if rng.random() < 0.995 else rng.randrange(2, 50)
        size = rng.choice((0, 10, 100, 2_000, BLOCK_BYTES_MAX // 2 if rng.random() < 0.05 else 500))
        found.append((offset, RecordFields(bytes(size), None, None, None, None)))
    return found


def cut(records: Source, begin: int, end: int) -> list[tuple[int, int]]:
    cutter = Cutter()
    done: list[Cut | None] = [
        cutter.add(offset, fields, fields.size) for offset, fields in records if begin <= offset < end
    ]
    done.append(cutter.end())
    return [(each.first, each.next) for each in done if each is not None]


@pytest.mark.parametrize("seed", range(20))
def test_a_cut_that_goes_on_is_the_cut_that_was_left(seed: int) -> None:
    records = source(seed)
    end = records[2_000][0]
    whole = cut(records, 0, end)
    assert sum(next_ - first for first, next_ in whole) == 2_000
    for number, (_, next_) in enumerate(whole):
        assert cut(records, next_, end) == whole[number + 1 :]


@pytest.mark.parametrize("seed", range(5))
def test_many_at_once_are_cut_as_one_by_one(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.choice((0, 0, 30, 2_000, BLOCK_BYTES_MAX // 3, BLOCK_BYTES_MAX + 1)) for _ in range(200)]
    sizes += [rng.choice((0, 1)) for _ in range(BLOCK_RECORDS_MAX * 2)]
    rng.shuffle(sizes)
    many, cutter = RecordColumns([bytes(size) for size in sizes], None, None, None), Cutter()
    done: list[Cut | None] = []
    at = 0
    while at < len(sizes):
        count = min(rng.choice((1, 5, 1_000, 30_000)), len(sizes) - at)
        part, ends, taken = many.part(at, at + count), list(accumulate(sizes[at : at + count])), 0
        while (taken := cutter.extend(at + taken, part, taken, count, ends)) < count:
            done.append(cutter.end())
        at += count
    done.append(cutter.end())
    rows = [(number, RecordFields(value, None, None, None, None)) for number, value in enumerate(many.values)]
    assert [(each.first, each.next) for each in done if each is not None] == cut(rows, 0, len(rows))
    blocks = [open_block(seal(each.columns).data) for each in done if each is not None]
    assert [value for block in blocks for value in block.values()] == many.values


def test_a_block_has_its_bounds() -> None:
    small = [(offset, RecordFields(b"", None, None, None, None)) for offset in range(BLOCK_RECORDS_MAX + 1)]
    assert cut(small, 0, 1 << 40) == [(0, BLOCK_RECORDS_MAX), (BLOCK_RECORDS_MAX, BLOCK_RECORDS_MAX + 1)]
    large = [(offset, RecordFields(bytes(BLOCK_BYTES_MAX + 1), None, None, None, None)) for offset in range(2)]
    assert cut(large, 0, 1 << 40) == [(0, 1), (1, 2)]


def test_a_plan_is_read_back_and_nothing_else_is_one() -> None:
    assert decode_plan(encode_plan(17)) == 17
    for other in ("", "17", encode_plan(17) + " ", encode_plan(17).replace("1 ", "2 ")):
        assert decode_plan(other) is None


def test_a_producer_is_of_one_source_partition_and_one_topic() -> None:
    named = ("cluster", "topic", 3, "target")
    others = [("other", *named[1:]), (named[0], "other", *named[2:]), ("cluster", "topic", 4, "target")]
    found = {producer_of(*each) for each in (named, *others, (*named[:3], "other"))}
    assert len(found) == 5
    assert all(0 < each < 1 << 63 for each in found)


def test_a_window_opens_its_stream_anew_behind_sequences_that_no_record_has() -> None:
    window = ProducerWindow("a partition", random.Random(0))
    first, second = UnackedBlock(100, 5, 1e9), UnackedBlock(110, 5, 1e9)
    assert next(each for each in window.handle(Sealed(first)) if isinstance(each, OpenStream)).sequence == 100
    window.handle(Opened())
    assert isinstance(window.handle(Room(0.0))[0], WriteBlock)
    window.handle(Sealed(second))
    assert window.handle(Room(0.0)) == [], "not before what lies before the gap is acked"
    window.handle(Acked(105))
    reopened = window.handle(Room(0.0))
    assert [each.sequence for each in reopened if isinstance(each, OpenStream)] == [110]
    assert window.burned == [(0, 100), (105, 110)]
