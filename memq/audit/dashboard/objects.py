"""From a finding to the bytes: fetches an object again, checks each block, shows its records."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from memq.audit.checks.object_check import ObjectVerdict, check_object
from memq.audit.checks.whole_object import read_by_ranges
from memq.audit.dashboard.records import RecordReader
from memq.audit.dashboard.view import BlockPage, BlockRow, ObjectPage
from memq.audit.finding import Finding
from memq.audit.live.verification import Verification, verify_finding
from memq.client.broker_router import BrokerRouter
from memq.client.consumer.record import Record, block_records
from memq.client.link_pool import LinkPool, bootstrap_addresses
from memq.client.metadata import ClusterMetadata
from memq.errors import InvalidRequestError, MemqError, NotFoundError
from memq.format.blocks.columns import open_block
from memq.format.object import ObjectIndex, open_object
from memq.format.pointer import Location
from memq.runtime.network import Runtime
from memq.runtime.threads import ThreadPool
from memq.topic import Position

P = ParamSpec("P")
T = TypeVar("T")

CONNECT_S = 10.0
BLOCKS_MAX = 2_000  # of an object that are shown, damaged ones first
RECORDS_PAGE = 100
KEY_CHARS_MAX = 2_000


class ObjectInspector:
    """Reads objects through any broker; `records` shows what is in blocks."""

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
    places = [
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
        for number, (entry, (topic, partition)) in enumerate(zip(index.blocks, places, strict=True))
    ]
    return tuple(sorted(rows, key=lambda row: (not row.error, row.number))[:BLOCKS_MAX])
