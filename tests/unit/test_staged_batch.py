"""Batches that writers store themselves: the checks of their index, and the resulting pointer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from awscrt.checksums import crc32c

from memq.broker.partition.staged_batch import StagedBatch, check_bounds, staged_batch, staged_index
from memq.errors import CorruptDataError, InvalidRequestError, MemqError
from memq.format.blocks.header import parse_header
from memq.format.object import BatchEntry, BlockEntry, ObjectMeta, ObjectTopic, encode_index
from memq.format.pointer import Location, NamedProducer
from memq.limits import OBJECT_BYTES_MAX, SEQUENCE_END, TRAILER_BYTES
from memq.protocol.admin_messages import WirePiece
from tests.unit.audited import TOPIC
from tests.unit.blocks import NOW_MS, Record, build, seal

TARGET = ("c", TOPIC.id, 0)
WRITERS = (NamedProducer(producer=9, epoch=0, last_sequence=1),)
RAW = 777


def sealed(tag: str, time_ms: int, slots: tuple[int, int], first: int) -> bytes:
    rows: list[Record] = [(b"v", b"k", (), time_ms, tag), (b"w", b"k", (), time_ms + 5, tag)]
    return bytes(seal(build(rows), slot_range=slots, first_sequence=first).data)


BLOCKS = (
    sealed("web", NOW_MS + 50, (20, 30), 4),
    sealed("app", NOW_MS, (10, 90), 6),
    sealed("web", NOW_MS + 90, (40, 50), 8),
)


class Staged:
    """An object with a batch of another partition, then one of `blocks`; `changes` are those of its entry."""

    def __init__(self, blocks: Sequence[bytes] = BLOCKS, change: Any = lambda entry: entry, **changes: Any) -> None:
        before, body = BLOCKS[0], b"".join(blocks)
        entries, at = [BlockEntry.from_header(parse_header(before), 0)], len(before)
        for data in blocks:
            entries.append(change(BlockEntry.from_header(parse_header(data), at)))
            at += len(data)
        batch = BatchEntry(len(before), len(body), NOW_MS, 0, 2 * len(blocks), 1, len(blocks), 0, 0)
        others = BatchEntry(0, len(before), NOW_MS, 0, 2, 0, 1, 5, 0)
        meta = ObjectMeta(cluster="c", broker="", topics=(ObjectTopic(TOPIC.name, TOPIC.id),), created_ms=NOW_MS)
        self.index = encode_index(meta, [others, batch._replace(**changes)], entries, at)
        self.body = before + body
        self.piece = WirePiece(
            key="o",
            object_bytes=at + len(self.index),
            index_offset=at,
            offset=len(before),
            length=len(body),
            raw_bytes=RAW,
        )

    def read(self, target: tuple[str, str, int] = TARGET, **piece: Any) -> StagedBatch:
        """Read it as a broker does, by what a writer says of its piece."""
        asked = msgspec.structs.replace(self.piece, **piece)
        check_bounds(asked)
        return staged_batch(staged_index(self.index, asked), asked, "main", target, WRITERS, settled, 12.5)


def settled(error: MemqError | None) -> None:
    """Nobody waits here."""


def test_a_batch_has_what_all_of_its_blocks_have_together() -> None:
    staged = Staged()
    batch = staged.read()
    assert batch.location == Location(store="main", key="o", offset=staged.piece.offset, length=staged.piece.length), (
        "its index is right behind it"
    )
    assert (batch.records, batch.raw_bytes, batch.writers, batch.until_s) == (6, RAW, WRITERS, 12.5)
    assert (batch.least_ms, batch.greatest_ms, batch.slots) == (NOW_MS, NOW_MS + 95, (10, 90))
    headers = [parse_header(data) for data in BLOCKS]
    assert batch.tag_bits == headers[0].tag_bits | headers[1].tag_bits | headers[2].tag_bits
    assert batch.sequences == ((7, 4, 6), (7, 6, 8), (7, 8, 10))
    assert batch.checksum == crc32c(b"".join(BLOCKS))
    assert Staged(BLOCKS[::-1]).read().slots == (10, 90), "in any order"


def test_a_batch_before_another_one_names_the_offset_of_the_index() -> None:
    staged = Staged()
    first = staged.read(("c", TOPIC.id, 5), offset=0, length=len(BLOCKS[0]))
    assert first.location.index == staged.piece.index_offset
    assert (first.records, first.slots) == (2, (20, 30))


@pytest.mark.parametrize("target", [("d", TOPIC.id, 0), ("c", "ff" * 16, 0), ("c", TOPIC.id, 1), ("c", TOPIC.id, 5)])
def test_a_batch_of_another_target_is_refused(target: tuple[str, str, int]) -> None:
    with pytest.raises(CorruptDataError, match=f"object 'o' has no batch of partition {target[2]} at"):
        Staged().read(target)


@pytest.mark.parametrize(("offset", "length"), [(-1, 0), (-1, 1), (0, -1), (1, -1)])
def test_a_batch_that_lies_elsewhere_is_refused(offset: int, length: int) -> None:
    staged = Staged()
    with pytest.raises(CorruptDataError, match="object 'o' has no batch of partition 0 at"):
        staged.read(offset=staged.piece.offset + offset, length=staged.piece.length + length)


def test_an_index_at_another_offset_than_the_writer_says_is_refused() -> None:
    with pytest.raises(CorruptDataError, match=r"object 'o' has its index at \d+, not \d+"):
        Staged().read(index_offset=Staged().piece.index_offset + 1)


@pytest.mark.parametrize(
    "change",
    [
        lambda entry: entry._replace(length=entry.length - 1),
        lambda entry: entry._replace(producer_id=0),
        lambda entry: entry._replace(producer_id=SEQUENCE_END),
        lambda entry: entry._replace(first_sequence=SEQUENCE_END - 2),
        lambda entry: entry._replace(count=0),
    ],
    ids=["length", "no producer", "producer", "sequence", "count"],
)
def test_blocks_that_can_not_be_of_the_batch_are_refused(change: Any) -> None:
    with pytest.raises(CorruptDataError):
        Staged(change=change).read()


def test_the_greatest_producer_and_sequence_are_taken() -> None:
    batch = Staged(BLOCKS[:1], lambda entry: entry._replace(producer_id=SEQUENCE_END - 1)).read()
    assert batch.sequences == ((SEQUENCE_END - 1, 4, 6),)
    last = Staged(BLOCKS[:1], lambda entry: entry._replace(first_sequence=SEQUENCE_END - 3)).read()
    assert last.sequences == ((7, SEQUENCE_END - 3, SEQUENCE_END - 1),)


SOUND = {"object_bytes": 1_000, "index_offset": 700, "offset": 100, "length": 600, "raw_bytes": 900}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"offset": 0},
        {"length": 1},
        {"object_bytes": 701 + TRAILER_BYTES},
        {"object_bytes": OBJECT_BYTES_MAX + TRAILER_BYTES - 1},
        {"raw_bytes": 600 - (1 << 32)},
        {"raw_bytes": (1 << 53) - (1 << 32) - 1},
    ],
)
def test_a_piece_within_its_object_is_taken(changes: dict[str, int]) -> None:
    check_bounds(WirePiece(key="o", **{**SOUND, **changes}))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"offset": -1}, "of 1000 bytes"),
        ({"length": 0}, "of 1000 bytes"),
        ({"length": 601}, "of 1000 bytes"),
        ({"object_bytes": 700 + TRAILER_BYTES}, "of 732 bytes"),
        ({"object_bytes": OBJECT_BYTES_MAX + TRAILER_BYTES}, "piece at 100"),
        ({"raw_bytes": 599 - (1 << 32)}, "raw bytes"),
        ({"raw_bytes": (1 << 53) - (1 << 32)}, "raw bytes"),
    ],
)
def test_a_piece_with_impossible_bounds_is_refused(changes: dict[str, int], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        check_bounds(WirePiece(key="o", **{**SOUND, **changes}))
