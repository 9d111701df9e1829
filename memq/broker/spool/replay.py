"""Replays the spool of an earlier run: each block once, to the owner of its partition.

Theory: those blocks are like the ack=1 blocks of a lost epoch, and are handled alike (`memq.broker.spool.forwarding`).
When no publish of that run can land any more, the forwarder reads the queue from the offset that its owner had read. It
hands over the blocks that the queue does not hold. If retention has removed that offset, a block can't be distinguished
from a copy. Its segment is then set aside for the operator.

The log of a partition may fail or hang. So each partition of a chunk is searched in a task of its own. If its log fails
for `FORWARD_S_MAX`, its blocks stay on disk for the next start, as blocks stay that no owner takes.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from awscrt.checksums import crc32c

from memq.broker.ingest.slabs import Slab
from memq.broker.services import Services
from memq.broker.spool import SpoolDisk
from memq.broker.spool.forwarding import READ_TIMEOUT_S, Forwarder, block_list
from memq.broker.spool.segments import Segment, Span, Ticket
from memq.broker.spool.unpublished_blocks import UnpublishedBlock, UnpublishedBlocks
from memq.errors import CorruptDataError, MemqError, NotFoundError, QueueError, SpoolError, UnsupportedFormatError
from memq.format.ranges import Range, RangeSet
from memq.format.spool import SpoolContent, SpoolEntry, decode_segment
from memq.limits import FORWARD_S_MAX
from memq.topic import CLOCK_ERROR_MS, Topic

T = TypeVar("T")
Search = asyncio.Task[None]
SegmentIndex = dict[tuple[str, int, int], RangeSet]  # sequences by topic id, partition and producer

WORKS_MAX = 64  # partitions whose blocks are forwarded at once
RETRY_S = 1.0
READ_TRIES = 5
ROOM_S = 0.1  # interval between tries to lease memory for the next blocks
MEMORY_SHARE = 2  # half of the memory budget is left to new blocks


class Replay:
    """Runs once, after the start. `topics` returns the current topics."""

    def __init__(self, services: Services, forwarder: Forwarder, topics: Callable[[], list[Topic]]) -> None:
        self._done = asyncio.Event()
        self._services = services
        self._forwarder = forwarder
        self._topics = topics
        self._segments: dict[Segment, Ticket] = {}
        self._indexes: dict[Segment, SegmentIndex] = {}  # of waiting segments; read on demand
        self._indexing = asyncio.Lock()
        self._started_s = services.runtime.clock.monotonic()
        self._searches: dict[Search, None] = {}  # tasks that search the log of a partition, in order of their start

    async def find(self, disk: SpoolDisk) -> None:
        """Note the existing segments, before new ones are created; keep each until it is replayed.

        Raises: SpoolError.
        """
        for name, size in (await disk.sizes()).items():
            segment = self._services.spool.segments.find(name, 0, size)
            self._segments[segment] = self._ticket(segment, ((0, size),))

    async def run(self, disk: SpoolDisk) -> None:
        """Bring the blocks of all segments to the queue; return when the forwarder has ended its work."""
        ends: list[Search] = []
        try:
            for segment, ticket in self._segments.items():
                searches = await self._replay(disk, segment)
                if searches is not None:
                    end = _release_after(ticket, searches)
                    ends.append(asyncio.create_task(end, name=f"replay {segment.name}"))
            await asyncio.gather(*ends)
        finally:
            tasks = [*self._searches, *ends]
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)
        while any(segment.tickets for segment in self._segments) and self._forwarder.works:
            self._forwarder.changed.clear()
            await self._forwarder.changed.wait()
        if self._segments:
            left = sum(bool(segment.tickets) for segment in self._segments)
            kept = f"; {left} stay, as the log says" if left else ""
            self._services.events.info("spool-replayed", f"{len(self._segments)} segments of an earlier run{kept}")
        self._done.set()

    async def index_segments(self) -> tuple[str, ...]:
        """Read the segments that are not replayed yet, for `held_records`.

        Returns a text for each segment that can't be read.
        """
        unread: list[str] = []
        async with self._indexing:
            for segment in [each for each in self._waiting() if each not in self._indexes]:
                disk = self._services.spool.disk
                assert disk is not None, "segments were found without a disk"
                try:
                    content = decode_segment(await self._read(disk, segment))
                    if content.damages:  # the replay reads again, and logs them
                        raise CorruptDataError(_unsound(content))
                except MemqError as error:
                    if not self._segments[segment].released:  # else it was replayed and removed meanwhile
                        unread.append(f"segment {segment.name} of its spool can't be read: {error}")
                else:
                    self._indexes[segment] = _index_of(content)
        return tuple(unread)

    def held_records(self, topic_id: str) -> Iterator[tuple[tuple[int, int], Range]]:
        """Yield partition, producer and sequences of a topic's records that are not replayed yet."""
        for segment in self._waiting():
            for (topic, partition, producer), ranges in self._indexes.get(segment, {}).items():
                if topic == topic_id:
                    yield from (((partition, producer), piece) for piece in ranges)

    def _waiting(self) -> list[Segment]:
        return [segment for segment, ticket in self._segments.items() if not ticket.released]

    async def wait(self) -> None:
        """Return when the replay has ended."""
        await self._done.wait()

    @property
    def at_work(self) -> bool:
        """Whether segments of an earlier run exist and their replay has not ended."""
        return bool(self._segments) and not self._done.is_set()

    async def _replay(self, disk: SpoolDisk, segment: Segment) -> list[Search] | None:
        """Replay one segment, and return the searches that need it; None when it can't be read: then it stays."""
        try:
            data, content = await self._read_content(disk, segment)
        except SpoolError as error:
            self._services.counters.spool_damages += 1
            self._services.events.error("spool-damaged", f"segment {segment.name}, which the next start reads: {error}")
            return None
        searches: list[Search] = []
        if isinstance(content, MemqError):
            self._damaged(segment, str(content))
        else:
            self._log_content(segment, content)
            for entries in self._chunks(content.entries):
                searches += await self._take(segment, data, entries)
        return searches

    async def _read_content(self, disk: SpoolDisk, segment: Segment) -> tuple[bytes, SpoolContent | MemqError]:
        """Return a segment's bytes and their content, or the error of a segment without content.

        A read may return wrong bytes, and blocks that are skipped as damaged leave the spool with the segment. So a
        damage or a torn end counts only when two reads show the same bytes. Raises: SpoolError.
        """
        seen: dict[int, None] = {}  # checksums of the reads that were not sound

        async def read() -> tuple[bytes, SpoolContent | MemqError]:
            data = await self._read(disk, segment)
            content = _content_of(data)
            checksum = crc32c(data)
            if _is_sound(content) or checksum in seen:
                return data, content
            seen[checksum] = None
            raise SpoolError(f"{_unsound(content)}, and no two reads of it were the same; it is read again")

        return await self._retry(segment.name, read, READ_TRIES)

    async def _read(self, disk: SpoolDisk, segment: Segment) -> bytes:
        data = await disk.read(segment.name)
        if len(data) != segment.bytes:  # a short read would pass as a torn end
            raise SpoolError(f"{len(data)} bytes of segment {segment.name} were read, it has {segment.bytes}")
        return data

    def _ticket(self, segment: Segment, spans: tuple[Span, ...]) -> Ticket:
        ticket = Ticket(self._services.spool.freed)
        ticket.bind(segment, spans)
        return ticket

    def _log_content(self, segment: Segment, content: SpoolContent) -> None:
        """Log what a segment holds, and its damages."""
        for damage in content.damages:
            self._damaged(segment, f"bytes {damage.start} to {damage.end}: {damage.cause}")
        torn = f", and {content.torn_bytes} bytes that were being written" if content.torn_bytes else ""
        self._services.events.info("spool-replay", f"segment {segment.name}: {len(content.entries)} blocks{torn}")

    def _damaged(self, segment: Segment, cause: str) -> None:
        segment.kept = True
        self._services.counters.spool_damages += 1
        self._services.events.error("spool-damaged", f"segment {segment.name}, which will be set aside: {cause}")

    def _chunks(self, entries: list[SpoolEntry]) -> Iterator[list[SpoolEntry]]:
        """Yield the entries in chunks of at most a slab, or of one entry."""
        chunk: list[SpoolEntry] = []
        for entry in entries:
            if chunk and entry.end - chunk[0].start > self._services.pool.slab_bytes:
                yield chunk
                chunk = []
            chunk.append(entry)
        if chunk:
            yield chunk

    async def _take(self, segment: Segment, data: bytes, entries: list[SpoolEntry]) -> list[Search]:
        """Begin a search for some blocks, for each partition, as soon as memory is free; return the searches."""
        topics = {topic.id: topic for topic in self._topics()}
        parts: dict[tuple[str, int], list[SpoolEntry]] = {}
        for entry in entries:
            parts.setdefault((entry.topic_id, entry.partition), []).append(entry)
        stale_s = max((topics[id_].settings.stale_publish_ms for id_, _ in parts if id_ in topics), default=0) / 1000
        await asyncio.sleep(self._started_s + stale_s - self._services.runtime.clock.monotonic())
        start = entries[0].start
        slab = await self._room(entries[-1].end - start)
        slab.view[: entries[-1].end - start] = data[start : entries[-1].end]
        searches: list[Search] = []
        try:
            for (topic_id, partition), blocks in parts.items():
                topic = topics.get(topic_id)
                if topic is None or partition >= len(topic.partitions):
                    await self._take_topicless(segment, topic_id, blocks)
                else:
                    searches.append(self._search(segment, topic, blocks, slab, start))
        finally:
            self._services.pool.release(slab)
        return searches

    def _search(self, segment: Segment, topic: Topic, blocks: list[SpoolEntry], slab: Slab, start: int) -> Search:
        """Begin a search for blocks of one partition; it has a reference on the slab."""
        slab.references += 1
        work = self._hold(segment, topic, blocks, slab, start)
        search = asyncio.create_task(work, name=f"replay {topic.name}/{blocks[0].partition}")
        self._searches[search] = None

        def ended(search: Search) -> None:
            del self._searches[search]
            self._services.pool.release(slab)

        search.add_done_callback(ended)
        return search

    async def _take_topicless(self, segment: Segment, topic_id: str, blocks: list[SpoolEntry]) -> None:
        """Drop the blocks of a deleted topic.

        If the topic is only unknown, keep its blocks on disk for the next start.
        """
        if await self._forwarder.deleted(topic_id):
            self._drop_deleted(segment, topic_id, blocks, None)
            return
        self._keep_undecided(segment, topic_id, blocks, "which the coordinator does not know")

    def _keep_undecided(self, segment: Segment, topic_id: str, blocks: list[SpoolEntry], why: str) -> None:
        """Keep blocks on disk for the next start."""
        self._ticket(segment, tuple(entry.span for entry in blocks))
        for entry in blocks:
            header = entry.header
            writer = (topic_id, entry.partition, header.producer_id)
            self._forwarder.keep(*writer, header.first_sequence, header.next_sequence)
        counters = self._services.counters
        counters.spool_undecided_blocks += len(blocks)
        counters.spool_kept_blocks += len(blocks)
        text = f"{len(blocks)} blocks of topic id {topic_id}, {why}: {_names(blocks)}"
        self._services.events.error("spool-undecided", f"segment {segment.name}, which the next start reads: {text}")

    def _drop_deleted(
        self, segment: Segment, topic_id: str, blocks: list[SpoolEntry], error: NotFoundError | None
    ) -> None:
        cause = f": {error}" if error is not None else ""
        text = f"segment {segment.name}, {len(blocks)} blocks: the topic with id {topic_id} was deleted{cause}"
        self._services.events.warning("forward-gone", text)

    async def _room(self, size: int) -> Slab:
        pool = self._services.pool
        while True:
            works = self._forwarder.works + len(self._searches)
            leave_bytes = pool.budget_bytes // MEMORY_SHARE if works else 0
            slab = pool.lease(size, leave_bytes=leave_bytes) if works < WORKS_MAX else None
            if slab is not None:
                return slab
            await asyncio.sleep(ROOM_S)

    async def _hold(self, segment: Segment, topic: Topic, blocks: list[SpoolEntry], slab: Slab, start: int) -> None:
        """Let the forwarder search the queue for blocks of a partition and hand over the missing ones."""
        partition = blocks[0].partition
        oldest = min(blocks, key=lambda entry: entry.queue_offset)
        read = topic.read_partition_of(partition)
        since_ms = min(entry.appended_ms for entry in blocks) - topic.settings.stale_publish_ms - CLOCK_ERROR_MS
        queue = self._services.queue
        try:
            begin = (await self._ask(segment, topic, lambda: queue.span(read))).begin
            if oldest.queue_offset < begin:  # one answer does not prove that retention removed the offset
                begin = min(begin, (await self._ask(segment, topic, lambda: queue.span(read))).begin)
            from_time = await self._ask(segment, topic, lambda: queue.seek_time(read, since_ms))
        except NotFoundError as error:
            self._drop_deleted(segment, topic.id, blocks, error)
            return
        except QueueError as error:
            self._keep_undecided(segment, topic.id, blocks, str(error))
            return
        known = [entry for entry in blocks if entry.queue_offset >= begin]
        if len(known) < len(blocks):
            lost = [entry for entry in blocks if entry.queue_offset < begin]
            self._undecided(segment, lost, f"the queue begins at {begin}, they were taken at {oldest.queue_offset}")
        if not known:
            return
        read_to = min(from_time, *(entry.queue_offset for entry in known))
        release = self._services.pool.release
        held = UnpublishedBlocks(topic, partition, max(read_to, begin), self._started_s, release)
        for entry in known:
            held.add(UnpublishedBlock(entry.header, slab, entry.start - start, entry.end - start))
        held.tickets.append(self._ticket(segment, tuple(entry.span for entry in known)))
        self._services.counters.replayed_blocks += len(known)
        self._forwarder.take(held)

    def _undecided(self, segment: Segment, blocks: list[SpoolEntry], why: str) -> None:
        self._services.counters.spool_undecided_blocks += len(blocks)
        segment.kept = True
        text = f"it is unknown whether the queue held {len(blocks)} blocks: {why}: {_names(blocks)}"
        self._services.events.error("spool-undecided", f"segment {segment.name}, which will be set aside: {text}")

    async def _ask(self, segment: Segment, topic: Topic, ask: Callable[[], Awaitable[T]]) -> T:
        """Return the answer of a log; retry for `FORWARD_S_MAX`.

        Raises: NotFoundError when the topic was deleted; QueueError after that time.
        """

        async def call() -> T:
            async with asyncio.timeout(READ_TIMEOUT_S):
                return await ask()

        until_s = self._services.runtime.clock.monotonic() + FORWARD_S_MAX
        return await self._retry(segment.name, call, topic_id=topic.id, until_s=until_s)

    async def _retry(
        self,
        name: str,
        call: Callable[[], Awaitable[T]],
        tries_max: float = math.inf,
        topic_id: str = "",
        until_s: float = math.inf,
    ) -> T:
        """Repeat `call` until it succeeds: any error of the disk or the queue may pass.

        Raises: the last error after `tries_max` tries, or after `until_s` (monotonic s); with a `topic_id`,
        NotFoundError when that topic was deleted.
        """
        tries = 0
        while True:
            try:
                return await call()
            except (MemqError, TimeoutError) as error:
                tries += 1
                if tries >= tries_max:
                    raise
                if topic_id and isinstance(error, NotFoundError) and await self._forwarder.deleted(topic_id):
                    raise
                if self._services.runtime.clock.monotonic() > until_s:
                    raise QueueError(f"the log gave no answer in time: {error!r}") from error
                self._services.events.warning("spool-retry", f"segment {name}: {error}")
                await asyncio.sleep(RETRY_S)


async def _release_after(ticket: Ticket, searches: list[Search]) -> None:
    """Release a segment after the searches of its blocks; a search that failed or was cancelled keeps it."""
    for search in searches:
        await search
    ticket.release()


def _content_of(data: bytes) -> SpoolContent | MemqError:
    try:
        return decode_segment(data)
    except (CorruptDataError, UnsupportedFormatError) as error:
        return error


def _is_sound(content: SpoolContent | MemqError) -> bool:
    return not isinstance(content, MemqError) and not content.damages and not content.torn_bytes


def _unsound(content: SpoolContent | MemqError) -> str:
    if isinstance(content, MemqError):
        return str(content)
    damages = [f"bytes {damage.start} to {damage.end}: {damage.cause}" for damage in content.damages[:1]]
    return "; ".join(damages) or f"the last {content.torn_bytes} bytes are no entry"


def _index_of(content: SpoolContent) -> SegmentIndex:
    index: SegmentIndex = {}
    for entry in content.entries:
        header = entry.header
        ranges = index.setdefault((entry.topic_id, entry.partition, header.producer_id), RangeSet())
        ranges.add(header.first_sequence, header.next_sequence)
    return index


def _names(blocks: list[SpoolEntry]) -> str:
    return block_list([f"partition {each.partition} {each.header.describe()}" for each in blocks])
