"""Block boundaries of a copied topic: the same from the end of any block on, whatever follows the plan."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate

import pytest

from memq.client.bulk.block_cutter import (
    BLOCK_BYTES_MAX,
    BLOCK_RECORDS_MAX,
    Cut,
    Cutter,
    RecordCutter,
    decode_plan,
    encode_plan,
    producer_of,
)
from memq.client.producer.fields import RecordColumns, RecordFields
from memq.client.producer.partitioner import PartitionMap
from memq.client.producer.window import ProducerWindow
from memq.client.producer.window_events import Acked, Opened, OpenStream, Room, Sealed, UnackedBlock, WriteBlock
from memq.format.blocks.columns import open_block
from tests.unit.blocks import seal
from tests.unit.toy_broker import toy_topic

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
    cutter = Cutter("clicks", 0)
    done: list[Cut | None] = [
        cutter.add(offset, fields, fields.size) for offset, fields in records if begin <= offset < end
    ]
    done.append(cutter.end())
    return [(each.first, each.next) for each in done if each is not None]


def test_a_block_has_its_bounds() -> None:
    small = [(offset, RecordFields(b"", None, None, None, None)) for offset in range(BLOCK_RECORDS_MAX + 1)]
    assert cut(small, 0, 1 << 40) == [(0, BLOCK_RECORDS_MAX), (BLOCK_RECORDS_MAX, BLOCK_RECORDS_MAX + 1)]
    large = [(offset, RecordFields(bytes(BLOCK_BYTES_MAX + 1), None, None, None, None)) for offset in range(2)]
    assert cut(large, 0, 1 << 40) == [(0, 1), (1, 2)]


def test_a_block_that_grows_by_several_calls_has_its_bounds() -> None:
    count, partition_map = BLOCK_RECORDS_MAX * 3 // 5, PartitionMap(toy_topic())
    cutter = RecordCutter()
    many = RecordColumns([b""] * count, None, None, None)
    cuts = [cut for _ in range(2) for cut in cutter.add_many("clicks", partition_map, many, [0] * count)]
    blocks = [(cut.first, cut.next) for cut in (*cuts, *cutter.end())]
    assert blocks == [(0, BLOCK_RECORDS_MAX), (BLOCK_RECORDS_MAX, 2 * count)]


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
    assert producer_of(*named) == 425319717730855437, "a copy that was killed is continued by another release"


def test_a_window_opens_its_stream_again_after_sequences_that_no_record_has() -> None:
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


@pytest.mark.parametrize("seed", range(40))
def test_records_of_many_partitions_are_cut_alike_however_they_come(seed: int) -> None:
    """A call whose last record began a block, where the next partition had none, ended with an IndexError.

    And a block all of whose keys are null had a column of keys, or had none, depending on the calls.
    """
    rng = random.Random(seed)
    partition_map = PartitionMap(toy_topic(partitions=rng.choice((1, 2, 3))))
    sizes = [rng.choice((0, 30, 60, 99, 100, 101)) for _ in range(300)]
    keys: list[bytes | None] | None = [b"%d" % rng.randrange(9) for _ in sizes] if rng.random() < 0.5 else None
    if keys is not None and rng.random() < 0.5:
        keys = [key if rng.random() < 0.8 else None for key in keys]
    many, one, several = (
        RecordColumns([bytes(size) for size in sizes], keys, None, None),
        RecordCutter(100),
        RecordCutter(100),
    )
    singles: list[Cut | None] = []
    for value, key in zip(many.values, keys or [None] * len(sizes), strict=True):
        fields = RecordFields(value, key, None, None, None)
        singles.append(one.add("clicks", partition_map, fields, fields.size, None))
    cuts: list[Cut] = []
    at = 0
    while at < len(sizes):
        part = many.part(at, at + rng.choice((1, 2, 3, 50)))
        cuts += several.add_many("clicks", partition_map, part, part.sizes(0, len(part.values)))
        at += len(part.values)

    def blocks(found: Sequence[Cut | None]) -> list[tuple[int, int, bytes]]:
        return sorted((cut.partition, cut.first, bytes(seal(cut.builder).data)) for cut in found if cut is not None)

    assert blocks([*cuts, *several.end()]) == blocks([*singles, *one.end()])


@pytest.mark.parametrize("seed", range(20))
def test_a_cut_that_continues_after_a_restart_is_the_same_cut(seed: int) -> None:
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
    many, cutter = RecordColumns([bytes(size) for size in sizes], None, None, None), Cutter("clicks", 0)
    done: list[Cut | None] = []
    at = 0
    while at < len(sizes):
        count = min(rng.choice((1, 5, 1_000, 30_000)), len(sizes) - at)
        part, totals, taken = many.part(at, at + count), list(accumulate(sizes[at : at + count], initial=0)), 0
        while (taken := cutter.extend(part, taken, count, totals)) < count:
            done.append(cutter.end())
        at += count
    done.append(cutter.end())
    rows = [(number, RecordFields(value, None, None, None, None)) for number, value in enumerate(many.values)]
    assert [(each.first, each.next) for each in done if each is not None] == cut(rows, 0, len(rows))
    blocks = [open_block(seal(each.builder).data) for each in done if each is not None]
    assert [value for block in blocks for value in block.values()] == many.values
