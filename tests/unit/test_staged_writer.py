"""Records of a staged writer: each is in its objects, for any size and any failing call."""

from __future__ import annotations

import asyncio

import pytest

from memq.client.bulk.block_cutter import BLOCK_RECORDS_MAX, Cut, RecordCutter
from memq.client.bulk.staged_writer import StagedCommits, StagedWriter
from memq.client.producer.fields import RecordFields, check_many
from memq.client.producer.partitioner import PartitionMap
from memq.errors import InvalidRequestError, MemqError, ProtocolError, TooLargeError
from memq.format.manifest import StagedObject
from memq.limits import BLOCK_RAW_BYTES_MAX, NAME_BYTES_MAX
from memq.protocol.frames import Api, Frame
from memq.protocol.messages import AdminAnswer, MetadataRequest, StoreMetadata, decode_message
from memq.runtime.clock import SystemClock
from memq.storage_handlers.memory import MemoryHandler
from tests.unit.toy_broker import ToyBroker, ToyConnection, run, toy_topic

TOPIC = toy_topic("clicks")
NO_UNICODE = "\ud800"


def writer() -> StagedWriter:
    return StagedWriter("test", {"clicks": TOPIC}, MemoryHandler(SystemClock()), "nightly")


def records_in(objects: list[StagedObject]) -> int:
    return sum(piece.records for staged in objects for piece in staged.pieces)


@pytest.mark.parametrize("value", [b"", None])
def test_records_without_a_byte_are_staged(value: bytes | None) -> None:
    async def test() -> None:
        single, many = writer(), writer()
        for _ in range(3):
            await single.add("clicks", value)
        await many.add_many("clicks", [value] * 3)
        assert [records_in(await each.finish()) for each in (single, many)] == [3, 3]

    asyncio.run(test())


def test_a_writer_without_records_stages_no_object() -> None:
    async def test() -> None:
        assert await writer().finish() == []
        refused = writer()
        with pytest.raises(TooLargeError):
            await refused.add_many("clicks", [b"0"], tag="t" * (NAME_BYTES_MAX + 1))
        assert await refused.finish() == []

    asyncio.run(test())


@pytest.mark.parametrize("tag", [NO_UNICODE, "t" * (NAME_BYTES_MAX + 1)])
def test_a_refused_record_takes_no_full_block_with_it(tag: str) -> None:
    cutter, places = RecordCutter(), PartitionMap(TOPIC)

    def add(tag: str | None = None) -> int:
        cut = cutter.add("clicks", places, RecordFields(b"0", b"k", None, None, tag), 2, None)
        return cut.builder.count if cut is not None else 0

    for _ in range(BLOCK_RECORDS_MAX):
        assert add() == 0
    with pytest.raises((InvalidRequestError, TooLargeError)):
        add(tag)
    assert add() == BLOCK_RECORDS_MAX
    assert [cut.builder.count for cut in cutter.end()] == [1]


def test_a_block_that_is_full_of_tags_ends_before_the_next_one() -> None:
    """The size of a block leaves tags out: from 16 MiB of tags on each further record was refused as too large."""
    cutter, places, count = RecordCutter(), PartitionMap(TOPIC), 600
    cuts = [
        cutter.add("clicks", places, RecordFields(b"0", None, None, None, f"{number:060000}"), 1, None)
        for number in range(count)
    ]
    blocks = [cut.builder.count for cut in (*cuts, *cutter.end()) if cut is not None]
    room = BLOCK_RAW_BYTES_MAX // 60_010
    assert blocks == [room, room, count - 2 * room]


@pytest.mark.parametrize("keyed", [True, False])
@pytest.mark.parametrize("each", [1, 7, 9_000])  # 9,000 have room only in part
def test_a_block_that_is_full_of_tags_ends_at_the_same_record_of_many(each: int, *, keyed: bool) -> None:
    """`add_many` with hundreds of tags raised TooLargeError, and each further call, too."""
    single, many, places = RecordCutter(), RecordCutter(), PartitionMap(TOPIC)
    key = b"k" if keyed else None
    cuts: list[Cut | None] = []
    same: list[Cut | None] = []
    for number in range(600):
        tag, count = f"{number:060000}", each if number % 279 == 278 else 1  # many at the end of a block
        fields = RecordFields(b"", key, None, None, tag)
        cuts += [single.add("clicks", places, fields, fields.size, None) for _ in range(count)]
        columns = check_many([b""] * count, [b"k"] * count if keyed else None, None, tag)
        same += many.add_many("clicks", places, columns, columns.sizes(0, len(columns.values)))
    blocks = [
        (cut.first, cut.builder.count, cut.builder.raw_bytes) for cut in (*cuts, *single.end()) if cut is not None
    ]
    assert blocks == [(cut.first, cut.builder.count, cut.builder.raw_bytes) for cut in (*same, *many.end()) if cut]
    assert len(blocks) > 2


def test_a_refused_record_changes_neither_size_nor_digest() -> None:
    async def test() -> None:
        sound, tried = writer(), writer()
        for each in (sound, tried):
            await each.add("clicks", b"0")
        with pytest.raises(MemqError):
            await tried.add_many("clicks", [b"1"], tag=NO_UNICODE)
        (one,), (other,) = [await each.finish() for each in (sound, tried)]
        assert (records_in([other]), other.digest) == (1, one.digest)

    asyncio.run(test())


def test_pieces_that_the_owner_does_not_count_are_not_published() -> None:
    """The client counted one more piece for each answer, so that this commit returned without an error."""
    counts = [3, 2]

    def script(connection: ToyConnection, frame: Frame) -> bool:
        if frame.api == Api.ADMIN:
            connection.answer(frame, AdminAnswer(published=counts.pop(0)))
        elif frame.api == Api.METADATA:
            answer = connection.broker.metadata(decode_message(frame.body, MetadataRequest))
            answer.stores = [StoreMetadata(name="main", url="memory:")]
            connection.answer(frame, answer)
        return frame.api in (Api.ADMIN, Api.METADATA)

    async def test(broker: ToyBroker) -> None:
        broker.script = script
        store = MemoryHandler(SystemClock())
        async with StagedCommits(broker.address, "nightly") as commits:
            topics = await commits.topics(["clicks"])
            objects: list[StagedObject] = []
            for number in range(3):
                one = StagedWriter(commits.cluster, topics, store, "nightly")
                await one.add("clicks", b"%d" % number)
                objects += await one.finish()
            await commits.commit(1, objects, store)
            with pytest.raises(ProtocolError, match="2 pieces of batch 2 are published, and it was asked for 3"):
                await commits.commit(2, objects, store)
        assert counts == []

    run(test)
