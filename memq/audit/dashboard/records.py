"""Records for the pages: found by key, tags, headers and time, as they come, or of a finding's object.

What is in them is masked unless allowed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import ParamSpec, TypeVar

from anyio import CancelScope

from memq.audit.checks.object_check import ObjectVerdict, check_object
from memq.audit.checks.object_reads import read_by_ranges
from memq.audit.dashboard.view import BlockPage, BlockRow, ObjectPage, RecordRow, SearchResult, preview
from memq.audit.finding import Finding
from memq.audit.live.verification import Verification, verify_finding
from memq.client.broker_router import BrokerRouter
from memq.client.consumer.batch import Record, block_records
from memq.client.consumer.consumer import AsyncConsumer
from memq.client.link_pool import LinkPool, bootstrap_addresses
from memq.client.metadata import ClusterMetadata
from memq.errors import DeniedError, InvalidRequestError, MemqError, NotFoundError
from memq.format.blocks.columns import open_block
from memq.format.object import ObjectIndex, open_object
from memq.format.pointer import Location
from memq.limits import MIB
from memq.runtime.runtime import Runtime
from memq.runtime.threads import ThreadPool
from memq.topic import Position

RESULTS_MAX = 200
SEARCHED_MAX = 500_000
SEARCH_S_MAX = 15.0
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
SKEW = timedelta(minutes=10)  # by which a producer's clock may be ahead
HEADERS_MAX = 20
PREFETCH_BYTES_MAX = 8 * MIB
TAIL_RECORDS_S_MAX = 50
TAIL_TICK_S = 0.25
P = ParamSpec("P")
T = TypeVar("T")

CONNECT_S = 10.0
BLOCKS_MAX = 2_000  # of an object that are shown, damaged ones first
RECORDS_PAGE = 100
KEY_CHARS_MAX = 2_000


@dataclass(frozen=True, slots=True)
class Query:
    """Conditions of a search in a topic; None matches anything.

    Times are Unix ms of the records, the end is not included. `tags` and `where` are those of a consumer.
    """

    topic: str
    key: bytes | None = None
    tags: str | None = None
    where: str | None = None
    first_ms: int | None = None
    end_ms: int | None = None

    def fits(self, record: Record) -> bool:
        """Whether a record that the consumer delivers matches."""
        return (
            (self.key is None or record.key == self.key)
            and (self.first_ms is None or record.timestamp_ms >= self.first_ms)
            and (self.end_ms is None or record.timestamp_ms < self.end_ms)
        )


@dataclass(frozen=True, slots=True)
class TailPart:
    """Records that came, and how many more came that are not shown: over the rate, or damaged."""

    records: tuple[RecordRow, ...]
    passed: int


class RecordReader:
    """Reads topics without a group, so nobody's position moves. `contents` lets keys and values be seen."""

    def __init__(self, brokers: str, runtime: Runtime, *, contents: bool) -> None:
        self._brokers = brokers
        self._runtime = runtime
        self._contents = contents

    async def search(self, query: Query) -> SearchResult:
        """Return the first RESULTS_MAX matching records in storage order, within bounds of work and time.

        Raises: NotFoundError, UnreachableError; DeniedError, InvalidFilterError.
        """
        found: list[RecordRow] = []
        clock = self._runtime.clock
        deadline_s = clock.monotonic() + SEARCH_S_MAX
        searched, damaged, why = 0, 0, ""
        async with self._consumer(query.topic, _start(query), "end", query.tags, query.where) as consumer:
            while not why:
                batch = await consumer.poll(max(deadline_s - clock.monotonic(), 0.001))
                counts = consumer.stats().counts
                searched = counts.records + counts.filtered_records
                if batch is None:
                    why = "" if clock.monotonic() < deadline_s else f"it took {SEARCH_S_MAX:g} s"
                    break
                fitting = (record for record in batch if query.fits(record))
                found += [self.row(query.topic, record) for record in islice(fitting, RESULTS_MAX + 1 - len(found))]
                damaged += sum(damage.records for damage in batch.damaged)
                if len(found) > RESULTS_MAX:
                    why = f"there are more than {RESULTS_MAX} of them"
                elif searched >= SEARCHED_MAX:
                    why = f"{SEARCHED_MAX:,} records were searched"
                await asyncio.sleep(0)  # batches at hand come without a wait, and others share the loop
        if damaged and not why:
            why = f"records in damaged blocks: {damaged:,}"
        return SearchResult(records=tuple(found[:RESULTS_MAX]), searched=searched, complete=not why, why=why)

    async def tail(
        self, topic: str, records_s: int, tags: str | None = None, where: str | None = None
    ) -> AsyncGenerator[TailPart, None]:
        """Yield what comes from now on, at most `records_s` per s, and how many were left out.

        An empty part first. `tags` and `where` are those of a consumer.

        Raises: NotFoundError, UnreachableError; DeniedError, InvalidFilterError.
        """
        clock = self._runtime.clock
        async with _closed_whole(self._consumer(topic, "end", None, tags, where)) as consumer:
            window_s, left = clock.monotonic(), records_s
            yield TailPart((), 0)
            while True:
                batch = await consumer.poll(TAIL_TICK_S)
                if clock.monotonic() - window_s >= 1.0:
                    window_s, left = clock.monotonic(), records_s
                shown = tuple(self.row(topic, record) for record in islice(batch or (), left))
                left -= len(shown)
                damaged = sum(damage.records for damage in batch.damaged) if batch is not None else 0
                passed = damaged + (len(batch) - len(shown) if batch is not None else 0)
                yield TailPart(shown, passed)
                await asyncio.sleep(0)

    def rows(self, topic: str, records: Iterable[Record]) -> tuple[RecordRow, ...]:
        """Return records as the pages show them."""
        return tuple(self.row(topic, record) for record in records)

    def row(self, topic: str, record: Record) -> RecordRow:
        """Return a record as the pages show it."""
        headers = tuple((name, preview(value) or "") for name, value in record.headers[:HEADERS_MAX])
        return RecordRow(
            topic=topic,
            position=str(record.position),
            timestamp_ms=record.timestamp_ms,
            tag=record.tag,
            key=preview(record.key) if self._contents else None,
            value=preview(record.value) if self._contents else None,
            headers=headers if self._contents else None,
            key_bytes=None if record.key is None else len(record.key),
            value_bytes=None if record.value is None else len(record.value),
        )

    def _consumer(
        self, topic: str, start: str | datetime, end: str | None, tags: str | None, where: str | None
    ) -> AsyncConsumer:
        if where is not None and not self._contents:  # a few comparisons would reveal a masked header
            raise DeniedError("a condition on headers needs their contents", hint="switch dashboard_contents on")
        return AsyncConsumer(
            self._brokers,
            topic,
            start=start,
            end=end,
            tags=tags,
            where=where,
            prefetch_bytes_max=PREFETCH_BYTES_MAX,
            on_damaged="skip",
            on_expired="skip",
            runtime=self._runtime,
        )


@asynccontextmanager
async def _closed_whole(consumer: AsyncConsumer) -> AsyncGenerator[AsyncConsumer, None]:
    """Open the consumer and close it completely, even when the caller cancels each wait."""
    with CancelScope(shield=True):
        await consumer.__aenter__()
    try:
        yield consumer
    finally:
        with CancelScope(shield=True):
            await consumer.close()


def _start(query: Query) -> str | datetime:
    """Return the start position.

    Earlier records have other times, unless clocks differ by more than SKEW.
    Nothing says where to end: history that is stored today has times of long ago.
    Raises: InvalidRequestError for a time outside of the calendar.
    """
    if query.first_ms is None:
        return "beginning"
    try:
        return _EPOCH + timedelta(milliseconds=query.first_ms) - SKEW
    except OverflowError as error:
        raise InvalidRequestError(f"first_ms = {query.first_ms} is no time", hint="give Unix milliseconds") from error


class ObjectInspector:
    """Reads objects through any broker; `records` shows the content of blocks."""

    def __init__(self, brokers: str, runtime: Runtime, records: RecordReader) -> None:
        self._brokers = brokers
        self._runtime = runtime
        self._pool = LinkPool(runtime, bootstrap_addresses(brokers))
        self._metadata = ClusterMetadata(runtime, self._pool)
        self._any_broker = BrokerRouter(self._pool)
        self._records = records

    async def close(self) -> None:
        """Disconnect."""
        await self._metadata.close()
        await self._pool.close()

    async def page(self, key: str) -> ObjectPage:
        """Fetch an object and check every byte of it.

        Raises: NotFoundError, InvalidRequestError, RetryableError.
        """
        store, data = await self._fetch(key)
        verdict = await _aside(check_object, memoryview(data))
        index = verdict.index
        return ObjectPage(
            store=store,
            key=key,
            bytes=len(data),
            broker=index.meta.broker if index is not None else "",
            created_ms=index.meta.created_ms if index is not None else 0,
            blocks=_blocks(index, verdict) if index is not None else (),
            error="" if index is not None else "; ".join(finding.text for finding in verdict.findings[:5]),
        )

    async def block(self, key: str, number: int, first: int) -> BlockPage:
        """Return RECORDS_PAGE records of a block, from its record `first` on. Raises: as `page`."""
        _, data = await self._fetch(key)
        return await _aside(self._block_page, key, memoryview(data), number, first)

    async def verify(self, finding: Finding) -> Verification:
        """Fetch a finding's batch again and say what it holds now. Raises: as `verify_finding`."""
        return await verify_finding(self._brokers, finding, self._runtime)

    def _block_page(self, key: str, view: memoryview, number: int, first: int) -> BlockPage:
        try:
            index = open_object(view)
            if not 0 <= number < len(index.blocks):
                raise NotFoundError(f"object '{key}' has no block {number}", hint=f"it has {len(index.blocks)}")
            entry = index.blocks[number]
            topic = next(
                index.meta.topics[batch.topic].name for batch in index.batches if entry in index.blocks_of(batch)
            )
            reader = open_block(view[entry.offset : entry.offset + entry.length])
            low, high = min(first, entry.count), min(first + RECORDS_PAGE, entry.count)
            found: list[Record] = list(block_records(reader, first=Position(0, 0, 0), low=low, high=high))
        except NotFoundError:
            raise
        except MemqError as error:
            return BlockPage(first=first, total=0, records=(), error=str(error))
        return BlockPage(first=low, total=entry.count, records=self._records.rows(topic, found))

    async def _fetch(self, key: str) -> tuple[str, bytes]:
        """Return the store that holds the object, and the object."""
        if not 0 < len(key) <= KEY_CHARS_MAX:
            raise InvalidRequestError(f"the name of an object has 1 to {KEY_CHARS_MAX} characters, not {len(key)}")
        await self._pool.reach(CONNECT_S)
        await self._metadata.all_topics()  # the stores come with them
        for store in self._metadata.stores:
            try:
                location = Location(store=store.name, key=key, offset=0, length=0)
                return store.name, bytes(await read_by_ranges(self._any_broker.read, location))
            except NotFoundError:
                continue
        raise NotFoundError(f"no store of the cluster holds the object '{key[:300]}'", hint="it may have been deleted")


async def _aside(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Work in a thread of its own: unpacking an object is slow, and a broker may share the loop."""
    threads = ThreadPool("dashboard object", 1)
    try:
        return await threads.run(work, *args, **kwargs)
    finally:
        await threads.close()


def _blocks(index: ObjectIndex, verdict: ObjectVerdict) -> tuple[BlockRow, ...]:
    errors = {finding.offset: finding.text for finding in verdict.findings}
    owners = [
        (index.meta.topics[batch.topic].name, batch.partition) for batch in index.batches for _ in range(batch.blocks)
    ]
    rows = [
        BlockRow(
            number=number,
            topic=topic,
            partition=partition,
            offset=entry.offset,
            length=entry.length,
            producer=f"{entry.producer_id:016x}",
            first=entry.first_sequence,
            records=entry.count,
            least_ms=entry.least_ms,
            greatest_ms=entry.greatest_ms,
            error=errors.get(entry.offset, ""),
        )
        for number, (entry, (topic, partition)) in enumerate(zip(index.blocks, owners, strict=True))
    ]
    return tuple(sorted(rows, key=lambda row: (not row.error, row.number))[:BLOCKS_MAX])
