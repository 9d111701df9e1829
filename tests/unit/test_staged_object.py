"""A staged object has the codec that it was asked for, and a driver that closes asks for nothing any more."""

from __future__ import annotations

import asyncio

import pytest

from memq.client.bulk.staged_object import StagedObjectBuilder
from memq.client.bulk.staged_writer import StagedCommits
from memq.client.producer.fields import check_fields
from memq.errors import ClosedError
from memq.protocol.frames import Api, Frame
from tests.stepped_time import stepped_runtime
from tests.unit.toy_broker import ToyBroker, ToyConnection, run, toy_topic


@pytest.mark.parametrize(("codec", "small"), [("none", False), ("zstd", True)])
def test_blocks_are_compressed_as_the_writer_says(codec: str, small: bool) -> None:
    builder = StagedObjectBuilder({"clicks": toy_topic()}, 7, block_bytes=100_000, codec=codec)
    builder.add("clicks", check_fields(bytes(50_000), None, None, None, None), None, 60_000)
    _, _, staged = builder.build("memq", "w", "staged/key", 61_000)
    (piece,) = staged.pieces
    assert (piece.length < 5_000) == small
    assert piece.raw_bytes > 50_000


def test_a_driver_that_closes_ends_its_questions() -> None:
    async def test(broker: ToyBroker) -> None:
        commits = StagedCommits(broker.address, "w", runtime=stepped_runtime())
        await commits.connect()
        asked: list[int] = []

        def ignore(connection: ToyConnection, frame: Frame) -> bool:
            asked.append(frame.api)
            return frame.api == Api.METADATA

        broker.script = ignore
        waiting = asyncio.create_task(commits.topics(["views"]))
        await broker.until(lambda: bool(asked))
        await commits.close()
        with pytest.raises(ClosedError, match="was closed while it asked for topic 'views'"):
            await waiting

    run(test)
