"""A read of objects by listing alone: order, orphans, copies, shared objects."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from pyspark.sql.datasource import EqualTo, Filter, GreaterThan, LessThan

from memq.errors import ClosedError, CorruptDataError, DeniedError, InvalidSettingError, NotFoundError
from memq.format.blocks.header import parse_header, tag_bit
from memq.format.key import large_object_key, object_key, shared_object_key
from memq.format.object import BatchEntry, BlockEntry, ObjectMeta, ObjectTopic, encode_index
from memq.runtime.runtime import Runtime
from memq.spark.options import read_options
from memq.spark.read.pruning import ReadFilter
from memq.spark.read.raw import READS_MAX, RING_SLOTS_MAX, RawBatch, find_orphans, once, plan_raw, split_path
from memq.spark.stores import StoreUrls, TaskStores
from memq.topic import Topic, equal_slots
from tests.unit.audited import TOPIC, data_pointer
from tests.unit.blocks import NOW_MS, Record
from tests.unit.spark_rows import Row, rows_of, spoiled, time_of, values_of
from tests.unit.stored_topic import StoredTopic, block

VIEWS = Topic(name="views", id="0b" * 16, created_ms=NOW_MS, partitions=equal_slots(1))
HIDDEN = Topic(name="_memq_audit", id="0c" * 16, created_ms=NOW_MS, partitions=equal_slots(1))


class Listing:
    """A folder of objects, each with batches of single blocks of one record."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sequence = 0

    def put(self, key: str, *batches: tuple[Topic, int, int, int, bytes], ms: int = NOW_MS) -> str:
        """Store batches: topic, partition, epoch, number of the batch, value."""
        topics = list(dict.fromkeys(topic for topic, *_ in batches))
        body, entries, blocks = b"", list[BatchEntry](), list[BlockEntry]()
        for number, (topic, partition, epoch, sequence, value) in enumerate(batches):
            data = block([value], first=self.sequence, partition=partition, topic=topic)
            self.sequence += 1
            at, home = len(body), topics.index(topic)
            entries.append(BatchEntry(at, len(data), ms, sequence, 1, number, 1, partition, epoch, home))
            blocks.append(BlockEntry.from_header(parse_header(data), at))
            body += data
        named = tuple(ObjectTopic(topic.name, topic.id) for topic in topics)
        index = encode_index(
            ObjectMeta(cluster="c", broker="b", topics=named, created_ms=ms), entries, blocks, len(body)
        )
        self.write(key, body + index)
        return key

    def write(self, key: str, body: bytes) -> None:
        path = self.folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)

    def batch(self, value: bytes, *, partition: int = 0, epoch: int = 1, number: int = 0, **more: Any) -> str:
        """Store a batch of `clicks` in an object of its own."""
        topic = more.pop("topic", TOPIC)
        key = object_key("c", topic.name, topic.id, partition, epoch, number, NOW_MS)
        return self.put(key, (topic, partition, epoch, number, value), **more)

    def values(self, path: str = "", filters: Sequence[Filter] = (), **options: str) -> list[bytes | None]:
        return values_of({"path": str(self.folder / path), **options}, filters)

    def rows(self, **options: str) -> list[Row]:
        return rows_of({"path": str(self.folder), **options})


@pytest.fixture
def listing(tmp_path: Path) -> Listing:
    return Listing(tmp_path)


def test_batches_come_by_partition_as_their_owners_stored_them(listing: Listing) -> None:
    for partition, epoch, number in [(1, 1, 0), (0, 2, 0), (0, 1, 1), (0, 1, 0), (1, 2, 0), (0, 10, 0)]:
        listing.batch(b"%d.%d.%d" % (partition, epoch, number), partition=partition, epoch=epoch, number=number)
    found = listing.rows(columns="value,partition,offset,orphan,topic")
    assert [row["value"] for row in found] == [b"0.1.0", b"0.1.1", b"0.2.0", b"0.10.0", b"1.1.0", b"1.2.0"]
    assert [row["partition"] for row in found] == [0, 0, 0, 0, 1, 1]
    offsets = [row["offset"] for row in found]
    assert offsets[:4] == sorted(offsets[:4])
    assert (offsets[0], offsets[1]) == (offsets[4], offsets[5]), "each partition counts its batches from 0"
    assert {row["topic"] for row in found} == {"clicks"}
    assert not any(row["orphan"] for row in found)


def test_many_objects_and_files_of_others_are_listed(listing: Listing) -> None:
    count = 2 * READS_MAX + 1
    for number in range(count):
        listing.batch(b"%d" % number, number=number)
        listing.write(f"c/topics/clicks/notes-{number}.txt", b"of another program")
    assert listing.values() == [b"%d" % number for number in range(count)]


def test_batches_behind_a_hole_are_orphans(listing: Listing) -> None:
    for number in (0, 1, 3, 4):
        listing.batch(b"%d" % number, number=number)
    listing.batch(b"later", epoch=2, number=7)
    found = {row["value"]: row["orphan"] for row in listing.rows(columns="value,orphan")}
    assert found == {b"0": False, b"1": False, b"3": True, b"4": True, b"later": False}


def raw_batch(number: int, key: str = "k", **fields: Any) -> RawBatch:
    return RawBatch(key, replace(data_pointer([(1, number, number + 1)]), batch_sequence=number, **fields))


@pytest.mark.parametrize(
    ("numbers", "orphans"),
    [
        ([0, 1, 2], []),
        ([5, 6], []),
        ([0, 2], [2]),
        ([0, 2, 3, 5], [2, 3, 5]),
        ([0, 1, *range(3, RING_SLOTS_MAX + 3)], [*range(3, RING_SLOTS_MAX + 3)]),
        ([0, 1, *range(3, RING_SLOTS_MAX + 4)], []),
    ],
)
def test_a_hole_counts_within_the_length_of_a_ring(numbers: list[int], orphans: list[int]) -> None:
    found = find_orphans([*(raw_batch(number) for number in numbers), RawBatch("damaged")])
    assert sorted(order[3] for order in found) == orphans
    apart = [raw_batch(number, epoch=1 + number) for number in numbers[:4]]
    assert not find_orphans(apart), "each epoch counts for itself"


def test_a_batch_that_was_copied_into_a_large_object_is_read_once(listing: Listing) -> None:
    data = (TOPIC, 0, 1, 0, b"a")
    listing.put(object_key("c", TOPIC.name, TOPIC.id, 0, 1, 0, NOW_MS), data)
    listing.sequence = 0
    listing.put(large_object_key("c", TOPIC.name, TOPIC.id, 7, NOW_MS), data)
    assert listing.values(dedup="raw") == [b"a"]


@pytest.mark.parametrize("swapped", [False, True])
def test_copies_are_left_out_where_one_of_them_is_in_a_large_object(swapped: bool) -> None:
    large = large_object_key("c", TOPIC.name, TOPIC.id, 7, NOW_MS)
    small, hotter = (object_key("c", TOPIC.name, TOPIC.id, 0, 1, number, NOW_MS) for number in (0, 1))
    pair = [raw_batch(0, large), raw_batch(0, small)]
    first, second = reversed(pair) if swapped else pair
    assert once([first, second]) == [first]
    again = [raw_batch(0, small), raw_batch(0, hotter)]
    assert once(again) == again, "stored again, since its pointer was late"
    others = [raw_batch(0, large), raw_batch(1, small), RawBatch("x"), RawBatch("y"), raw_batch(1, large)]
    assert once(others) == others


def test_topics_of_memq_are_read_by_their_folder_alone(listing: Listing) -> None:
    listing.batch(b"click")
    listing.batch(b"report", topic=HIDDEN)
    assert listing.values() == [b"click"]
    assert listing.values("c/topics/_memq_audit") == [b"report"]


def test_the_folder_of_a_topic_is_read_with_its_batches_in_shared_objects(listing: Listing) -> None:
    listing.batch(b"own")
    shared = shared_object_key("c", "b", 1, 0, NOW_MS)
    listing.put(shared, (VIEWS, 0, 1, 0, b"view"), (TOPIC, 1, 1, 0, b"shared"))
    listing.put(shared_object_key("c", "b", 1, 1, NOW_MS), (VIEWS, 0, 1, 1, b"other view"))
    assert listing.values("c/topics/clicks") == [b"own", b"shared"]
    assert listing.values("c/topics/views") == [b"view", b"other view"]
    assert sorted(listing.values("c/shared"), key=repr) == [b"other view", b"shared", b"view"]
    assert len(listing.values()) == 4


def test_an_object_that_can_not_be_read_is_damage_of_every_topic(listing: Listing) -> None:
    listing.batch(b"own")
    listing.write(shared_object_key("c", "b", 1, 0, NOW_MS), b"nothing that memq wrote, and long enough for a trailer")
    for path in ("", "c/topics/clicks"):
        with pytest.raises(CorruptDataError, match="object 'c/shared/"):
            listing.values(path)
        assert listing.values(path, onDamaged="skip") == [b"own"]
        lost = rows_of({"path": str(listing.folder / path)}, columns="damage,topic,partition,offset", onDamaged="skip")
        assert [row["damage"] is None for row in lost] == [False, True]
        assert (lost[0]["topic"], lost[0]["partition"], lost[0]["offset"]) == ("", 0, 0), "it has no position"


@pytest.mark.parametrize(
    ("start", "end", "found"),
    [
        (NOW_MS, NOW_MS + 3, "abc"),
        (NOW_MS + 1, NOW_MS + 3, "bc"),
        (NOW_MS, NOW_MS + 2, "ab"),
        (NOW_MS + 1, NOW_MS + 2, "b"),
        (None, NOW_MS + 1, "a"),
        (NOW_MS + 2, None, "c"),
    ],
)
def test_times_are_those_of_the_seal(listing: Listing, start: int | None, end: int | None, found: str) -> None:
    for number, value in enumerate((b"a", b"b", b"c")):
        listing.batch(value, number=number, ms=NOW_MS + number)
    options = {name: str(time) for name, time in (("start", start), ("end", end)) if time is not None}
    assert listing.values("", (), **options) == [value.encode() for value in found]


@pytest.mark.parametrize("point", [{"start": "end"}, {"end": "beginning"}])
def test_positions_that_only_a_queue_knows_are_refused(listing: Listing, point: dict[str, str]) -> None:
    listing.batch(b"a")
    with pytest.raises(InvalidSettingError, match="needs a queue, and 'path' reads objects alone"):
        listing.values("", (), **point)


def test_filters_prune_a_listing_too(listing: Listing) -> None:
    listing.batch(b"a")
    listing.batch(b"b", partition=1)
    listing.batch(b"v", topic=VIEWS)
    columns = {"columns": "value,topic,partition"}
    assert listing.values("", [EqualTo(("partition",), 1)], **columns) == [b"b"]
    assert listing.values("", [EqualTo(("topic",), "views")], **columns) == [b"v"]


def test_blocks_of_a_listed_batch_are_pruned_by_their_index(tmp_path: Path) -> None:
    topic = StoredTopic(tmp_path)
    early: list[Record] = [(b"early", None, (), NOW_MS, "web")]
    late: list[Record] = [(b"late", None, (), NOW_MS + 10_000, "app")]
    for turn in (0, 1):
        topic.write(block(early, producer=1, first=turn), block(late, producer=2, first=turn), batch_sequence=turn)
    options = {"path": str(topic.objects), "columns": "value,tag,timestamp"}
    for tag, value in (("web", b"early"), ("app", b"late")):
        assert values_of(options, [EqualTo(("tag",), tag)]) == [value] * 2
    middle = time_of(NOW_MS + 5_000)
    assert values_of(options, [GreaterThan(("timestamp",), middle)]) == [b"late"] * 2
    assert values_of(options, [LessThan(("timestamp",), middle)]) == [b"early"] * 2
    assert len(values_of(options)) == 4


def test_a_batch_without_the_bit_of_a_tag_is_not_fetched(tmp_path: Path) -> None:
    topic = StoredTopic(tmp_path)
    rows: list[Record] = [(b"v", None, (), None, "web")]
    topic.write(block(rows), harm=lambda body: spoiled(body, 75))
    options = {"path": str(topic.objects), "columns": "value,tag"}
    with pytest.raises(CorruptDataError):
        values_of(options)
    for bit in (0, 1, 63):
        other = next(tag for tag in map(str, range(10_000)) if tag_bit(tag) == 1 << bit)
        assert values_of(options, [EqualTo(("tag",), other)]) == []


def test_resent_blocks_are_read_once(listing: Listing) -> None:
    for number in (0, 1):
        listing.sequence = 0
        listing.batch(b"a", number=number)
    assert listing.values() == [b"a"]
    assert listing.values(dedup="raw") == [b"a", b"a"]


def test_objects_are_checked_by_their_bytes(listing: Listing) -> None:
    key = listing.batch(b"xyz")
    listing.write(key, (listing.folder / key).read_bytes().replace(b"xyz", b"xyy"))
    with pytest.raises(CorruptDataError, match=f"block 0 of object '{key}'"):
        listing.values()


@pytest.mark.parametrize(
    ("path", "root", "prefix"),
    [
        ("/srv/objects", "file:///srv/objects", ""),
        ("/srv/objects/c-1/topics/clicks/", "file:///srv/objects", "c-1/topics/clicks/"),
        ("file:/srv/objects/c-1/topics/clicks", "file:///srv/objects", "c-1/topics/clicks/"),
        ("s3://bucket/c-1/topics/clicks", "s3://bucket/", "c-1/topics/clicks/"),
        ("s3://bucket/prefix/c-1/shared?endpoint=http://h:1", "s3://bucket/prefix?endpoint=http://h:1", "c-1/shared/"),
    ],
)
def test_a_path_is_a_store_and_a_prefix(path: str, root: str, prefix: str) -> None:
    assert split_path(path) == (root, prefix)


@pytest.mark.parametrize("scheme", ["", "file:"])
def test_a_path_counts_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert split_path(f"{scheme}objects/c-1/topics/clicks") == (f"file://{tmp_path}/objects", "c-1/topics/clicks/")
    assert split_path(f"{scheme}../objects") == (f"file://{tmp_path.parent}/objects", "")


def test_stores_of_a_task_end_with_it(tmp_path: Path) -> None:
    async def work() -> None:
        async with TaskStores(StoreUrls({"main": tmp_path.as_uri()}), Runtime()) as stores:
            store = stores.open("main")
            assert stores.open("main") is store
        with pytest.raises(ClosedError):
            await store.get("key")

    asyncio.run(work())


def test_a_path_without_objects_is_named(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not memq's")
    for name, error in (("", NotFoundError), ("c-1/topics/clicks", NotFoundError)):
        with pytest.raises(error, match=f"no objects of memq exist below '{tmp_path}"):
            asyncio.run(plan_raw(read_options({"path": str(tmp_path / name)}), ReadFilter(), Runtime()))
    with pytest.raises(DeniedError, match=r"folder '.*/nowhere' is not on this machine"):
        asyncio.run(plan_raw(read_options({"path": str(tmp_path / "nowhere")}), ReadFilter(), Runtime()))
