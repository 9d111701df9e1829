"""The owner of a target takes units of held records (H4).

A unit comes again when its answer was lost, or when its service partition has a new owner. The pointers of the target
have the number of the last unit of each shard. So the owner answers at once for a unit that the queue holds, and takes
no unit twice. It reads the blocks from the store: they are the bytes that the producer sealed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from memq.broker.ingest.slabs import Slab
from memq.broker.partition.append import AwaitedAck, BlockRun
from memq.broker.partition.ownership import Ownership
from memq.broker.partition.ring import RingStream, UnitNumber
from memq.broker.partition.topic_processor import TopicProcessor
from memq.broker.services import Services
from memq.errors import (
    CorruptDataError,
    DrainingError,
    LogLostError,
    MemqError,
    MovedError,
    NotFoundError,
    NotReadyError,
    ThrottledError,
)
from memq.format.blocks.header import BlockHeader, Buffer, check_block
from memq.format.held_object import HoldId
from memq.format.pointer import NamedProducer
from memq.protocol.frames import AckLevel
from memq.storage_handlers.confirmed_reads import ConfirmedReads, Way, check_missing

READY_TIMEOUT_S = 10.0
READS_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class UnitBlock:
    """One block of a unit: its object, its bytes there, and its identity (None from a former broker)."""

    key: str
    offset: int
    length: int
    id: HoldId | None


@dataclass(frozen=True, slots=True)
class IncomingUnit:
    """A unit for a target. The target's log had all units of the shard up to number `behind` once.

    `records` counts those of all units of the shard for the target up to this one; 0: unknown.
    """

    shard: int
    number: int
    behind: int
    blocks: Sequence[UnitBlock]
    records: int = 0


async def take_unit(processor: TopicProcessor, unit: IncomingUnit) -> None:
    """Return when the queue holds a unit, once.

    Raises: MovedError, DrainingError, NotReadyError, ThrottledError, StoreError: ask again.
    """
    await until_ready(processor)
    if await is_there(processor, unit):
        return
    found = await _read(processor.services, unit.blocks, processor.scope, f"{processor.name}, unit {unit.number}")
    if await is_there(processor, unit):  # another request was faster
        return
    if found:
        await _append(processor, unit, found)
    else:
        await pass_over(processor, unit)


async def until_ready(processor: TopicProcessor) -> None:
    """Wait until a partition is open. Raises: as `take_unit`."""
    services = processor.services
    lost = services.lost_logs.get((processor.topic.id, processor.partition))
    if lost is not None:
        raise LogLostError(lost)
    try:
        async with asyncio.timeout(READY_TIMEOUT_S):
            await processor.ready()
    except TimeoutError as error:
        raise NotReadyError(f"{processor.name} is still being opened") from error


async def is_there(processor: TopicProcessor, unit: IncomingUnit) -> bool:
    """Whether the queue holds a unit; a unit in the ring is awaited. Raises: as `take_unit`."""
    own = owned(processor)
    while own.named.last_unit(unit.shard) < unit.number <= processor.ring.last_unit(unit.shard):
        processor.changed.clear()
        await processor.changed.wait()
        own = owned(processor)
    if unit.number <= own.named.last_unit(unit.shard):
        return True
    if unit.number > max(own.named.last_unit(unit.shard), processor.ring.last_unit(unit.shard), unit.behind) + 1:
        raise NotReadyError(f"{processor.name} lacks the unit before {unit.number} of shard {unit.shard:016x}")
    return False


def owned(processor: TopicProcessor) -> Ownership:
    """Return the present epoch. Raises: MovedError, DrainingError."""
    if processor.draining:
        raise DrainingError(f"{processor.name} is being drained")
    if processor.own is None or processor.failure is not None:
        raise MovedError(f"{processor.name} is not open any more")
    return processor.own


async def _append(processor: TopicProcessor, unit: IncomingUnit, found: Sequence[tuple[BlockHeader, Buffer]]) -> None:
    """Add the blocks of a unit to one batch, and wait until its pointer is in the queue."""
    if processor.topic.sealed_ms:
        raise NotReadyError(f"{processor.name} is sealed: its delayed records wait until it is unsealed")
    pool, now_s = processor.services.pool, processor.services.runtime.clock.monotonic()
    slab = pool.lease(sum(header.length for header, _ in found))
    if slab is None:
        raise ThrottledError("the broker has no memory for held records now")
    waiter, streams = AwaitedAck(), list[RingStream]()
    try:
        runs, at = list[tuple[RingStream, BlockRun]](), 0
        for header, data in found:
            stream = processor.appender.open_stream(
                0, waiter, header.producer_id, AckLevel.ALL, header.first_sequence, limiters=None
            )
            assert isinstance(stream, RingStream), "`open_stream` made it"
            streams.append(stream)
            runs.append((stream, _run_at(slab, at, header, data)))
            at += header.length
        if not processor.ring.extend_unit(runs, UnitNumber(unit.shard, unit.number, unit.records), now_s):
            raise ThrottledError(f"the ring of {processor.name} is full")
        for header, _ in found:
            producer = owned(processor).producer(header.producer_id)
            producer.next = max(producer.next, header.next_sequence)
        processor.hurry()
        await waiter.acked
    finally:
        for stream in streams:
            processor.appender.close_stream(stream)
        pool.release(slab)


def _run_at(slab: Slab, at: int, header: BlockHeader, data: Buffer) -> BlockRun:
    end = at + header.length
    slab.view[at:end] = data
    return BlockRun([(slab, at, end)], header.first_sequence, header.next_sequence, header.length)


async def pass_over(processor: TopicProcessor, unit: IncomingUnit) -> None:
    """Note that a unit without a readable block was met, so that none waits behind it (H3)."""
    own = owned(processor)
    while processor.ring.last_unit(unit.shard):
        processor.changed.clear()
        await processor.changed.wait()
        if owned(processor) is not own:
            raise MovedError(f"{processor.name} lost its epoch")
    empty = NamedProducer(producer=unit.shard, epoch=0, last_sequence=unit.number, records=unit.records)
    own.learn([empty], processor.services.runtime.clock.wall_ms())
    await processor.republish_opened(waits=True)


async def _read(
    services: Services, blocks: Sequence[UnitBlock], scope: int, name: str
) -> list[tuple[BlockHeader, Buffer]]:
    """Return the sound blocks; report the others as lost. Raises: StoreError when that is unknown."""
    turn = asyncio.Semaphore(READS_AT_ONCE)

    async def one(run: Sequence[UnitBlock]) -> list[tuple[BlockHeader, Buffer]]:
        async with turn:
            return await _read_run(services, run, scope, name)

    found = await asyncio.gather(*(one(run) for run in _adjacent(blocks)))
    return [block for run in found for block in run]


async def _read_run(
    services: Services, run: Sequence[UnitBlock], scope: int, name: str
) -> list[tuple[BlockHeader, Buffer]]:
    """Read adjacent blocks of one object."""
    key, first, length = run[0].key, run[0].offset, sum(block.length for block in run)
    reads = ConfirmedReads.patient(services.events)

    async def once() -> bytes:
        return await services.store.get_range(key, first, length)

    def is_whole(data: bytes) -> bool:
        return all(not isinstance(each, MemqError) for each in _checked(run, data, scope))

    try:
        data = await reads.read([Way(f"object '{key}'", once)], is_whole)
    except (NotFoundError, CorruptDataError) as error:
        if isinstance(error, NotFoundError):
            await check_missing(services.store, key)
        found: list[tuple[BlockHeader, Buffer] | MemqError] = [error] * len(run)
    else:
        found = _checked(run, data, scope)
    for block, each in zip(run, found, strict=True):
        if isinstance(each, MemqError):
            services.counters.lost_held_blocks += 1
            text = f"{name}: block at {block.offset} of object '{key}' is lost: {each}"
            services.events.error("held-block-lost", text)
    return [each for each in found if not isinstance(each, MemqError)]


def _checked(run: Sequence[UnitBlock], data: bytes, scope: int) -> list[tuple[BlockHeader, Buffer] | MemqError]:
    """Return the wanted blocks, or their errors. A store may answer with sound bytes of another object."""
    view, found = memoryview(data), list[tuple[BlockHeader, Buffer] | MemqError]()
    for block in run:
        at = block.offset - run[0].offset
        piece = view[at : at + block.length]
        try:
            header = check_block(piece, scope)
            if block.id not in (None, HoldId(header.producer_id, header.first_sequence)):
                raise CorruptDataError(f"it has the block of producer {header.producer_id:016x}, which is another one")
            found.append((header, piece))
        except MemqError as error:
            found.append(error)
    return found


def _adjacent(blocks: Sequence[UnitBlock]) -> list[list[UnitBlock]]:
    """Return the blocks in runs that one request reads, in their order."""
    runs: list[list[UnitBlock]] = []
    for block in blocks:
        last = runs[-1][-1] if runs else None
        if last is not None and (last.key, last.offset + last.length) == (block.key, block.offset):
            runs[-1].append(block)
        else:
            runs.append([block])
    return runs
