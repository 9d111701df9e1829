"""Logs, queues and fetchers of a consumer in memory, on virtual time, with slow and wrong answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from msgspec import Struct

from memq.client.consumer.assigned import Assigned
from memq.client.consumer.fetch.fetch_scheduler import FetchScheduler
from memq.client.consumer.fetch.fetcher import BatchFetcher
from memq.client.consumer.fetch.partition_cursor import PartitionCursor
from memq.errors import (
    MemqError,
    NotFoundError,
    StoreError,
)
from memq.format.batch import BlockPiece
from memq.format.blocks.header import Buffer, parse_header
from memq.format.object import BlockEntry
from memq.format.pointer import Pointer
from memq.notification import Entries, Span
from memq.notification.remote import Answer, Polled, RemoteQueue
from memq.protocol.frames import Api
from memq.runtime.logs import EventLog
from memq.runtime.tasks import TaskOwner
from memq.storage_handlers.confirmed_reads import ConfirmedReads
from memq.topic import Position, ReadPartition, Topic, TopicSettings, equal_slots
from tests.skipping_loop import run_skipping, skip, skipping_runtime
from tests.unit.queue_model import PARTITION, TOPIC_ID, WINDOW_MS, Block, Log

TOPIC = Topic(name="clicks", id=TOPIC_ID, created_ms=1, settings=TopicSettings(), partitions=equal_slots(1))
PLENTY = 1 << 30


async def no_read(store: str, key: str, offset: int, length: int) -> Buffer:
    raise AssertionError("batches come from the script")


class World(RemoteQueue, BatchFetcher):
    """A queue and a store in one, over logs made by hand: one for each read partition, producer N + 1 in the N-th.

    `errors` are raised by the next fetches, `poll_errors` by the next polls; a fetch takes `fetch_s`. The logs of
    `sick` fail until they are removed there, and so does each fetch of `sick_producers`.
    """

    def __init__(self, *logs: Log) -> None:
        RemoteQueue.__init__(self, NoBroker())
        BatchFetcher.__init__(self, "broker", no_read, lambda store: None, ConfirmedReads())
        self.logs = list(logs)
        self.errors: list[MemqError] = []
        self.poll_errors: list[MemqError] = []
        self.fetch_s = 0.0
        self.fetching = self.fetching_most = self.fetched_count = 0
        self.looking = self.looking_most = 0
        self.span_s = 0.0
        self.polls: list[dict[ReadPartition, int]] = []
        self.keys: list[str] = []
        self.gone: set[str] = set()  # keys of objects that are not there
        self.sick: dict[int, MemqError] = {}
        self.sick_producers: set[int] = set()
        self.sick_fetches = 0
        self.hanging_producers: set[int] = set()
        self.healed = asyncio.Event()
        self.skips: set[int] = set()  # partitions whose next answer to a poll leaves out the first entry
        self.news = asyncio.Event()

    def _entries(self, partition: ReadPartition, offset: int) -> Entries:
        log = self.logs[partition.partition]
        found = [entry for entry in log.entries if entry.offset >= offset]
        return Entries(found, found[-1].offset + 1 if found else max(offset, log.next_offset))

    async def read(self, partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
        return self._entries(partition, offset)

    async def span(self, partition: ReadPartition) -> Span:
        self.looking += 1
        self.looking_most = max(self.looking, self.looking_most)
        await skip(self.span_s)
        self.looking -= 1
        return self.logs[partition.partition].span()

    async def seek_time(self, partition: ReadPartition, time_ms: int) -> int:
        entries = self.logs[partition.partition].entries
        return next((entry.offset for entry in entries if entry.time_ms >= time_ms), 0)

    async def poll(
        self,
        offsets: dict[ReadPartition, int],
        wait_ms: int = 0,
        bytes_max: int = 0,
        blocks_bytes_max: int = 0,
        tag_bits: int = 0,
    ) -> list[Polled]:
        self.polls.append(dict(offsets))
        if self.poll_errors:
            raise self.poll_errors.pop(0)
        self.news.clear()
        if not any(self._entries(*each) for each in offsets.items()):
            try:
                async with asyncio.timeout(wait_ms / 1000):
                    await self.news.wait()
            except TimeoutError:
                pass
        return [self._polled(each, offset) for each, offset in offsets.items()]

    def _polled(self, partition: ReadPartition, offset: int) -> Polled:
        number = partition.partition
        if number in self.sick:
            return Polled(partition, Span(0, 0), Entries((), offset), self.sick[number])
        entries = self._entries(partition, offset)
        if number in self.skips:
            self.skips.remove(number)
            entries = Entries(entries[1:], entries.next)
        return Polled(partition, self.logs[number].span(), entries)

    async def fetch(self, pointer: Pointer, sent: Buffer | None = None) -> Sequence[BlockPiece]:
        self.fetching += 1
        self.fetching_most = max(self.fetching, self.fetching_most)
        try:
            await skip(self.fetch_s)
            if self.errors:
                raise self.errors.pop(0)
            key = pointer.locations[0].key
            self.keys.append(key)
            if key in self.gone:
                raise NotFoundError(f"object '{key}' does not exist")
            producer = pointer.producers[0].producer if pointer.producers else 1
            if producer in self.hanging_producers:
                await self.healed.wait()
            if producer in self.sick_producers:
                self.sick_fetches += 1
                raise StoreError("the store of this topic is away")
            log = self.logs[producer - 1]
            self.fetched_count += 1
            return log.pieces(int(key.rpartition("/")[2]), pointer)
        finally:
            self.fetching -= 1

    async def fetch_blocks(self, pointer: Pointer, wanted: Callable[[BlockEntry], bool]) -> Sequence[BlockPiece]:
        entries = await self.index_of(pointer)
        pieces = await self.fetch(pointer)
        return [piece for piece, entry in zip(pieces, entries, strict=True) if wanted(entry)]

    async def index_of(self, pointer: Pointer) -> list[BlockEntry]:
        body, at = self.logs[0].bodies[int(pointer.locations[0].key.rpartition("/")[2])], 0
        found: list[BlockEntry] = []
        while at < len(body):
            found.append(BlockEntry.from_header(parse_header(body, at), at))
            at += found[-1].length
        return found


def log_of(batches: int, producer: int = 1, **options: Any) -> Log:
    log = Log()
    for number in range(batches):
        log.batch(Block(producer, 3 * number), **options)
    return log


def partition_of(number: int) -> ReadPartition:
    return ReadPartition("clicks", TOPIC_ID, number)


class Reader:
    """A `FetchScheduler` with its world, and what was delivered: partition and value."""

    def __init__(self, world: World, budget: int = PLENTY) -> None:
        self.runtime = skipping_runtime()
        self.tasks = TaskOwner(self._broke, EventLog(self.runtime.clock))
        self.changes = 0
        self.reading = FetchScheduler(self.runtime, world, world, self.tasks, budget, self._changed)
        self.reading.start()
        self.got: list[tuple[int, bytes]] = []
        self.failures: list[MemqError] = []

    def _broke(self, error: BaseException) -> None:
        raise AssertionError("reading died") from error

    def _changed(self) -> None:
        self.changes += 1

    def add(self, number: int, start: int = 0, end: int | None = None, **options: Any) -> Assigned:
        behind = None if end is None else Position(number, end)
        cursor = PartitionCursor(
            partition_of(number), Position(number, start), window_ms=WINDOW_MS, end=behind, **options
        )
        return self.reading.add(cursor, TOPIC)

    def deliver(self, most: int = 1_000) -> int:
        """Take what is ready; return how many batches that were."""
        for count in range(most):
            found = self.reading.deliver()
            if found is None:
                return count
            assigned, delivery = found
            if delivery.failure is not None:
                self.failures.append(delivery.failure)
                return count
            number = assigned.cursor.partition.partition
            for piece, low, high, _ in delivery.slices:
                assert piece.header is not None
                first = piece.header.first_sequence
                self.got += [(number, b"%d:%d" % (piece.header.producer_id, first + at)) for at in range(low, high)]
        return most

    async def until(self, count: int, limit_s: float = 100.0) -> float:
        """Read until so many records came; return how much virtual time that took."""
        loop = asyncio.get_running_loop()
        begin_s = loop.time()
        while len(self.got) < count:
            assert loop.time() - begin_s < limit_s, f"{len(self.got)} of {count} records came"
            self.deliver()
            await skip(0.01)
        return loop.time() - begin_s


def expected(number: int, batches: int) -> list[tuple[int, bytes]]:
    return [(number, b"%d:%d" % (number + 1, sequence)) for sequence in range(3 * batches)]


def reading(work: Coroutine[Any, Any, None]) -> None:
    run_skipping(work)


class NoBroker:
    """An `Ask` that nobody may use."""

    async def __call__(self, api: Api, message: Struct, answer: type[Answer], *, timeout_s: float) -> Answer:
        raise AssertionError(f"a broker is asked for {api.name}")


Tamper = Callable[[Span, Entries], tuple[Span, Entries]]


class MomentaryWrongAnswers(RemoteQueue):
    """Answers from a log; `lies` and `said` are what the first polls, and the first questions for a span, meet."""

    def __init__(self, log: Log) -> None:
        super().__init__(NoBroker())
        self.log = log
        self.lies: list[Tamper] = []
        self.said: list[Span] = []
        self.begin = 0

    def _entries(self, offset: int) -> Entries:
        found = [entry for entry in self.log.entries if entry.offset >= max(offset, self.begin)][:4]
        return Entries(found, found[-1].offset + 1 if found else max(offset, self.log.next_offset))

    async def read(self, partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
        return self._entries(offset)

    async def span(self, partition: ReadPartition) -> Span:
        return self.said.pop(0) if self.said else Span(self.begin, self.log.next_offset)

    async def seek_time(self, partition: ReadPartition, time_ms: int) -> int:
        return self.begin

    async def poll(
        self,
        offsets: dict[ReadPartition, int],
        wait_ms: int = 0,
        bytes_max: int = 0,
        blocks_bytes_max: int = 0,
        tag_bits: int = 0,
    ) -> list[Polled]:
        (offset,) = offsets.values()
        entries = self._entries(offset)
        if not entries:
            await skip(wait_ms / 1000)
        span = Span(self.begin, self.log.next_offset)
        if self.lies and entries:
            span, entries = self.lies.pop(0)(span, entries)
        return [Polled(PARTITION, span, entries)]
