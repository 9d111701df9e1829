"""A filtered read delivers exactly the wanted records of an unfiltered one, whatever the log, the store and the reader.

Batches mix blocks of several producers, with and without tags and headers. Some are copies, skipped, damaged, or their
pointers do not name them. The bounds are small, so that batches are fetched in parts and wait for room.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from memq.client.consumer.fetch import fetch_scheduler, fetcher, partition_cursor
from memq.client.consumer.fetch.cursor_outcomes import Counts
from memq.client.consumer.fetch.fetch_scheduler import FetchScheduler
from memq.client.consumer.fetch.fetcher import BatchFetcher
from memq.client.consumer.fetch.partition_cursor import CursorState, PartitionCursor
from memq.client.consumer.record_filter import RecordFilter
from memq.errors import CorruptDataError
from memq.format.blocks.columns import BlockReader, RecordTuple
from memq.format.blocks.header import Buffer, parse_header
from memq.format.object import BatchEntry, BlockEntry, ObjectMeta, ObjectTopic, encode_index
from memq.format.pointer import decode_pointer
from memq.runtime.logs import EventLog
from memq.runtime.tasks import TaskOwner
from memq.storage_handlers.confirmed_reads import ConfirmedReads
from memq.topic import Position
from tests.skipping_loop import run_skipping, skip, skipping_runtime
from tests.soak import repetitions
from tests.unit.consumer_world import TOPIC, MomentaryWrongAnswers
from tests.unit.queue_model import PARTITION, TOPIC_ID, WINDOW_MS, Block, Log

Wants = Callable[[RecordTuple], bool]
TAGS = ("T", "other", "x", "y", None)  # the first two share a bit
HEADERS: tuple[tuple[tuple[str, bytes | None], ...], ...] = (
    (),
    (("n", b"1"),),
    (("n", b"5"), ("n", b"2")),  # the last one counts
    (("n", None),),
    (("n", b"x"), *((f"h{number}", b"v") for number in range(30))),
)


def number_of(record: RecordTuple) -> int | None:
    """Return the header n as a number; None if it is unknown."""
    found = [value for name, value in record[2] if name == "n"]
    return int(found[-1]) if found and found[-1] is not None and found[-1].isdigit() else None


FILTERS: tuple[tuple[RecordFilter, Wants], ...] = (
    (RecordFilter("T"), lambda record: record[4] == "T"),
    (RecordFilter("T || y"), lambda record: record[4] in ("T", "y")),
    (RecordFilter("none"), lambda record: False),
    (RecordFilter(where="n < 3"), lambda record: (number_of(record) or 9) < 3),
    (
        RecordFilter(where="n IS NULL"),
        lambda record: all(name != "n" for name, _ in record[2]) or record[2][-1][1] is None,
    ),
    (RecordFilter("T || x", "NOT n > 1"), lambda record: record[4] in ("T", "x") and number_of(record) == 1),
)


@dataclass
class Case:
    """A log with its objects, and a reader."""

    log: Log
    objects: list[bytes]
    start: Position
    end: Position
    room: int
    seed: int


def drawn_case(dice: random.Random) -> Case:
    """Draw a log and a reader."""
    log, objects, sent = Log(), list[bytes](), list[Block]()
    next_of = [0, 0, 0]
    for _ in range(dice.randint(2, 5)):
        blocks = list[Block]()
        for _ in range(dice.randint(1, 10)):
            if sent and dice.random() < 0.15:
                blocks.append(dice.choice(sent))
                continue
            producer, count = dice.randrange(3), dice.randint(1, 4)
            of_block = TAGS if dice.random() < 0.5 else (dice.choice(TAGS),)
            tags = tuple(dice.choice(of_block) for _ in range(count)) if dice.random() < 0.7 else ()
            headers = tuple(dice.choice(HEADERS) for _ in range(count)) if dice.random() < 0.7 else ()
            more = b"." * dice.choice([0, 0, 300, 1_500])
            blocks.append(Block(producer + 1, next_of[producer], count, more, tags=tags, headers=headers))
            next_of[producer] += count
            sent.append(blocks[-1])
        skip_one = dice.choice([(), (), (), (0,), (len(blocks) - 1,)])
        log.batch(*blocks, skip=skip_one, named=dice.random() < 0.7)
        objects.append(stored(blocks))
    for _ in range(dice.choice([0, 0, 0, 1, 2])):
        number = dice.randrange(len(objects))
        body = bytearray(objects[number])
        body[dice.randrange(len(body))] ^= 1
        objects[number] = bytes(body)
    start, end = Position(0, 0), Position(0, len(objects))
    if dice.random() < 0.5:
        counts = [decode_pointer(entry.body).records for entry in log.entries]
        start, end = sorted(
            Position(0, (at := dice.randrange(len(counts))), dice.randrange(counts[at])) for _ in range(2)
        )
    return Case(log, objects, start, end, dice.choice([1, 2_000, 1 << 20]), dice.randrange(100))


def stored(blocks: list[Block]) -> bytes:
    """Return the object of a batch."""
    body, entries = b"", list[BlockEntry]()
    for block in blocks:
        entries.append(BlockEntry.from_header(parse_header(block.data()), len(body)))
        body += block.data()
    meta = ObjectMeta(cluster="test", broker="b", topics=(ObjectTopic("clicks", TOPIC_ID),), created_ms=1)
    records = sum(block.count for block in blocks)
    return body + encode_index(
        meta, [BatchEntry(0, len(body), 1, 0, records, 0, len(blocks), 0, 1)], entries, len(body)
    )


Found = list[tuple[int, int, RecordTuple]]  # producer, sequence, record


def read(case: Case, wanted: RecordFilter | None, counts: Counts) -> Found | None:
    """Read a log; now and then the reader is paused, and drops what it has fetched. Return None after an error."""

    async def work() -> Found | None:
        runtime = skipping_runtime()
        tasks = TaskOwner(died, EventLog(runtime.clock))

        async def get(store: str, key: str, offset: int, length: int) -> Buffer:
            await skip(0.01)
            body = case.objects[int(key.removeprefix("o/"))]
            if offset + length > len(body):
                raise CorruptDataError(f"object '{key}' has {len(body)} bytes")
            return body[offset : offset + length]

        queue = MomentaryWrongAnswers(case.log)
        reading = FetchScheduler(
            runtime, queue, BatchFetcher("broker", get, lambda store: None, ConfirmedReads()), tasks, case.room, nothing
        )
        cursor = PartitionCursor(
            PARTITION, case.start, window_ms=WINDOW_MS, end=case.end, pass_damage=True, wanted=wanted
        )
        reading.start()
        reading.add(cursor, TOPIC)
        found: Found = []
        turns = 0
        while cursor.state is not CursorState.ENDED and reading.failure is None:
            turns += 1
            assert turns < 5_000, "the reader stalls"
            if turns % 7 == case.seed % 7 and turns < 30:
                reading.pause(PARTITION, paused=True)
                reading.pause(PARTITION, paused=False)
            await skip(0.005)
            while (one := reading.deliver()) is not None:
                assert one[1].failure is None
                for part in one[1].slices:
                    found += records_of(part.piece.data, part.low, part.high, part.mask)
        assert cursor.held_bytes == 0 or reading.failure is not None
        await tasks.stop()
        counts.add(cursor.counts)
        return found if reading.failure is None else None

    return run_skipping(work())


def died(error: BaseException) -> None:
    raise AssertionError("reading died") from error


def nothing() -> None:
    """Nobody waits for records."""


def records_of(data: Buffer, low: int, high: int, mask: bytes | None) -> Iterator[tuple[int, int, RecordTuple]]:
    header = parse_header(data)
    for number, record in enumerate(BlockReader(data, header).records()):
        if low <= number < high and (mask is None or mask[number]):
            yield header.producer_id, header.first_sequence + number, record


@pytest.mark.parametrize("seed", range(30 * repetitions(few=1, many=50)))
def test_a_filtered_read_has_the_wanted_records_of_an_unfiltered_one(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition_cursor, "PART_BYTES_MIN", 1_000)
    monkeypatch.setattr(fetcher, "GAP_BYTES_MIN", 200)
    monkeypatch.setattr(fetch_scheduler, "FILTERED_BYTES_MAX", 4_000)
    case, of_all = drawn_case(random.Random(seed)), Counts()
    everything = read(case, None, of_all)
    if everything is None:
        return  # the index of a batch before the start is damaged
    for wanted, wants in FILTERS:
        of_some = Counts()
        found = read(case, wanted, of_some)
        assert found == [each for each in everything if wants(each[2])]
        assert of_some.records == len(found)
        if not of_all.damaged_blocks and not of_all.duplicate_records:
            assert of_some.records + of_some.filtered_records == of_all.records
