"""Objects of held blocks: their index is read back, damage is found, and `memq verify` checks each block."""

from __future__ import annotations

import msgspec
import pytest
from awscrt.checksums import crc32c

from memq.audit.checks.object_check import check_file
from memq.errors import CorruptDataError, UnsupportedFormatError
from memq.format.blocks.builder import BlockBuilder
from memq.format.blocks.header import scope_of
from memq.format.held_object import (
    MAGIC,
    TRAILER,
    HeldBlock,
    HeldLane,
    HoldId,
    IndexedLane,
    Target,
    held_object_end,
    held_object_index,
)
from memq.format.key import held_object_key, held_prefix, kind_without_batches
from memq.limits import FORMAT_VERSION
from memq.queues.decisions import queue_scope

TARGET = Target("clicks", "ab" * 16, 3)
KEY = held_object_key("memq", 77, 1_700_000_000_000)


def block(producer: int, partition: int = 3, scope: int | None = None) -> bytes:
    builder = BlockBuilder()
    builder.append(b"value", b"key", None, None, None)
    if scope is None:
        scope = scope_of(bytes.fromhex(TARGET.topic_id), partition)
    return bytes(builder.seal(producer_id=producer, first_sequence=0, scope=scope, now_ms=5).data)


def held(*blocks: bytes, target: Target = TARGET) -> tuple[bytes, HeldLane]:
    named, at = [], 0
    for number, data in enumerate(blocks, 1):
        named.append(HeldBlock(HoldId(number, 0), 1, 1_000 + number, at, len(data)))
        at += len(data)
    lane = HeldLane(target, "", tuple(named))
    return b"".join(blocks) + held_object_end([lane], 0xAB), lane


def test_an_object_of_held_blocks_has_its_index_at_its_end() -> None:
    data, lane = held(block(1), block(2))
    assert held_object_index(data) == (IndexedLane(lane.target, lane.lane, lane.blocks, 0xAB),)
    assert KEY.startswith(held_prefix("memq"))
    assert kind_without_batches(KEY) == "object of held blocks"
    verdict = check_file(KEY, memoryview(data))
    assert (verdict.blocks, verdict.records, verdict.findings) == (2, 2, [])


def test_the_index_of_an_earlier_release_has_no_shard() -> None:
    _, lane = held(block(1))
    index = msgspec.msgpack.encode((lane,))
    data = block(1) + index + TRAILER.pack(len(index), crc32c(index), FORMAT_VERSION, MAGIC)
    assert held_object_index(data) == (IndexedLane(lane.target, lane.lane, lane.blocks, 0),)


def test_each_changed_byte_of_an_object_of_held_blocks_is_found() -> None:
    data, _ = held(block(1), block(2))
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1
        assert check_file(KEY, memoryview(changed)).findings, f"byte {at}"
    for length in range(len(data)):
        with pytest.raises((CorruptDataError, UnsupportedFormatError)):
            held_object_index(data[:length])


def test_a_held_block_of_another_partition_or_producer_is_damage() -> None:
    for data in (held(block(1, partition=2))[0], held(block(9))[0]):
        (finding,) = check_file(KEY, memoryview(data)).findings
        assert finding.code == "corrupt-data"


def test_blocks_of_queue_items_are_checked_by_the_scope_of_their_queue() -> None:
    target = Target("billing/jobs", "", 0)
    data, _ = held(block(1, scope=queue_scope("billing/jobs")), target=target)
    verdict = check_file(KEY, memoryview(data))
    assert (verdict.blocks, verdict.findings) == (1, [])
    data, _ = held(block(1, scope=queue_scope("jobs")), target=target)
    (finding,) = check_file(KEY, memoryview(data)).findings
    assert finding.code == "corrupt-data"
