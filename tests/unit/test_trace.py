"""The positions of one record in a batch: by sequence, key and position, also in a damaged block."""

from __future__ import annotations

import pytest

from memq.audit.trace import Sighting, TraceTarget, sightings
from memq.format.blocks.header import parse_header
from memq.format.pointer import decode_pointer
from memq.limits import BLOCK_HEADER_BYTES
from memq.topic import Position
from tests.unit.queue_model import Block, Log

BLOCKS = [Block(1, 0, 2), Block(2, 0, 3), Block(1, 2, 4)]
LOG = Log()
LOG.batch(*BLOCKS)
ENTRY, BODY = LOG.entries[0], LOG.bodies[0]
POINTER = decode_pointer(ENTRY.body)
LENGTHS = [parse_header(block.data()).length for block in BLOCKS]


def found(wanted: TraceTarget, body: bytes = BODY) -> list[Sighting]:
    return list(sightings(wanted, 0, ENTRY, POINTER, body))


def flipped(at: int) -> bytes:
    return BODY[:at] + bytes([BODY[at] ^ 1]) + BODY[at + 1 :]


@pytest.mark.parametrize(
    "wanted", [TraceTarget(producer=1, sequence=3), TraceTarget(position=Position(0, ENTRY.offset, 6))]
)
def test_a_record_is_found_by_its_sequence_and_by_its_position(wanted: TraceTarget) -> None:
    (one,) = found(wanted)
    assert (one.producer, one.sequence, one.position) == (1, 3, Position(0, ENTRY.offset, 6))
    at = POINTER.locations[0].offset + sum(LENGTHS[:2])
    assert (one.block, one.offset, one.length, one.damage) == (2, at, LENGTHS[2], "")
    assert one.time_ms == parse_header(BLOCKS[2].data()).base_ms


def test_a_damaged_block_shows_the_record_with_its_damage_and_hides_no_other() -> None:
    payload = flipped(LENGTHS[0] + BLOCK_HEADER_BYTES)
    (one,) = found(TraceTarget(producer=2, sequence=1), payload)
    assert (one.block, one.position.record_index, one.time_ms) == (1, 3, 0)
    assert "has checksum" in one.damage
    assert [each.block for each in found(TraceTarget(producer=1, sequence=2), payload)] == [2]


def test_behind_a_damaged_length_nothing_is_found() -> None:
    length = flipped(LENGTHS[0] + 12)
    assert [each.block for each in found(TraceTarget(producer=1, sequence=0), length)] == [0]
    assert found(TraceTarget(producer=1, sequence=2), length) == []


def test_a_sound_block_of_another_batch_is_damage() -> None:
    other = Block(9, 0, 2).data() + BODY[LENGTHS[0] :]
    (one,) = found(TraceTarget(producer=9, sequence=0), other)
    assert "is not one that the pointer names" in one.damage
