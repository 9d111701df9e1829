"""Hands ack=1 blocks of lost epochs to the new owners, and takes those of other brokers.

Theory: no producer sends a block again after its ack=1, so this broker must. The queue may hold the block anyway: its
producer repeats it after a lost ack, or a publish of the lost epoch lands late. So the forwarder reads the queue first,
when the last such publish is too old to be accepted. It sends the blocks that are absent to the new owner, with the
time of that read. The new owner knows all later entries of the queue, for as long as the delivery time-out. After that,
it refuses, and the forwarder reads the queue again. The owner answers when the pointer of the block is in the queue.
The answer alone is no proof: the forwarder holds a block until the queue shows it. A pointer may name the sequences
of a block while its object can't be read. Then the forwarder waits: its block is perhaps a copy. After `UNREAD_S_MAX`
it sends the block, because the object may be lost. It retries every error until no block was taken for `FORWARD_S_MAX`;
then it gives the blocks up, and logs each. Only two fresh reads of the coordinator prove that a topic was deleted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

from memq.broker.ingest.slabs import Slab
from memq.broker.partition.append import Accepted, AwaitedAck, BlockRun, Redirected
from memq.broker.partition.ownership import changed_entry
from memq.broker.partition.pointer_resolver import PointerResolver, search_of
from memq.broker.partition.topic_processor import TopicProcessor
from memq.broker.services import BROKER_PROGRAM, Services
from memq.broker.spool.unpublished_blocks import UnpublishedBlock, UnpublishedBlocks
from memq.errors import (
    CorruptDataError,
    MemqError,
    NotFoundError,
    NotReadyError,
    OutcomeUnknownError,
    RetryableError,
    StoreError,
    TimedOutError,
    TooOldError,
    UnreachableError,
)
from memq.format.blocks.header import check_block, parse_header, scope_of
from memq.format.ranges import Range, RangeSet
from memq.limits import FORWARD_S_MAX, MIB
from memq.notification.log_reader import valid_seek, valid_span
from memq.notification.stored_blocks import Copies, claim_of, conflict_of
from memq.protocol.frames import AckLevel
from memq.protocol.link import Link, connect_link
from memq.protocol.messages import Forward
from memq.runtime.clock import backoff_s
from memq.runtime.network import parse_address
from memq.runtime.tasks import TaskOwner
from memq.topic import CLOCK_ERROR_MS, ReadPartition, Topic

BACKOFF_S_MAX = 2.0
READ_TIMEOUT_S = 30.0
UNREAD_S_MAX = FORWARD_S_MAX / 2  # then a block goes to the owner although a copy may be in an object that is unread
DELETED_S = 2.0  # between the two reads of the coordinator that prove a deletion
IN_FLIGHT_BLOCKS_MAX = 32
IN_FLIGHT_BYTES_MAX = 4 * MIB
LISTED_BLOCKS_MAX = 10_000  # blocks in one line of the log

OwnerLookup = Callable[[Topic, int], Awaitable[TopicProcessor | str]]
READY_TIMEOUT_S = 10.0


def block_list(blocks: Sequence[str]) -> str:
    """Return one log line that names the blocks: the log's rate limit must hide none of them."""
    more = f"; and {len(blocks) - LISTED_BLOCKS_MAX} more" if len(blocks) > LISTED_BLOCKS_MAX else ""
    return "; ".join(blocks[:LISTED_BLOCKS_MAX]) + more


class Forwarder:
    """Brings the unpublished blocks of lost epochs to the queue, through the owners of their partitions.

    `find_owner` returns the processor of a partition that this broker owns, else the address of the owner.
    """

    def __init__(self, services: Services, find_owner: OwnerLookup) -> None:
        self._services = services
        self._find_owner = find_owner
        self.changed = asyncio.Event()  # the work for one epoch's blocks has ended
        self._work: dict[UnpublishedBlocks, asyncio.Task[None]] = {}
        self._tasks = TaskOwner(self._failed, services.events)
        self._given_up: MemqError | None = None
        self._kept: dict[tuple[str, int, int], RangeSet] = {}  # by topic, partition, producer: only on disk

    @property
    def works(self) -> int:
        """Number of lost epochs whose blocks are being forwarded."""
        return len(self._work)

    def __len__(self) -> int:
        """How many blocks are held."""
        return sum(len(held) for held in self._work)

    def take(self, held: UnpublishedBlocks) -> None:
        """Forward the blocks of a lost epoch to the next owner, in the background; after `stop`, drop them."""
        if self._tasks.stopped:
            _release_all(held)
            return
        work = f"forward {held.topic.name}/{held.partition} {held.epoch}"
        task = self._work[held] = self._tasks.start(self._forward(held), work)
        task.add_done_callback(lambda _: self._done(held))

    def describe(self) -> list[str]:
        """Name each block that is held."""
        return [line for held in self._work for line in held.describe()]

    def held_records(self, topic_id: str) -> Iterator[tuple[tuple[int, int], Range]]:
        """Yield partition, producer and sequences of each held block of a topic.

        This includes blocks on disk that the next start of the broker replays.
        """
        for held in self._work:
            if held.topic.id == topic_id:
                for block in held.blocks:
                    yield (held.partition, block.producer_id), (block.first, block.next)
        for (topic, partition, producer), ranges in self._kept.items():
            if topic == topic_id:
                yield from (((partition, producer), piece) for piece in ranges)

    def keep(self, topic_id: str, partition: int, producer: int, first: int, next_: int) -> None:
        """Note records that stay on disk until the next start of the broker replays them."""
        self._kept.setdefault((topic_id, partition, producer), RangeSet()).add(first, next_)

    async def drain(self) -> None:
        """Return when no block is held.

        Raises: the error of the last blocks that were given up since the last `drain`.
        """
        while self._work:
            await asyncio.wait(list(self._work.values()))
        error, self._given_up = self._given_up, None
        if error is not None:
            raise error

    async def stop(self) -> None:
        """Stop at once; release the held blocks."""
        await self._tasks.stop()

    async def deleted(self, topic_id: str) -> bool:
        """Return whether the coordinator shows twice, `DELETED_S` apart, that a topic was deleted."""
        for wait_s in (0.0, DELETED_S):
            await asyncio.sleep(wait_s)
            try:
                async with asyncio.timeout(READ_TIMEOUT_S):
                    if not await self._services.coordinator.deleted(topic_id):
                        return False
            except (MemqError, TimeoutError):
                return False
        return True

    def _done(self, held: UnpublishedBlocks) -> None:
        self._work.pop(held, None)
        self.changed.set()
        _release_all(held)

    def _failed(self, error: BaseException) -> None:
        self._services.events.error("forward-failed", repr(error), error)

    # ---- one epoch's blocks ------------------------------------------------------------------------

    async def _forward(self, held: UnpublishedBlocks) -> None:
        """Retry until all blocks are in the queue, the topic is deleted, or no owner takes any for too long."""
        await asyncio.sleep(held.settled_s - self._now())
        tries, since_s, left = 0, self._now(), len(held)
        while held.blocks:
            try:
                await self._hand_over(held, waits=self._now() - since_s <= UNREAD_S_MAX)
            except Exception as error:  # noqa: BLE001 - these are the only copies: no error may drop them
                if not isinstance(error, (MemqError, TimeoutError)):
                    self._services.events.error("forward-failed", f"{held.name}: {error!r}", error)
                if len(held) < left:
                    tries, since_s, left = 0, self._now(), len(held)
                tries += 1
                self._services.counters.forward_retries += 1
                self._services.events.info("forward-retry", f"{held.name}, {left} blocks, try {tries}: {error!r}")
                if isinstance(error, NotFoundError) and await self.deleted(held.topic.id):
                    self._services.events.warning("forward-gone", f"{held.name}, {left} blocks: the topic was deleted")
                    held.release_tickets()
                    return
                if self._now() - since_s > FORWARD_S_MAX:
                    text = f"no owner of {held.name} took {left} blocks for {FORWARD_S_MAX:g} s: {error!r}"
                    self._give_up(held, list(held.blocks), TimedOutError(text))
                    return
                delay_s = backoff_s(self._services.runtime.random, tries, base_s=0.05, most_s=BACKOFF_S_MAX)
                await asyncio.sleep(delay_s)
        if not held.given_up:
            held.release_tickets()
        self._services.events.info("forwarded", f"{held.name}: nothing is held any more")

    async def _hand_over(self, held: UnpublishedBlocks, *, waits: bool) -> None:
        """Find the owner, and hand over the blocks that the queue does not hold.

        Each try reads the queue first, also without a reachable owner: retention may remove a copy's pointer later.
        `waits`: blocks that may be in an object that can't be read stay here. Otherwise they go to the owner, because
        the object may be lost.
        Raises: the error that prevents this for any block.
        """
        absent_s, uncompared = await self._read_on(held)
        if not held.blocks:
            return
        found = await self._find_owner(held.topic, held.partition)
        owner = await self._connect(found) if isinstance(found, str) else found
        refusal: MemqError | None = None
        try:
            self._services.events.info("forwarding", f"{held.name}: {len(held)} blocks with an ack=1")
            for group in _groups(block for block in held.blocks if not waits or block not in uncompared):
                blocks = [block for block in group if block in held.blocks and not (waits and block in uncompared)]
                refusal = await self._deliver(held, blocks, owner, absent_s) or refusal
                absent_s, uncompared = await self._read_on(held)
                unseen = sum(block in held.blocks for block in blocks)
                self._services.counters.forwarded_blocks += len(blocks) - unseen
                if unseen and refusal is None:
                    text = f"{found if isinstance(found, str) else 'this broker'} took {unseen} blocks of {held.name}"
                    raise OutcomeUnknownError(f"{text} that the queue does not show")
        finally:
            if isinstance(owner, Link):
                owner.abort(UnreachableError(f"the connection to {found} was closed here"))
        if refusal is not None and held.blocks:
            raise refusal
        if held.blocks:
            text = f"the queue shows {len(held)} blocks of {held.name}, or others with their sequences"
            raise StoreError(f"{text}, in objects that can't be read")

    async def _connect(self, address: str) -> Link:
        try:
            return await connect_link(self._services.runtime, None, parse_address(address), client=BROKER_PROGRAM)
        except UnreachableError as error:
            if error.refused:
                self._services.suspicions.report(address)
            raise

    async def _read_on(self, held: UnpublishedBlocks) -> tuple[float, set[UnpublishedBlock]]:
        """Read the queue to its end, and drop the blocks in it.

        Return when the last read began (monotonic s), and the blocks that it does not show to be absent.
        """
        read = held.topic.read_partition_of(held.partition)
        log = PointerResolver(self._services, read, held.name)
        async with asyncio.timeout(READ_TIMEOUT_S):
            end = (await valid_span(self._services.queue, read)).end
            if held.log_was_cut or end < held.read_to:
                held.restart(await self._copies_from(held, read))
        while True:
            handed_over_s = self._now()
            async with asyncio.timeout(READ_TIMEOUT_S):
                entries = await log.read(held.read_to, end)
                if await log.has_changed(held.read_to - 1, held.last_mark):
                    held.log_was_cut = True  # the next try reads it again
                    raise changed_entry(held.read_to - 1)
                for entry in entries:
                    held.meet(entry.offset, await log.pointer(entry))
            if not entries:
                return handed_over_s, await self._release_copies(held, read)

    async def _release_copies(self, held: UnpublishedBlocks, read: ReadPartition) -> set[UnpublishedBlock]:
        """Drop the blocks of which the queue holds identical copies.

        Give up blocks whose sequences other blocks have, and log each. Return the blocks whose sequences are in
        objects that can't be read now. They may be copies, and the next owner may have forgotten the first ones.
        """
        shown = {block: parse_header(block.view) for block in held.queued()}
        uncompared: set[UnpublishedBlock] = set()
        if not shown:
            return uncompared
        async with asyncio.timeout(READ_TIMEOUT_S):
            begin = await self._copies_from(held, read)
            search = search_of(self._services, read, held.partition, held.name)
            found = await search.find([claim_of(header) for header in shown.values()], begin, held.read_to)
        for block, header in shown.items():
            copies = found.get(claim_of(header), Copies())
            if copies.differ_from(header):
                self._services.counters.conflicting_blocks += 1
                error = conflict_of(header, copies.blocks)
                self._services.events.error("identity-conflict", f"{held.name}: {error}")
                self._give_up(held, [block], error)
            elif copies.blocks:
                held.release(block)
            elif copies.unread:
                uncompared.add(block)
        return uncompared

    async def _copies_from(self, held: UnpublishedBlocks, read: ReadPartition) -> int:
        """Return the offset from which on the queue may have copies of the blocks."""
        now_ms = self._services.runtime.clock.wall_ms()
        known_ms = now_ms if held.known_ms is None else min(now_ms, held.known_ms)
        since_ms = known_ms - held.topic.settings.dedup_window_ms - CLOCK_ERROR_MS
        return min(held.known_from, await valid_seek(self._services.queue, read, since_ms))

    async def _deliver(
        self,
        held: UnpublishedBlocks,
        blocks: Sequence[UnpublishedBlock],
        owner: Link | TopicProcessor,
        absent_s: float,
    ) -> MemqError | None:
        """Hand some blocks over at once; return the error of a refused block that does not stop the others.

        A block that is damaged here is given up alone. Raises: an error that stops all blocks.
        """

        async def one(block: UnpublishedBlock) -> None:
            if isinstance(owner, TopicProcessor):
                await take_forwarded(owner, block.slab, block.start, block.end, absent_s)
                return
            absent_ms = owner.clock_ms(absent_s)
            topic, number = held.topic, held.partition
            message = Forward(topic=topic.name, topic_id=topic.id, partition=number, absent_ms=absent_ms)
            await owner.forward(message, block.view)

        ends = await asyncio.gather(*(one(block) for block in blocks), return_exceptions=True)
        refusal: MemqError | None = None
        for block, end in zip(blocks, ends, strict=True):
            if isinstance(end, CorruptDataError) and _damage(held, block) is not None:
                self._give_up(held, [block], end)
            elif isinstance(end, MemqError) and not isinstance(end, RetryableError):
                refusal = refusal or end
            elif end is not None:
                raise end if isinstance(end, Exception) else OutcomeUnknownError(f"a block was not forwarded: {end!r}")
        return refusal

    def _give_up(self, held: UnpublishedBlocks, blocks: list[UnpublishedBlock], error: MemqError) -> None:
        self._given_up = error
        counters = self._services.counters
        counters.given_up_blocks += len(blocks)
        held.given_up += len(blocks)
        stays = ""
        if held.tickets:
            counters.spool_kept_blocks += len(blocks)
            stays = "; they stay in the spool, and the next start brings them"
        self._services.events.error("given-up", f"{error}{stays}: {block_list(held.describe(blocks))}")
        for block in blocks:
            if held.tickets:
                self.keep(held.topic.id, held.partition, block.producer_id, block.first, block.next)
            held.release(block)

    def _now(self) -> float:
        return self._services.runtime.clock.monotonic()


def _groups(blocks: Iterable[UnpublishedBlock]) -> Iterator[list[UnpublishedBlock]]:
    """Yield the blocks in groups that may be in flight at once; one block at least."""
    group: list[UnpublishedBlock] = []
    size = 0
    for block in list(blocks):
        size += block.end - block.start
        if group and (len(group) == IN_FLIGHT_BLOCKS_MAX or size > IN_FLIGHT_BYTES_MAX):
            yield group
            group, size = [], block.end - block.start
        group.append(block)
    if group:
        yield group


def _damage(held: UnpublishedBlocks, block: UnpublishedBlock) -> MemqError | None:
    """Return the damage of a block in memory; None if the block was damaged in transit to the receiver."""
    try:
        check_block(block.view, scope_of(held.topic.id_bytes, held.partition))
    except MemqError as error:
        return error
    return None


def _release_all(held: UnpublishedBlocks) -> None:
    for block in list(held.blocks):
        held.release(block)


async def take_forwarded(processor: TopicProcessor, slab: Slab, start: int, end: int, absent_s: float) -> None:
    """Bring the block at `start` to `end` of a slab into the queue once, even if other brokers do so.

    The queue did not hold the block at `absent_s` (monotonic). The owner's state must reach back to that time; it
    reaches back for the delivery time-out. The caller holds the slab until this returns.
    Raises: TooOldError: read the queue again, then retry; NotReadyError, MovedError, DrainingError, ThrottledError:
    retry; IdentityConflictError, CorruptDataError: the block can't be taken.
    """
    try:
        async with asyncio.timeout(READY_TIMEOUT_S):
            await processor.ready()
    except TimeoutError as error:
        raise NotReadyError(f"{processor.name} is still being opened") from error
    header = check_block(slab.view[start:end], processor.scope)
    first, next_, now_s = header.first_sequence, header.next_sequence, processor.services.runtime.clock.monotonic()
    if (now_s - absent_s) * 1000 > processor.delivery_timeout_ms:
        raise TooOldError(f"block {first} was searched for over {processor.delivery_timeout_ms} ms ago")
    waiter = AwaitedAck()
    stream = processor.appender.open_stream(0, waiter, header.producer_id, AckLevel.ALL, first, limiters=None)
    try:
        outcome = processor.appender.append(stream, BlockRun([(slab, start, end)], first, next_, end - start), now_s)
        assert not isinstance(outcome, Redirected), "nothing was awaited since it was ready, and so not draining"
        if not isinstance(outcome, Accepted):
            raise outcome.error
        processor.hurry()  # sealing by age may take longer than the sender waits
        await waiter.acked
    finally:
        processor.appender.close_stream(stream)
