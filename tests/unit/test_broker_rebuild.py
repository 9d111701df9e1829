"""Pointers from objects alone: content of index and headers, new batches, and the present log."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from awscrt.checksums import crc32c

from memq.broker.restore.rebuild import (
    BatchLocation,
    FoundBatch,
    PresentLog,
    Rebuilder,
    at_least,
    find_batch,
    find_shared_batch,
    follow_on,
    locations_in,
    staged_locations,
)
from memq.broker.restore.restore import held_in
from memq.errors import CorruptDataError, NotFoundError, UnsupportedFormatError
from memq.format.blocks.header import parse_header
from memq.format.object import (
    BatchEntry,
    BlockEntry,
    ObjectTopic,
    batch_checksum,
    open_object,
    parse_trailer,
)
from memq.format.pointer import Location, NamedProducer, Pointer, ProducerRanges, encode_pointer
from memq.format.staged_manifest import Manifest, StagedObject, StagedPiece
from memq.limits import TRAILER_BYTES
from memq.notification import Entries, Entry, Publication
from memq.notification.memory import MemoryQueue
from memq.runtime.clock import SystemClock
from memq.topic import Topic, Totals, read_partitions, writer_id
from tests.unit.sealed_batches import ONE, OTHER, SHARED, TOPIC, TWO, batch, block, flipped, joined

KEY = "c-1/one"


INDEX_OFFSET = parse_trailer(SHARED[-TRAILER_BYTES:], len(SHARED)).index_offset
LOCATIONS = locations_in(KEY, open_object(SHARED), INDEX_OFFSET)


def whole(data: bytes = SHARED, sequence: int = 6, partition: int = 0) -> FoundBatch:
    return find_batch(BatchLocation(KEY, partition, 4, sequence), data, TOPIC)


# ---- what an object holds ------------------------------------------------------------------------


def test_the_batches_of_a_shared_object_are_found_by_topic() -> None:
    index = open_object(SHARED)
    offset = sum(map(len, (*ONE, *TWO))) + len(block(0, [b"e"], topic=OTHER))
    entries = list(index.batches)
    assert locations_in(KEY, index, offset) == {
        ObjectTopic(TOPIC.name, TOPIC.id): [
            BatchLocation(KEY, 0, 4, 6, entries[0], offset, "b-1"),
            BatchLocation(KEY, 1, 4, 8, entries[1], offset, "b-1"),
        ],
        ObjectTopic(OTHER.name, OTHER.id): [BatchLocation(KEY, 0, 4, 6, entries[2], offset, "b-1")],
    }


def test_a_batch_is_the_same_from_its_object_and_from_its_own_bytes() -> None:
    found = whole()
    raw = sum(parse_header(each).raw_length for each in ONE)
    assert raw > sum(map(len, ONE)), "compressed"
    assert (found.key, found.broker, found.raw_bytes, found.damaged) == (KEY, "b-1", raw, 0)
    assert found.named == (NamedProducer(producer=2, epoch=3, last_sequence=8),)
    assert [each.first_sequence for each in found.blocks] == [0, 7]
    for location in LOCATIONS[ObjectTopic(TOPIC.name, TOPIC.id)]:
        assert location.entry is not None
        own = SHARED[location.entry.offset : location.entry.offset + location.entry.length]
        alone, expected = (
            find_shared_batch(location, own, TOPIC),
            whole(SHARED, location.batch_sequence, location.partition),
        )
        moved = tuple(each._replace(offset=each.offset + location.entry.offset) for each in alone.blocks)
        assert replace(alone, blocks=moved) == expected


@pytest.mark.parametrize("damaged", [(0,), (1,), (0, 1)])
def test_a_damaged_block_is_counted_and_says_nothing_of_names(damaged: tuple[int, ...]) -> None:
    data = SHARED
    for number in damaged:
        data = flipped(data, sum(map(len, ONE[:number])) + len(ONE[number]) - 1)
    found = whole(data)
    raw = sum(len(each) if number in damaged else parse_header(each).raw_length for number, each in enumerate(ONE))
    assert (found.damaged, found.raw_bytes, len(found.blocks)) == (len(damaged), raw, 2)
    assert bool(found.named) == (1 not in damaged)


@pytest.mark.parametrize("location", [(1, 4, 6), (0, 5, 6), (0, 4, 7)])
def test_an_object_that_holds_other_batches_than_its_key_says_is_damaged(location: tuple[int, int, int]) -> None:
    with pytest.raises(CorruptDataError, match="holds other batches"):
        find_batch(BatchLocation(KEY, *location), SHARED, TOPIC)


def test_bytes_that_do_not_fit_the_index_are_no_batch() -> None:
    location = LOCATIONS[ObjectTopic(TOPIC.name, TOPIC.id)][0]
    for data in (ONE[0], b"".join(ONE)[:-1], b"".join([*ONE, *TWO]), b""):
        with pytest.raises(CorruptDataError, match="do not fit its index"):
            find_shared_batch(location, data, TOPIC)


def test_a_damaged_header_says_nothing_of_sequences_where_the_index_does() -> None:
    """Its first sequence is wrong, and its length is not: the next block is found, and the pointer would lie."""
    location = LOCATIONS[ObjectTopic(TOPIC.name, TOPIC.id)][0]
    first_sequence = 40
    assert parse_header(flipped(ONE[0], first_sequence)).first_sequence != 0
    data = flipped(SHARED, first_sequence)
    with pytest.raises(CorruptDataError, match="do not fit its index"):
        find_shared_batch(location, data[: sum(map(len, ONE))], TOPIC)
    for at in (
        location,
        *follow_on([BatchLocation(KEY, 0, 8, 0)], [location]),
    ):  # as staged: with an epoch that no index has
        found = find_batch(at, data, TOPIC)
        assert [(each.producer_id, each.first_sequence) for each in found.blocks] == [(1, 0), (2, 7)]
        assert (found.damaged, found.entry) == (1, at.entry)


# ---- what was staged -----------------------------------------------------------------------------


def piece(topic: Topic, partition: int, offset: int, length: int, records: int) -> StagedPiece:
    return StagedPiece(
        topic=topic.name,
        topic_id=topic.id,
        partition=partition,
        offset=offset,
        length=length,
        records=records,
        raw_bytes=5,
    )


def test_staged_pieces_have_the_number_that_their_manifest_gives_them_and_follow_all_epochs() -> None:
    size = sum(map(len, ONE))
    manifest = Manifest(
        cluster="c-1",
        writer="nightly",
        batch_id=12,
        store="main",
        created_ms=900,
        objects=(
            StagedObject(key="s/1", bytes=9, index_offset=70, pieces=(piece(TOPIC, 0, 0, size, 3),)),
            StagedObject(
                key="s/2",
                bytes=9,
                index_offset=80,
                pieces=(piece(TOPIC, 0, 3, 40, 6), piece(TOPIC, 1, 43, 30, 1), piece(OTHER, 0, 73, 5, 2)),
            ),
        ),
    )
    locations = staged_locations(manifest, 77)

    def staged(key: str, index: int, entry: BatchEntry, number: int, pieces: int) -> BatchLocation:
        writer = NamedProducer(
            producer=writer_id("nightly"), epoch=0, last_sequence=number, batch_id="12", manifest=77, pieces=pieces
        )
        return BatchLocation(key, entry.partition, 0, 0, entry, index, "nightly", writer)

    assert locations == {
        ObjectTopic(TOPIC.name, TOPIC.id): [
            staged("s/1", 70, BatchEntry(0, size, 900, 0, 3, 0, 0, 0, 0), 1, 2),
            staged("s/2", 80, BatchEntry(3, 40, 900, 0, 6, 0, 0, 0, 0), 2, 2),
            staged("s/2", 80, BatchEntry(43, 30, 900, 0, 1, 0, 0, 1, 0), 1, 1),
        ],
        ObjectTopic(OTHER.name, OTHER.id): [staged("s/2", 80, BatchEntry(73, 5, 900, 0, 2, 0, 0, 0, 0), 1, 1)],
    }

    pieces = locations[ObjectTopic(TOPIC.name, TOPIC.id)][:2]
    for others, epoch in (([], 1), ([BatchLocation("k", 0, 9, 0), BatchLocation("k", 0, 4, 8)], 10)):
        followed = follow_on(others, pieces)
        assert [(each.key, each.epoch, each.batch_sequence) for each in followed] == [
            ("s/1", epoch, 0),
            ("s/2", epoch, 1),
        ]
        entries = [each.entry for each in followed]
        assert [(each.epoch, each.batch_sequence, each.records) for each in entries if each] == [
            (epoch, 0, 3),
            (epoch, 1, 6),
        ]
        assert [each.writer for each in followed] == [each.writer for each in pieces]

    followed = follow_on([], pieces)
    found = find_shared_batch(followed[0], b"".join(ONE), TOPIC)  # no manifest says how many blocks there are
    assert (found.entry.blocks, found.damaged) == (2, 0)
    assert found.named == (pieces[0].writer,), "not the names of its blocks"
    with pytest.raises(CorruptDataError):
        find_shared_batch(followed[0], b"".join(ONE)[:-1], TOPIC)


def test_a_batch_is_as_old_as_is_known_of_it() -> None:
    found = whole()
    assert at_least(found, 2_005) == found
    assert at_least(found, 2_007) == replace(found, entry=found.entry._replace(appended_ms=2_007))


# ---- pointers ------------------------------------------------------------------------------------


def test_a_pointer_says_what_its_object_does() -> None:
    rebuilder = Rebuilder(TOPIC, "c-1", "main")
    found = whole()
    blocks = [BlockEntry.from_header(parse_header(each), 0) for each in ONE]
    size = sum(map(len, ONE))
    pointer = rebuilder.pointer(found)
    assert pointer == Pointer(
        kind="data",
        cluster="c-1",
        topic="clicks",
        topic_id=TOPIC.id,
        partition=0,
        epoch=4,
        batch_sequence=6,
        locations=(Location(store="main", key=KEY, offset=0, length=size, index=found.index_offset),),
        records=3,
        raw_bytes=found.raw_bytes,
        stored_bytes=size,
        least_ms=1_000,
        greatest_ms=1_007,
        producers=(ProducerRanges(1, ((0, 2),)), ProducerRanges(2, ((7, 8),))),
        slots=(2, 60_000),
        tag_bits=blocks[0].tag_bits,
        checksum=batch_checksum(found.blocks),
        broker="b-1",
        sealed_ms=2_006,
        named=found.named,
        named_ms=2_006,
    )
    assert pointer.checksum == crc32c(b"".join(ONE))
    assert pointer.tag_bits > 0
    last = whole(joined((batch(6), TWO), (batch(9), ONE)), 9)
    (location,) = Rebuilder(TOPIC, "c-1", "main").pointer(last).locations  # type: ignore[union-attr]
    assert (location.offset, location.index) == (len(TWO[0]), 0), "the index follows on the batch"


def test_blocks_named_before_are_left_out_by_partition_and_producer() -> None:
    rebuilder = Rebuilder(TOPIC, "c-1", "main")
    known, new, again = block(0, [b"a", b"b"]), block(2, [b"c"]), block(0, [b"a", b"b"], 2)
    one = rebuilder.pointer(whole(joined((batch(6), [known]))))
    assert one is not None
    assert (one.named_ms, one.skip, one.totals) == (0, (), Totals())
    assert rebuilder.pointer(whole(joined((batch(6), [known])))) is None
    elsewhere = rebuilder.pointer(whole(joined((batch(6, partition=1), [block(0, [b"a"], partition=1)])), partition=1))
    assert elsewhere is not None
    assert (elsewhere.skip, elsewhere.totals, elsewhere.slots[0]) == ((), Totals(), 0)
    named = block(9, [b"n"], 3, producer_epoch=1)
    two = rebuilder.pointer(whole(joined((batch(6), [new, known, again, named]))))
    assert two is not None
    assert (two.skip, two.totals) == ((1,), Totals(2, len(known)))
    assert two.named_ms == 2_006
    three = rebuilder.pointer(whole(joined((batch(8), [block(3, [b"d"])])), 8))
    assert three is not None
    assert three.totals == Totals(2 + 6, len(known) + two.stored_bytes)
    assert three.named_ms == 2_006, "since when names are known"


def test_other_records_under_sequences_that_were_named_are_no_copy() -> None:
    """What a fenced owner stored has no pointer, and the next instance of the producer used its sequences again."""
    rebuilder = Rebuilder(TOPIC, "c-1", "main")
    orphan, acked = block(0, [b"never acked"]), block(0, [b"acked"])
    assert rebuilder.pointer(whole(joined((batch(6), [orphan])))) is not None
    both = whole(joined((batch(8), [orphan, acked])), 8)
    pointer = rebuilder.pointer(both)
    assert pointer is not None
    assert pointer.skip == (0,)
    assert rebuilder.pointer(both) is None


def test_blocks_are_compared_for_twice_the_dedup_window() -> None:
    rebuilder = Rebuilder(TOPIC, "c-1", "main")
    window_ms = TOPIC.settings.dedup_window_ms
    found = whole(joined((batch(6), [block(0, [b"a"])])))
    later = [replace(found, entry=found.entry._replace(appended_ms=2_006 + age)) for age in (0, 2 * window_ms)]
    other = whole(joined((batch(6), [block(9, [b"b"])])))
    assert rebuilder.pointer(later[0]) is not None
    for age_ms, copies in ((2 * window_ms, 1), (2 * window_ms + 1, 0)):
        rebuilder.pointer(replace(other, entry=other.entry._replace(appended_ms=2_006 + age_ms)))
        other = whole(joined((batch(6), [block(19, [b"b"])])))
        assert (rebuilder.pointer(later[1]) is None) == bool(copies)


# ---- the log that is there -----------------------------------------------------------------------

READ = read_partitions(TOPIC)[0]


def said(kind: str, epoch: int, partition: int = 0, sequence: int = 0) -> Pointer:
    return Pointer(
        kind=kind,
        cluster="c-1",
        topic="clicks",
        topic_id=TOPIC.id,
        partition=partition,
        epoch=epoch,
        batch_sequence=sequence,
        locations=(Location(store="main", key=KEY, offset=0, length=9),) if kind == "data" else (),
        records=int(kind == "data"),
        stored_bytes=9,
    )


def test_a_log_should_have_what_lies_before_its_first_opening() -> None:
    held = PresentLog()
    for body in (b"damaged", encode_pointer(said("closed", 3))):
        held.note(Entry(0, 0, body))
    assert (held.in_use, held.batches) == (False, set())
    held.note(Entry(1, 0, encode_pointer(said("data", 4, sequence=6))))
    assert not held.in_use
    for epoch in (5, 7):
        held.note(Entry(2, 0, encode_pointer(said("opened", epoch))))
    assert (held.in_use, held.opened, held.batches) == (True, {0: 5}, {(0, 4, 6)})
    there, lacking = BatchLocation(KEY, 0, 4, 6), BatchLocation(KEY, 0, 4, 7)
    assert [held.has(there), held.has(lacking)] == [True, False]
    assert [held.has_pointer(said("data", 4, sequence=number)) for number in (6, 7)] == [True, False]
    staged = replace(there, writer=NamedProducer(producer=1, epoch=0))
    locations = [there, lacking, BatchLocation(KEY, 0, 5, 0), BatchLocation(KEY, 1, 8, 0), staged]
    assert held.should_have(locations) == [there, lacking, locations[3]]
    trimmed = PresentLog(trimmed=True)
    assert (trimmed.in_use, trimmed.should_have(locations)) == (True, [])


@pytest.mark.parametrize("kind", ["data", "opened"])
def test_a_log_with_pointers_of_a_newer_version_is_not_filled(kind: str) -> None:
    """What it says is not known: its batch would get a second pointer, or owners would use the log."""
    with pytest.raises(UnsupportedFormatError):
        PresentLog().note(Entry(0, 0, b'{"version":99,"kind":"%s"}' % kind.encode()))


class PagedQueue(MemoryQueue):
    """Returns one entry at a time, and counts."""

    reads = 0

    async def read(self, partition: Any, offset: int, bytes_max: int) -> Entries:
        """See `PointerReader.read`."""
        self.reads += 1
        return await super().read(partition, offset, 1)


@pytest.mark.parametrize(
    ("cut", "trimmed", "reads"),
    [(0, False, 4), (1, True, 0), (5, False, 0)],
    ids=["read until all were opened", "trimmed by retention", "empty"],
)
def test_a_log_is_read_until_each_of_its_partitions_was_opened(cut: int, trimmed: bool, reads: int) -> None:
    async def work() -> None:
        queue = PagedQueue(SystemClock())
        with pytest.raises(NotFoundError):
            await held_in(queue, READ, [0, 1])
        await queue.create([READ], 30_000)
        kinds = [("data", 0), ("opened", 0), ("data", 0), ("opened", 1), ("data", 1)]
        for number, (kind, partition) in enumerate(kinds):
            body = encode_pointer(said(kind, 4, partition, number))
            await queue.publish(Publication(READ, partition, 4, SystemClock().wall_ms(), body))
        await queue.trim(READ, cut)
        held = await held_in(queue, READ, [0, 1])
        assert (held.trimmed, queue.reads) == (trimmed, reads)
        if reads:
            assert (held.opened, held.batches) == ({0: 4, 1: 4}, {(0, 4, 0), (0, 4, 2)})
            assert (await held_in(queue, READ, [])).batches == set(), "nobody writes it"
            assert queue.reads == reads

    asyncio.run(work())
