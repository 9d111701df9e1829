"""A read that starts or ends inside a large batch fetches only the needed blocks, by the index."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from memq.client.consumer.fetch.cursor_outcomes import Counts
from memq.client.consumer.fetch.fetch_scheduler import FetchScheduler
from memq.client.consumer.fetch.fetcher import GAP_BYTES_MIN, REQUESTS_MAX, BatchFetcher, joined_runs
from memq.client.consumer.fetch.partition_cursor import PART_BYTES_MIN, CursorState, PartitionCursor
from memq.client.consumer.record_filter import RecordFilter
from memq.errors import CorruptDataError
from memq.format.batch import BlockPiece, NumberedEntry
from memq.format.blocks.header import Buffer, parse_header, tag_bit
from memq.format.object import BatchEntry, BlockEntry, ObjectMeta, ObjectTopic, encode_index
from memq.format.pointer import decode_pointer
from memq.runtime.logs import EventLog
from memq.runtime.tasks import TaskOwner
from memq.storage_handlers.confirmed_reads import ConfirmedReads
from memq.topic import Position
from tests.skipping_loop import run_skipping, skip, skipping_runtime
from tests.unit.consumer_world import TOPIC, MomentaryWrongAnswers
from tests.unit.cursor_reads import BEGINNING
from tests.unit.queue_model import PARTITION, TOPIC_ID, WINDOW_MS, Block, Log

BLOCKS = 200
RECORDS = 400  # of each block
INDEX_BYTES_MAX = 20_000


def large_log(wanted: Sequence[int] = (), other: str | None = None) -> tuple[Log, bytes]:
    """Return a log whose first batch is large, with a copy of its second block behind it, and the batch's object.

    The `wanted` blocks have the tag `T`, the others another one.
    """
    tags = ["T" if number in wanted else other for number in range(BLOCKS)]
    blocks = [Block(1, RECORDS * number, RECORDS, tags=(tag,) * RECORDS) for number, tag in enumerate(tags)]
    log = Log()
    log.batch(*blocks)
    log.batch(blocks[1], Block(2, 0, 1))
    entries, at = [], 0
    for block in blocks:
        entries.append(BlockEntry.from_header(parse_header(block.data()), at))
        at += entries[-1].length
    meta = ObjectMeta(cluster="test", broker="b", topics=(ObjectTopic("clicks", TOPIC_ID),), created_ms=1)
    batch = BatchEntry(0, at, 1, 0, BLOCKS * RECORDS, 0, BLOCKS, 0, 1)
    assert at > PART_BYTES_MIN
    return log, log.bodies[0] + encode_index(meta, [batch], entries, at)


LOG, OBJECT = large_log()
WANTED = range(3, BLOCKS, 20)
TAGGED = {other: large_log(WANTED, other) for other in ("x", None)}


def read(
    start: Position,
    end: Position | None,
    body: bytes = OBJECT,
    *,
    log: Log = LOG,
    wanted: RecordFilter | None = None,
    counts: Counts | None = None,
) -> tuple[list[tuple[int, int]], int]:
    """Return producer and sequence of what is read, and how many bytes were fetched of the object."""
    fetched = 0

    async def work() -> list[tuple[int, int]]:
        runtime, queue = skipping_runtime(), MomentaryWrongAnswers(log)
        tasks = TaskOwner(lambda error: None, EventLog(runtime.clock))

        async def get(store: str, key: str, offset: int, length: int) -> Buffer:
            nonlocal fetched
            found = body if key == "o/0" else log.bodies[1]
            if offset + length > len(found):
                raise CorruptDataError(f"object '{key}' has {len(found)} bytes")
            fetched += length * (key == "o/0")
            return found[offset : offset + length]

        fetcher = BatchFetcher("broker", get, lambda store: None, ConfirmedReads())
        reading = FetchScheduler(runtime, queue, fetcher, tasks, 64 << 20, lambda: None)
        cursor = PartitionCursor(PARTITION, start, window_ms=WINDOW_MS, end=end, wanted=wanted)
        reading.start()
        reading.add(cursor, TOPIC)
        found: list[tuple[int, int]] = []
        while cursor.state is not CursorState.ENDED:
            await skip(0.1)
            while (one := reading.deliver()) is not None:
                assert one[1].failure is None
                found += sequences([part.piece for part in one[1].slices], [part[1:3] for part in one[1].slices])
        await tasks.stop()
        if counts is not None:
            counts.add(cursor.counts)
        return found

    return run_skipping(work()), fetched


def entries_in(batch: bytes) -> list[BlockEntry]:
    """Return the index entries of a batch."""
    entries, at = list[BlockEntry](), 0
    while at < len(batch):
        entries.append(BlockEntry.from_header(parse_header(batch, at), at))
        at += entries[-1].length
    return entries


def sequences(pieces: Sequence[BlockPiece], slices: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    return [
        (piece.header.producer_id, piece.header.first_sequence + number)
        for piece, (low, high) in zip(pieces, slices, strict=True)
        if piece.header is not None
        for number in range(low, high)
    ]


@pytest.mark.parametrize("index", [0, 1, RECORDS - 1, RECORDS, 77 * RECORDS + 5, BLOCKS * RECORDS - 1])
def test_one_record_costs_one_block_and_the_index(index: int) -> None:
    found, fetched = read(Position(0, 0, index), Position(0, 0, index + 1))
    assert found == [(1, index)]
    assert fetched <= len(OBJECT) // BLOCKS * 2 + INDEX_BYTES_MAX, f"{fetched} bytes of {len(OBJECT)}"


def test_records_across_blocks_come_once_and_in_order() -> None:
    low, high = 3 * RECORDS + 7, 5 * RECORDS + 2
    found, fetched = read(Position(0, 0, low), Position(0, 0, high))
    assert found == [(1, number) for number in range(low, high)]
    assert fetched < len(OBJECT) // 10


def test_records_before_the_start_count_as_seen_without_a_fetch() -> None:
    found, fetched = read(Position(0, 0, 150 * RECORDS), Position(0, 2))
    assert found == [*((1, number) for number in range(150 * RECORDS, BLOCKS * RECORDS)), (2, 0)], "no copy of block 1"
    assert fetched < len(OBJECT) // 2


@pytest.mark.parametrize("other", ["x", None], ids=["other tags", "no tags"])
def test_a_tag_in_5_of_100_blocks_of_a_large_batch_is_read_with_few_bytes(other: str | None) -> None:
    log, body = TAGGED[other]
    counts = Counts()
    found, fetched = read(BEGINNING, Position(0, 1), body, log=log, wanted=RecordFilter("T"), counts=counts)
    assert found == [(1, RECORDS * block + number) for block in WANTED for number in range(RECORDS)]
    assert fetched <= 0.15 * len(body), f"{fetched} bytes of {len(body)}"
    assert (counts.records, counts.filtered_records) == (len(found), RECORDS * BLOCKS - len(found))
    assert counts.gap_sequences == 0


def test_a_wanted_block_that_is_damaged_is_fetched_again_before_it_is_reported() -> None:
    log, body = TAGGED["x"]
    spoilt = bytearray(body)
    spoilt[entries_in(log.bodies[0])[43].offset + 100] ^= 1
    wanted = RecordFilter("T")

    async def work() -> tuple[int, list[int]]:
        reads = 0

        async def get(store: str, key: str, offset: int, length: int) -> Buffer:
            nonlocal reads
            reads += offset < len(log.bodies[0])
            return bytes(spoilt[offset : offset + length])

        fetcher = BatchFetcher("broker", get, lambda store: None, ConfirmedReads())
        pointer = decode_pointer(log.entries[0].body)
        part = await fetcher.fetch_records(pointer, 0, pointer.records, wanted.excludes)
        return reads, [piece.number for piece in part.pieces if piece.cause is not None]

    reads, damaged = run_skipping(work())
    assert damaged == [43]
    assert reads == 2 * len(WANTED)


@pytest.mark.parametrize("change", ["tag bits", "producer"])
def test_an_index_of_another_batch_hides_no_wanted_block(change: str) -> None:
    log, body = TAGGED["x"]
    size = len(log.bodies[0])
    changes = {"tag_bits": tag_bit("x")} if change == "tag bits" else {"producer_id": 2}
    entries = [entry._replace(**changes) for entry in entries_in(log.bodies[0])]
    meta = ObjectMeta(cluster="test", broker="b", topics=(ObjectTopic("clicks", TOPIC_ID),), created_ms=1)
    batch = BatchEntry(0, size, 1, 0, BLOCKS * RECORDS, 0, BLOCKS, 0, 1)
    other = body[:size] + encode_index(meta, [batch], entries, size)
    found, fetched = read(BEGINNING, Position(0, 1), other, log=log, wanted=RecordFilter("T"))
    assert found == [(1, RECORDS * block + number) for block in WANTED for number in range(RECORDS)]
    assert fetched >= size


@pytest.mark.parametrize(
    ("gaps", "runs"),
    [
        ([0, 0, 0], [4]),
        ([GAP_BYTES_MIN - 1, GAP_BYTES_MIN, 0], [2, 2]),
        ([GAP_BYTES_MIN + number for number in range(REQUESTS_MAX + 4)], [6, *[1] * (REQUESTS_MAX - 1)]),
    ],
    ids=["neighbours", "one gap", "many gaps"],
)
def test_blocks_are_read_together_where_a_request_more_saves_little(gaps: list[int], runs: list[int]) -> None:
    entry = BlockEntry.from_header(parse_header(OBJECT), 0)
    items, at = list[NumberedEntry](), 0
    for number, gap in enumerate([*gaps, 0]):
        items.append(NumberedEntry(number, 0, entry._replace(offset=at)))
        at += entry.length + gap
    found = joined_runs(items)
    assert [item for run in found for item in run] == items
    assert [len(run) for run in found] == runs
    assert joined_runs([]) == []


def test_without_an_index_all_is_fetched() -> None:
    spoilt = bytearray(OBJECT)
    spoilt[len(LOG.bodies[0]) + 40] ^= 1
    found, fetched = read(Position(0, 0, RECORDS), Position(0, 0, RECORDS + 1), bytes(spoilt))
    assert found == [(1, RECORDS)]
    assert fetched >= len(LOG.bodies[0])


def test_blocks_that_are_wanted_by_their_entries_keep_their_places() -> None:
    async def work() -> list[tuple[int, int, bool]]:
        async def get(store: str, key: str, offset: int, length: int) -> Buffer:
            return OBJECT[offset : offset + length]

        fetcher = BatchFetcher("broker", get, lambda store: None, ConfirmedReads())
        pointer = decode_pointer(LOG.entries[0].body)
        wanted = (RECORDS, 2 * RECORDS, 10 * RECORDS)
        pieces = await fetcher.fetch_blocks(pointer, lambda entry: entry.first_sequence in wanted)
        return [(piece.number, piece.first, piece.cause is None) for piece in pieces]

    assert run_skipping(work()) == [(1, RECORDS, True), (2, 2 * RECORDS, True), (10, 10 * RECORDS, True)]
