"""The contents of a batch, also of a payload that turns out to be damaged while it is read."""

from __future__ import annotations

import pytest
from awscrt.checksums import crc32c

from memq.client.consumer.batch import Batch, Damage, Record, Slice, TopicPartition
from memq.errors import CorruptDataError
from memq.format.batch import BlockPiece
from memq.format.blocks.header import check_block
from memq.limits import BLOCK_HEADER_BYTES
from memq.topic import Position
from tests.unit.queue_model import Block

PLACE = TopicPartition("clicks", 0)


def piece(number: int, first: int, data: bytes) -> BlockPiece:
    header = check_block(data)
    return BlockPiece(number, first, header.count, header, memoryview(data))


def poisoned(block: Block) -> bytes:
    """A block whose checksum is right and whose payload makes no sense: the broker can't see that."""
    data = bytearray(block.data())
    data[BLOCK_HEADER_BYTES] ^= 0x40  # the length of the first value
    data[4:8] = crc32c(bytes(data[8:])).to_bytes(4, "little")
    return bytes(data)


def batch_of(*datas: bytes, reports: list[Damage] | None = None, low: int = 0, high: int | None = None) -> Batch:
    pieces, first = [], 0
    for number, data in enumerate(datas):
        pieces.append(piece(number, first, data))
        first += pieces[-1].records
    slices = [Slice(part, 0, part.records) for part in pieces]
    slices[0] = slices[0]._replace(low=low)
    slices[-1] = slices[-1]._replace(high=slices[-1].high if high is None else high)
    report = None if reports is None else lambda batch, damage: reports.append(damage)
    return Batch(PLACE, (Position(0, 5, low), Position(0, 6)), slices, [], "o/5", report)


def test_all_ways_of_reading_agree() -> None:
    batch = batch_of(Block(1, 0, 3).data(), Block(1, 3, 2).data())
    expected = [*Block(1, 0, 3).values(), *Block(1, 3, 2).values()]
    assert batch.values() == expected
    assert [bytes(view) for view in batch.memoryviews() if view is not None] == expected
    assert [record.value for record in batch] == expected
    assert batch.arrow().column("value").to_pylist() == expected
    assert [record.position for record in batch] == [Position(0, 5, index) for index in range(5)]
    assert len(batch) == 5


def test_a_part_of_a_block_is_the_same_part_every_way() -> None:
    batch = batch_of(Block(1, 0, 3).data(), Block(1, 3, 3).data(), low=1, high=2)
    expected = [*Block(1, 0, 3).values()[1:], *Block(1, 3, 3).values()[:2]]
    assert batch.values() == [record.value for record in batch] == expected
    assert batch.arrow().column("value").to_pylist() == expected
    assert [record.position.record_index for record in batch] == [1, 2, 3, 4]
    assert len(batch) == 4


def test_it_is_finished_when_all_was_read() -> None:
    batch = batch_of(Block(1, 0, 2).data())
    records = iter(batch)
    next(records)
    next(records)
    assert not batch.finished
    assert list(records) == []
    assert batch.finished


def test_a_poisoned_payload_is_raised_with_its_place() -> None:
    batch = batch_of(Block(1, 0).data(), poisoned(Block(1, 3)))
    for read in (batch.values, lambda: list(batch), batch.arrow, batch.memoryviews):
        with pytest.raises(CorruptDataError, match="block 1 of object 'o/5' at 0:5:3"):
            read()
    assert not batch.finished


def test_a_poisoned_payload_is_passed_over_and_reported_once() -> None:
    reports: list[Damage] = []
    batch = batch_of(Block(1, 0).data(), poisoned(Block(1, 3)), Block(1, 6).data(), reports=reports)
    expected = [*Block(1, 0).values(), *Block(1, 6).values()]
    assert batch.values() == expected
    assert [record.value for record in batch] == expected
    assert [record.position.record_index for record in batch] == [0, 1, 2, 6, 7, 8]
    assert batch.arrow().num_rows == 6
    assert batch.damaged == reports
    assert [(damage.block, damage.records) for damage in reports] == [(1, 3)]


def test_a_record_is_a_value_that_can_be_compared_and_hashed() -> None:
    first = Record(b"v", b"k", (("a", b"1"),), 17, "web", (5 << 24) | 2, 1)
    assert first == Record(b"v", b"k", (("a", b"1"),), 17, "web", (5 << 24) | 2, 1)
    assert len({first, first}) == 1
    assert first.position == Position(1, 5, 2)
    with pytest.raises(AttributeError):
        first.value = b"w"  # type: ignore[misc]
