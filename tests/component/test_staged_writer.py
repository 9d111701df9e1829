"""Staged commits end to end: staged records are invisible, and a committed batch exists once."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec
import pytest

from memq.broker.sweep.sweep import Sweep, Unnamed
from memq.client.bulk.staged_object import StagedObjectBuilder
from memq.client.bulk.staged_writer import StagedCommits, StagedWriter
from memq.client.consumer.consumer import AsyncConsumer
from memq.client.producer.fields import check_fields, check_many
from memq.errors import (
    CorruptDataError,
    IdentityConflictError,
    InvalidRequestError,
    NotFoundError,
    StoreError,
    TooLargeError,
)
from memq.format.blocks.columns import open_block
from memq.format.blocks.header import check_block
from memq.format.key import manifest_key, staged_prefix
from memq.format.object import open_object
from memq.format.pointer import Pointer, encode_pointer
from memq.format.staged_manifest import StagedObject, digest_of
from memq.limits import BATCH_ID_END, SLOTS
from memq.notification import Publication
from memq.topic import TopicSettings, read_partitions, writer_id
from tests.brokers import run
from tests.component.staged_rig import WRITER, Rig, asked, rigged
from tests.unit.toy_broker import toy_topic


def test_a_batch_is_seen_with_its_commit_and_once_however_often_it_is_committed() -> None:
    async def work(rig: Rig) -> None:
        values = [b"%03d" % number for number in range(100)]
        objects = await rig.staged(values[:50]) + await rig.staged(values[50:])
        assert await rig.records() == []
        first = await rig.commits.commit(7, objects, rig.store)
        assert await rig.records() == values
        pointers = len(await rig.pointers())
        assert await rig.commits.commit(7, [], rig.store) == first
        assert len(await rig.pointers()) == pointers
        data = [each for each in await rig.pointers() if each.kind == "data"]
        assert all(each.locations[0].key.startswith(staged_prefix("memq")) for each in data)
        assert all(each.named_ms for each in data), "an opening must know from when on to read, also of the first one"
        assert {(each.named[0].producer, each.named[0].batch_id) for each in data} == {(writer_id(WRITER), "7")}

    run(rigged(work))


def test_a_later_attempt_publishes_what_the_first_one_decided() -> None:
    async def work(rig: Rig) -> None:
        first, second = await rig.staged([b"one", b"two"]), await rig.staged([b"two", b"one"])
        async with StagedCommits(rig.broker.address, WRITER) as dead:  # it put its manifest, and no more
            await dead.topics(["clicks"])
            assert not await dead.is_decided(1, rig.store)
            await dead.decide(1, first, rig.store)
            assert [await dead.is_decided(batch_id, rig.store) for batch_id in (1, 2)] == [True, False]
        assert await rig.records() == []
        assert (await rig.commits.commit(1, second, rig.store)).objects == tuple(first)
        assert await rig.records() == [b"one", b"two"]

    run(rigged(work))


def test_the_manifest_of_another_batch_decides_nothing() -> None:
    """A store that shows one object under the key of another one: both have sound checksums."""

    async def work(rig: Rig) -> None:
        await rig.commits.commit(7, await rig.staged([b"seven"]), rig.store)
        objects = await rig.staged([b"eight"])
        async with StagedCommits(rig.broker.address, WRITER) as dead:  # it put its manifest, and no more
            await dead.topics(["clicks"])
            await dead.decide(8, objects, rig.store)
        get, seven = rig.store.get, manifest_key("memq", WRITER, 7)

        async def confused(key: str, *, checked: bool = True) -> bytes:
            return await get(seven if "/commits/" in key else key, checked=checked)

        rig.store.get = confused  # type: ignore[method-assign]
        with pytest.raises(CorruptDataError, match="lies batch 7 of writer 'nightly'"):
            await rig.commits.commit(8, [], rig.store)
        with pytest.raises(CorruptDataError, match="lies batch 7 of writer 'nightly'"):
            await rig.commits.finish_last(rig.store)
        rig.store.get = get  # type: ignore[method-assign]
        await rig.commits.commit(8, [], rig.store)
        assert await rig.records() == [b"eight", b"seven"]

    run(rigged(work))


@pytest.mark.parametrize("others", [[b"one"], [b"one", b"2nd"], [b"one", b"two", b"two"]])
def test_a_job_that_repeats_a_batch_with_other_rows_is_refused(others: list[bytes]) -> None:
    """It was taken as written, and the rows of now were gone without a word."""

    async def work(rig: Rig) -> None:
        await rig.commits.commit(1, await rig.staged([b"one", b"two"]), rig.store)
        with pytest.raises(InvalidRequestError, match=r"batch 1 .* was committed before with other rows"):
            await rig.commits.commit(1, await rig.staged(others), rig.store)
        await rig.commits.commit(2, await rig.staged(others), rig.store)
        assert await rig.records() == sorted([b"one", b"two", *others])

    run(rigged(work))


def test_a_stream_that_computes_a_batch_again_with_other_rows_continues(caplog: pytest.LogCaptureFixture) -> None:
    async def work(rig: Rig) -> None:
        await rig.commits.commit(1, await rig.staged([b"one"]), rig.store, source="s")
        with caplog.at_level(logging.WARNING, "memq"):
            await rig.commits.commit(1, await rig.staged([b"two"]), rig.store, source="s")
        assert await rig.records() == [b"one"]

    run(rigged(work))
    assert "staged.other-rows" in [getattr(record, "event", "") for record in caplog.records]


def test_two_streams_under_one_name_are_distinguished() -> None:
    async def work(rig: Rig) -> None:
        await rig.commits.commit(1, await rig.staged([b"ours"]), rig.store, source="one")
        await rig.commits.commit(1, await rig.staged([b"again"]), rig.store, source="one")
        with pytest.raises(InvalidRequestError, match=f"batch 1 of writer '{WRITER}' is of stream 'one', not of 'two'"):
            await rig.commits.commit(1, await rig.staged([b"theirs"]), rig.store, source="two")
        assert await rig.records() == [b"ours"]

    run(rigged(work))


def test_a_commit_that_ended_half_way_is_brought_to_its_end_by_the_next_one() -> None:
    async def work(rig: Rig) -> None:
        objects = [staged for number in range(5) for staged in await rig.staged([b"%d" % number])]
        manifest, checksum = await rig.commits.decide(1, objects, rig.store)
        ((_, pieces),) = manifest.by_partition().items()
        ask = await asked(rig, manifest, checksum, 3)
        assert ask == 3
        assert await rig.records() == [b"0", b"1", b"2"]
        await _other_owner(rig)
        await rig.commits.commit(1, [], rig.store)
        assert await rig.records() == [b"%d" % number for number in range(5)]
        assert len(pieces) == 5

    run(rigged(work, partitions=1))


def test_a_batch_that_ended_half_way_is_brought_to_its_end_without_knowing_it() -> None:
    async def work(rig: Rig) -> None:
        assert await rig.commits.finish_last(rig.store) is None
        await rig.commits.commit(1, await rig.staged([b"before"]), rig.store)
        objects = [staged for number in range(5) for staged in await rig.staged([b"%d" % number])]
        manifest, checksum = await rig.commits.decide(2, objects, rig.store, "stream")
        await asked(rig, manifest, checksum, 3)
        for _ in range(2):
            assert await rig.commits.finish_last(rig.store) == manifest
            assert await rig.records() == [*(b"%d" % number for number in range(5)), b"before"]

    run(rigged(work, partitions=1))


def test_a_batch_whose_objects_are_gone_is_not_brought_to_its_end() -> None:
    async def work(rig: Rig) -> None:
        (staged,) = await rig.staged([b"gone"])
        await rig.commits.decide(1, [staged], rig.store)
        await rig.store.delete(staged.key)
        assert await rig.commits.finish_last(rig.store) is None
        assert await rig.records() == []

    run(rigged(work, partitions=1))


def test_a_batch_that_an_earlier_attempt_has_published_is_not_brought_to_its_end() -> None:
    async def work(rig: Rig) -> None:
        await rig.commits.commit(1, await rig.staged([b"first"]), rig.store)
        await rig.store.delete(manifest_key("memq", WRITER, 1))  # too old: swept
        await rig.commits.decide(1, await rig.staged([b"second"]), rig.store)
        assert await rig.commits.finish_last(rig.store) is None
        assert await rig.records() == [b"first"]

    run(rigged(work, partitions=1))


def test_a_refused_repeat_of_a_batch_publishes_nothing_in_partitions_that_the_first_attempt_did_not_use() -> None:
    async def work(rig: Rig) -> None:
        await rig.commits.commit(1, await rig.staged([b"first"]), rig.store)
        await rig.store.delete(manifest_key("memq", WRITER, 1))  # too old: swept
        with pytest.raises(IdentityConflictError, match="by a manifest that is gone"):
            await rig.commits.commit(1, await rig.staged([b"second", b"third"]), rig.store)
        assert await rig.records() == [b"first"]

    run(rigged(work))


def test_records_that_were_staged_for_a_deleted_topic_are_not_in_the_next_one_of_its_name() -> None:
    async def work(rig: Rig) -> None:
        objects = await rig.staged([b"one", b"two"])
        await rig.broker.partitions.delete(rig.topic)
        await rig.broker.partitions.create("clicks", 1, TopicSettings(), exist_ok=False)
        async with StagedCommits(rig.broker.address, WRITER) as later:
            await later.topics(["clicks"])
            with pytest.raises(NotFoundError, match="was deleted while records were staged for it"):
                await later.commit(1, objects, rig.store)
        assert await rig.records() == []

    run(rigged(work))


def test_a_batch_below_the_last_one_is_there() -> None:
    async def work(rig: Rig) -> None:
        await rig.commits.commit(5, await rig.staged([b"five"]), rig.store)
        await rig.commits.commit(4, await rig.staged([b"four"]), rig.store)
        await rig.commits.commit(6, await rig.staged([b"six"]), rig.store)
        assert await rig.records() == [b"five", b"six"]

    run(rigged(work, partitions=1))


def test_a_batch_below_the_last_one_that_was_begun_after_it_is_refused() -> None:
    """That is a stream which begins again under a name that was used: it would be passed over in silence."""

    async def work(rig: Rig) -> None:
        await rig.commits.commit(5, await rig.staged([b"five"]), rig.store)
        manifest, checksum = await rig.commits.decide(4, await rig.staged([b"four"]), rig.store)
        later = msgspec.structs.replace(manifest, created_ms=manifest.created_ms + 60_000)
        with pytest.raises(InvalidRequestError, match=f"batch 4 of writer '{WRITER}' was begun after its batch 5"):
            await asked(rig, later, checksum, 1)

    run(rigged(work, partitions=1))


def test_a_writer_is_remembered_by_the_next_owner() -> None:
    async def work(rig: Rig) -> None:
        objects = await rig.staged([b"a"])
        await rig.commits.commit(1, objects, rig.store, source="s")
        await _other_owner(rig)
        await rig.store.delete(manifest_key("memq", WRITER, 1))  # too old: swept
        await rig.commits.commit(1, await rig.staged([b"another attempt, days later"]), rig.store, source="s")
        assert await rig.records() == [b"a"]

    run(rigged(work, partitions=1))


def test_staged_records_lie_next_to_sent_ones() -> None:
    async def work(rig: Rig) -> None:
        from memq.client.producer.producer import AsyncProducer

        async with AsyncProducer(rig.broker.address) as producer:
            for number in range(10):
                await (await producer.send("clicks", b"sent %d" % number))
                await rig.commits.commit(number, await rig.staged([b"staged %d" % number]), rig.store)
        assert len(await rig.records()) == 20
        batches = [each.batch_sequence for each in await rig.pointers() if each.kind == "data"]
        assert batches == list(range(20)), "dense within the epoch"

    run(rigged(work, partitions=1))


def test_a_batch_of_many_pieces_goes_in_several_requests() -> None:
    async def work(rig: Rig) -> None:
        objects = [staged for number in range(150) for staged in await rig.staged([b"%03d" % number])]
        await rig.commits.commit(0, objects, rig.store)
        assert await rig.records() == [b"%03d" % number for number in range(150)]

    run(rigged(work, partitions=1))


def test_a_writer_that_is_not_remembered_leaves_its_repetition_to_the_window() -> None:
    async def work(rig: Rig) -> None:
        objects = await rig.staged([b"a", b"b"]) + await rig.staged([b"c"])
        await rig.commits.commit(0, objects, rig.store, remember=False)
        await rig.commits.commit(0, [], rig.store, remember=False)
        assert await rig.records() == [b"a", b"b", b"c"]
        assert not any(each.named for each in await rig.pointers())

    run(rigged(work))


def test_many_records_at_once_are_the_same_as_one_by_one() -> None:
    async def work(rig: Rig) -> None:
        writer = StagedWriter(rig.commits.cluster, {"clicks": rig.topic}, rig.store, WRITER, block_bytes=2_000)
        values = [b"%04d" % number * 10 for number in range(1_000)]
        keys = [None if number % 3 == 0 else b"key %d" % (number % 11) for number in range(1_000)]
        await writer.add_many("clicks", values[:500], keys[:500], timestamps_ms=list(range(500)))
        await writer.add_many("clicks", values[500:], tag="web")
        await rig.commits.commit(0, await writer.finish(), rig.store)
        async with AsyncConsumer(rig.broker.address, ["clicks"], start="beginning", end="end") as consumer:
            found = {record.value: record async for batch in consumer for record in batch}
        assert sorted(found, key=lambda value: value or b"") == values
        assert all(found[value].key == key for value, key in zip(values[:500], keys[:500], strict=True))
        assert found[values[7]].timestamp_ms == 7
        assert {found[value].tag for value in values[500:]} == {"web"}

    run(rigged(work))


def test_staged_objects_that_differ_from_the_manifest_are_refused() -> None:
    async def work(rig: Rig) -> None:
        (staged,) = await rig.staged([b"a"])
        (piece,) = staged.pieces
        elsewhere = msgspec.structs.replace(staged, pieces=(msgspec.structs.replace(piece, length=piece.length - 1),))
        with pytest.raises(CorruptDataError, match="has no batch of partition 0"):
            await rig.commits.commit(0, [elsewhere], rig.store)
        longer = msgspec.structs.replace(staged, bytes=staged.bytes + 1)
        with pytest.raises((CorruptDataError, StoreError)):
            await rig.commits.commit(1, [longer], rig.store)
        foreign = msgspec.structs.replace(staged, key="memq/topics/clicks/00/x")
        with pytest.raises(InvalidRequestError, match="not staged by writer 'nightly'"):
            await rig.commits.commit(2, [foreign], rig.store)
        await rig.store.delete(staged.key)
        with pytest.raises(NotFoundError):
            await rig.commits.commit(3, [staged], rig.store)
        for batch_id in (-1, BATCH_ID_END):
            with pytest.raises(InvalidRequestError, match=f"batch id {batch_id}"):
                await rig.commits.commit(batch_id, [staged], rig.store)
        assert await rig.records() == []

    run(rigged(work, partitions=1))


def test_the_sweep_takes_what_was_staged_and_never_committed_at_its_own_age() -> None:
    async def work(rig: Rig) -> None:
        committed, never = await rig.staged([b"a"]), await rig.staged([b"b"])
        await rig.commits.commit(0, committed, rig.store)
        services = rig.broker.services
        parts = ("memq", rig.store, services.queue, services.coordinator, services.runtime.clock)
        assert [each async for each in Sweep(*parts, print, 0).find(0, 60_000)] == []
        swept = list[Unnamed]()
        for goes in (False, True):
            swept = [each async for each in Sweep(*parts, print, 0).run(3_600_000, -60_000)]
            assert [each.goes for each in swept] == [goes, goes]
        gone = [each.key for each in swept]
        assert gone == sorted([never[0].key, manifest_key("memq", WRITER, 0)])
        assert await rig.records() == [b"a"]

    run(rigged(work, partitions=1))


def test_records_of_a_task_go_to_partitions_by_key_and_objects_by_size() -> None:
    async def work(rig: Rig) -> None:
        writer = StagedWriter(
            rig.commits.cluster, {"clicks": rig.topic}, rig.store, WRITER, block_bytes=1_000, object_bytes=3_000
        )
        for number in range(400):
            await writer.add("clicks", b"%03d" % number * 30, key=b"key %d" % (number % 7), tag="web")
        objects = await writer.finish()
        assert len(objects) > 1
        await rig.commits.commit(0, objects, rig.store)
        assert len(await rig.records()) == 400
        with pytest.raises(TooLargeError):
            await writer.add("clicks", b"x" * (2 << 20))
        with pytest.raises(NotFoundError):
            await writer.add("others", b"x")

    run(rigged(work))


def test_columns_of_a_task_are_put_as_soon_as_they_fill_an_object_and_not_before() -> None:
    async def work(rig: Rig) -> None:
        async def put() -> int:
            return len([entry async for entry in rig.store.list()])

        writer = StagedWriter(rig.commits.cluster, {"clicks": rig.topic}, rig.store, WRITER, object_bytes=3_000)
        before = await put()
        for number in range(5):
            await writer.add_many("clicks", [bytes(100)] * 10)
            assert await put() - before == (number + 1) // 3
        assert len(await writer.finish()) == await put() - before == 2

    run(rigged(work))


# ---- one object, without a store -----------------------------------------------------------------


class Packed:
    """An object of a builder with blocks of up to 200 bytes, for a topic of three partitions."""

    def __init__(self, codec: str = "none") -> None:
        self.topic = toy_topic(partitions=3, settings=TopicSettings(record_bytes_max=1_024))
        self.builder = StagedObjectBuilder({"clicks": self.topic}, 7, block_bytes=200, codec=codec)

    def add(self, value: bytes, key: bytes | None = None, partition: int | None = None) -> None:
        self.builder.add("clicks", check_fields(value, key, None, None, None), partition, 60_000)

    def add_many(self, sizes: Sequence[int], keys: Sequence[bytes | None] | None = None) -> None:
        self.builder.add_many("clicks", check_many([bytes(size) for size in sizes], keys, None, None), 60_000)

    def blocks(self) -> tuple[StagedObject, list[tuple[int, list[int]]]]:
        """Return what the manifest says, and per block its partition and the sizes of its values."""
        buffers, _, staged = self.builder.build("memq", "w", "staged/key", 61_000)
        body = b"".join(buffers)
        index = open_object(body)
        assert (len(body), staged.producer) == (staged.bytes, f"{7:016x}")
        found = []
        for batch, piece in zip(index.batches, staged.pieces, strict=True):
            assert (batch.offset, batch.length, batch.partition) == (piece.offset, piece.length, piece.partition)
            assert batch.epoch == 0, "no owner has written it"
            end, sequence, raw = piece.offset, 0, 0
            for entry in index.blocks[batch.first_block : batch.first_block + batch.blocks]:
                data = body[entry.offset : entry.offset + entry.length]
                header = check_block(data)
                assert (entry.offset, header.first_sequence, header.producer_id) == (end, sequence, 7)
                end, sequence, raw = end + entry.length, header.next_sequence, raw + header.raw_length
                found.append((piece.partition, [len(value or b"") for value in open_block(data).values()]))
            assert (end, sequence, raw) == (piece.offset + piece.length, piece.records, piece.raw_bytes)
        assert index.blocks[-1].offset + index.blocks[-1].length == staged.index_offset
        return staged, found


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([100, 100, 100, 100], [(0, [100, 100]), (0, [100]), (1, [100])]),
        ([100, 99, 1, 1], [(0, [100, 99, 1]), (0, [1])]),
        ([200, 100, 99, 1], [(0, [200]), (0, [100]), (1, [99, 1])]),
        ([300, 300, 300, 300], [(0, [300]), (0, [300]), (1, [300]), (1, [300])]),
        ([1], [(0, [1])]),
    ],
)
def test_many_records_without_keys_are_cut_at_the_size_of_a_block_and_take_turns(
    sizes: list[int], expected: list[tuple[int, list[int]]]
) -> None:
    packed = Packed()
    packed.add_many(sizes)
    assert packed.blocks()[1] == expected


def test_blocks_of_single_records_are_cut_at_their_size_and_only_free_ones_take_turns() -> None:
    packed = Packed()
    for size in (199, 1, 100, 101, 50):
        packed.add(bytes(size))
    packed.add(bytes(300), partition=2)
    packed.add(bytes(300), key=b"k1")  # of the second partition
    packed.add(bytes(1))
    packed.add_many([50, 300], [None, b"k1"])
    assert packed.blocks()[1] == [
        (0, [199, 1]),
        (0, [100]),
        (1, [101, 50]),
        (1, [300]),
        (1, [1]),
        (1, [300]),
        (2, [300]),
        (2, [50]),
    ]


def test_a_block_with_a_record_of_a_chosen_partition_may_hold_any_key() -> None:
    packed = Packed()
    own = packed.topic.partitions[1]
    for key, partition in ((b"k1", None), (b"a", 1), (b"kX", None)):
        packed.add(bytes(300), key, partition)
    buffers, _, _ = packed.builder.build("memq", "w", "k", 61_000)
    ranges = [(header.slot_first, header.slot_last) for header in map(check_block, buffers[:-1])]
    assert ranges == [(own.slot_first, own.slot_last), (0, SLOTS - 1), (own.slot_first, own.slot_last)]


def test_size_of_a_staged_object_is_known_while_it_grows() -> None:
    packed = Packed("zstd")
    packed.add(bytes(100))
    assert packed.builder.bytes == 100
    packed.add_many([50])
    assert packed.builder.bytes == 150
    packed.add(bytes(500), partition=1)
    staged, _ = packed.blocks()
    assert packed.builder.bytes == staged.index_offset, "sealed blocks count as they are packed"
    assert staged.index_offset < 500, "and it was packed"


def test_records_in_any_order_and_in_any_calls_have_one_digest() -> None:
    one, other, less = Packed(), Packed(), Packed()
    one.add_many([3, 4, 5], [b"a", None, b"b"])
    for size, key in ((5, b"b"), (3, b"a"), (4, None)):
        other.add(bytes(size), key)
    less.add_many([3, 4, 5])
    digests = [each.blocks()[0].digest for each in (one, other, less)]
    assert digests[0] == digests[1] != digests[2]
    assert digests[2] == f"{digest_of([bytes(3), bytes(4), bytes(5)]):016x}"


def test_a_record_that_is_too_large_is_refused_among_small_ones() -> None:
    packed = Packed()
    with pytest.raises(TooLargeError):
        packed.add_many([1, 1_025, 1])
    packed.add_many([1_024])


def test_the_least_times_of_blocks_are_said_by_the_minute() -> None:
    packed = Packed()
    for timestamp_ms in (120_500, 120_400, 179_999, 180_500, 180_400, 121_000):
        fields = check_fields(bytes(300), None, None, timestamp_ms, None)
        packed.builder.add("clicks", fields, 1, 0)
    staged, _ = packed.blocks()
    assert staged.pieces[0].times == ((120_400, 3), (180_400, 5), (121_000, 6))


async def _other_owner(rig: Rig) -> None:
    """Let somebody open a higher epoch, as a new owner does."""
    (read,) = read_partitions(rig.topic)
    own = rig.broker.partitions.processors[rig.topic.id, 0].own
    assert own is not None
    named, epoch = own.named.entries(), own.epoch + 1
    opened = {"kind": "opened", "cluster": "memq", "topic": "clicks", "topic_id": rig.topic.id, "partition": 0}
    pointer = Pointer(**opened, epoch=epoch, named=named)  # type: ignore[arg-type]
    now_ms = rig.broker.services.runtime.clock.wall_ms()
    await rig.broker.services.queue.publish(Publication(read, 0, epoch, now_ms, encode_pointer(pointer)))
