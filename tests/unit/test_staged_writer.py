"""Records of a staged writer: each is in its objects, for any size and any failing call."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from memq.client.bulk.block_cutter import BLOCK_RECORDS_MAX, Cut, RecordCutter
from memq.client.bulk.staged_writer import StagedCommits, StagedWriter
from memq.client.producer.fields import RecordFields, check_many
from memq.client.producer.partitioner import PartitionMap
from memq.errors import InvalidRequestError, MemqError, ProtocolError, StoreError, TooLargeError, UnreachableError
from memq.format.staged_manifest import StagedObject
from memq.limits import BLOCK_RAW_BYTES_MAX, NAME_BYTES_MAX
from memq.protocol.admin_messages import AdminAnswer, AdminRequest, PublishStaged
from memq.protocol.frames import Api, Frame
from memq.protocol.messages import MetadataRequest, StoreMetadata, decode_message
from memq.runtime.clock import SystemClock
from memq.storage_handlers import Buffer
from memq.storage_handlers.memory import MemoryHandler
from tests.stepped_time import step, stepped_runtime
from tests.unit.toy_broker import ToyBroker, ToyConnection, run, silent_at, toy_topic, turns, until

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
    cutter, partition_map = RecordCutter(), PartitionMap(TOPIC)

    def add(tag: str | None = None) -> int:
        cut = cutter.add("clicks", partition_map, RecordFields(b"0", b"k", None, None, tag), 2, None)
        return cut.builder.count if cut is not None else 0

    for _ in range(BLOCK_RECORDS_MAX):
        assert add() == 0
    with pytest.raises((InvalidRequestError, TooLargeError)):
        add(tag)
    assert add() == BLOCK_RECORDS_MAX
    assert [cut.builder.count for cut in cutter.end()] == [1]


def test_a_block_that_is_full_of_tags_ends_before_the_next_one() -> None:
    """The size of a block leaves tags out: from 16 MiB of tags on each further record was refused as too large."""
    cutter, partition_map, count = RecordCutter(), PartitionMap(TOPIC), 600
    cuts = [
        cutter.add("clicks", partition_map, RecordFields(b"0", None, None, None, f"{number:060000}"), 1, None)
        for number in range(count)
    ]
    blocks = [cut.builder.count for cut in (*cuts, *cutter.end()) if cut is not None]
    room = BLOCK_RAW_BYTES_MAX // 60_010
    assert blocks == [room, room, count - 2 * room]


@pytest.mark.parametrize("keyed", [True, False])
@pytest.mark.parametrize("each", [1, 7, 5_000, 9_000])  # thousands have room only in part
def test_a_block_that_is_full_of_tags_ends_at_the_same_record_of_many(each: int, *, keyed: bool) -> None:
    """`add_many` with hundreds of tags raised TooLargeError, and each further call, too."""
    single, many, partition_map = RecordCutter(), RecordCutter(), PartitionMap(TOPIC)
    key = b"k" if keyed else None
    cuts: list[Cut | None] = []
    same: list[Cut | None] = []
    for number in range(600):
        tag, count = f"{number:060000}", each if number % 279 == 278 else 1  # many at the end of a block
        fields = RecordFields(b"", key, None, None, tag)
        cuts += [single.add("clicks", partition_map, fields, fields.size, None) for _ in range(count)]
        columns = check_many([b""] * count, [b"k"] * count if keyed else None, None, tag)
        same += many.add_many("clicks", partition_map, columns, columns.sizes(0, len(columns.values)))
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


@pytest.mark.parametrize("many", [True, False])
def test_an_object_that_has_its_size_is_put_at_once(*, many: bool) -> None:
    async def test() -> None:
        store = MemoryHandler(SystemClock())
        staging = StagedWriter("test", {"clicks": TOPIC}, store, "nightly", object_bytes=100)
        if many:
            await staging.add_many("clicks", [bytes(50), bytes(50)])
        else:
            await staging.add("clicks", bytes(100))
        put = [entry.key async for entry in store.list()]
        assert [staged.key for staged in await staging.finish()] == put
        assert len(put) == 1

    asyncio.run(test())


class FailsOnce(MemoryHandler):
    """A store whose first put fails."""

    failures = 1

    async def put(self, key: str, buffers: Sequence[Buffer], checksum: int) -> None:
        if self.failures:
            self.failures -= 1
            raise StoreError("no answer")
        await super().put(key, buffers, checksum)


def test_an_object_that_the_store_refused_is_put_by_the_next_call_and_is_there_once() -> None:
    async def test() -> None:
        store = FailsOnce(SystemClock())
        staging = StagedWriter("test", {"clicks": TOPIC}, store, "nightly", object_bytes=1)
        with pytest.raises(StoreError, match="no answer"):
            await staging.add("clicks", b"0")
        objects = await staging.finish()
        assert [staged.key for staged in objects] == [entry.key async for entry in store.list()]
        assert records_in(objects) == 1

    asyncio.run(test())


def with_store(connection: ToyConnection, frame: Frame) -> bool:
    """Answer as a broker whose cluster has one store."""
    if frame.api == Api.METADATA:
        answer = connection.broker.metadata(decode_message(frame.body, MetadataRequest))
        answer.stores = [StoreMetadata(name="main", url="memory:")]
        connection.answer(frame, answer)
    return frame.api == Api.METADATA


def test_a_driver_waits_for_a_broker_that_starts_and_then_knows_the_cluster() -> None:
    cut: list[ToyConnection] = []

    def script(connection: ToyConnection, frame: Frame) -> bool:
        if not cut:
            cut.append(connection)
            connection.transport.abort()
            return True
        return with_store(connection, frame)

    async def test(broker: ToyBroker) -> None:
        broker.script = script
        commits = StagedCommits(broker.address, "nightly", runtime=stepped_runtime())
        connecting = asyncio.create_task(commits.connect())
        await until(lambda: bool(cut))
        await turns()
        step(1.0)
        await connecting
        assert (commits.cluster, commits.store.name) == ("toy", "main")
        await commits.close()
        await until(lambda: not broker.connections)

    run(test)


@pytest.mark.parametrize("asks", ["connect", "topics"])
def test_a_driver_without_a_broker_ends_at_its_connect_timeout(asks: str) -> None:
    async def test(broker: ToyBroker) -> None:
        broker.script = silent_at(Api.HELLO)
        commits = StagedCommits(broker.address, "nightly", connect_timeout_ms=3_000, runtime=stepped_runtime())
        asking: asyncio.Task[object]
        asking = asyncio.create_task(commits.connect() if asks == "connect" else commits.topics(["clicks"]))
        await until(lambda: bool(broker.connections))
        await turns()
        assert not asking.done()
        step(3.0)
        with pytest.raises(UnreachableError, match="no broker answers"):
            await asking
        await commits.close()

    run(test)


def test_a_driver_has_missing_topics_created() -> None:
    async def test(broker: ToyBroker) -> None:
        async with StagedCommits(broker.address, "nightly") as commits:
            assert await commits.topics(["clicks"]) == {"clicks": TOPIC}
        assert broker.creates == ["clicks"]

    run(test)


def test_pieces_that_the_owner_does_not_count_are_not_published() -> None:
    """The client counted one more piece for each answer, so that this commit returned without an error."""
    counts = [3, 2]

    def script(connection: ToyConnection, frame: Frame) -> bool:
        if frame.api == Api.ADMIN:
            ask = decode_message(frame.body, AdminRequest).ask
            only_check = isinstance(ask, PublishStaged) and ask.only_check
            connection.answer(frame, AdminAnswer(published=0 if only_check else counts.pop(0)))
        return frame.api == Api.ADMIN or with_store(connection, frame)

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
