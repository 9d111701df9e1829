"""An owner's memory of its last published batches: their blocks, and the positions of their records."""

from __future__ import annotations

from typing import cast

import pytest

from memq.broker.partition import known_blocks
from memq.broker.partition.known_blocks import RECENT_BATCHES, KnownBlocks
from memq.broker.partition.topic_processor import TopicProcessor
from memq.limits import BLOCK_HEADER_BYTES
from memq.protocol.frames import AckPosition
from memq.runtime.tasks import TaskOwner
from tests.brokers import block_of
from tests.unit.peers import TOPIC


def known() -> KnownBlocks:
    """Return the knowledge of a partition, which is asked nothing here."""
    return KnownBlocks(cast(TopicProcessor, None), cast(TaskOwner, None))


def headers_of(*blocks: tuple[int, int, int]) -> bytes:
    """Return the headers of blocks: producer, first sequence, records."""
    made = (block_of(TOPIC, first, [b"v"] * count, producer=producer) for producer, first, count in blocks)
    return b"".join(block[:BLOCK_HEADER_BYTES] for block in made)


def test_a_block_s_records_lie_behind_those_of_the_blocks_before_it() -> None:
    blocks = known()
    blocks.remember(headers_of((1, 0, 3), (2, 0, 5), (1, 3, 7), (2, 5, 1)), 40)
    assert blocks.positions_of(1, 0, 3) == [AckPosition(0, 3, 40, 0)]
    assert blocks.positions_of(2, 0, 5) == [AckPosition(0, 5, 40, 3)]
    assert blocks.positions_of(1, 3, 10) == [AckPosition(3, 10, 40, 8)]
    assert blocks.positions_of(2, 5, 6) == [AckPosition(5, 6, 40, 15)]
    assert blocks.positions_of(3, 0, 3) == blocks.positions_of(1, 1, 3) == blocks.positions_of(2, 3, 10) == []


def test_the_last_batches_are_remembered_and_the_newest_counts() -> None:
    blocks = known()
    for number in range(RECENT_BATCHES + 1):
        blocks.remember(headers_of((1, number, 1)), number)
    assert blocks.positions_of(1, 0, 1) == []
    assert [
        blocks.positions_of(1, number, number + 1)[0].pointer_offset for number in range(1, RECENT_BATCHES + 1)
    ] == [*range(1, RECENT_BATCHES + 1)]
    blocks.remember(headers_of((1, 4, 1)), 99)
    assert blocks.positions_of(1, 4, 5) == [AckPosition(4, 5, 99, 0)]
    blocks.remember(headers_of((1, 4, 1)), None)
    assert blocks.positions_of(1, 4, 5) == [], "where it lies is in doubt"
    blocks.forget()
    assert blocks.positions_of(1, 3, 4) == []


def test_batches_of_very_many_blocks_are_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_blocks, "RECENT_BLOCKS_MAX", 2)
    blocks = known()
    blocks.remember(headers_of((1, 0, 1), (1, 1, 1)), 1)
    blocks.remember(headers_of((1, 2, 1), (1, 3, 1), (1, 4, 1)), 2)
    assert blocks.positions_of(1, 1, 2) == [AckPosition(1, 2, 1, 1)]
    assert blocks.positions_of(1, 2, 3) == []
