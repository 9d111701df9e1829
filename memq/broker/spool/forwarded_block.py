"""Takes one forwarded block of a lost epoch at its new owner, until its pointer is in the queue."""

from __future__ import annotations

import asyncio

from memq.broker.ingest.slabs import Slab
from memq.broker.partition.append import Accepted, AwaitedAck, BlockRun, Redirected
from memq.broker.partition.topic_processor import TopicProcessor
from memq.errors import DrainingError, NotReadyError, TooOldError
from memq.format.blocks.header import check_block
from memq.protocol.frames import AckLevel

READY_TIMEOUT_S = 10.0


async def take_forwarded(processor: TopicProcessor, slab: Slab, start: int, end: int, absent_s: float) -> None:
    """Bring the block at `start` to `end` of a slab into the queue once, even if other brokers do so.

    `absent_s` (monotonic): the queue did not hold it then. What is known of the queue must reach back to that moment,
    and it does for the delivery timeout. The caller holds the slab until this returns.
    Raises: TooOldError: read the queue and come again; NotReadyError, MovedError, DrainingError, ThrottledError;
    IdentityConflictError, CorruptDataError: it can't be taken at all.
    """
    try:
        async with asyncio.timeout(READY_TIMEOUT_S):
            await processor.ready()
    except TimeoutError as error:
        raise NotReadyError(f"{processor.name} is still being opened") from error
    header = check_block(slab.view[start:end], processor.scope)
    first, next_, now_s = header.first_sequence, header.next_sequence, processor.services.runtime.clock.monotonic()
    if (now_s - absent_s) * 1000 > processor.delivery_timeout_ms:
        raise TooOldError(f"block {first} was looked for over {processor.delivery_timeout_ms} ms ago")
    waiter = AwaitedAck()
    stream = processor.appender.open_stream(0, waiter, header.producer_id, AckLevel.ALL, first, limiters=None)
    try:
        outcome = processor.appender.append(stream, BlockRun([(slab, start, end)], first, next_, end - start), now_s)
        if isinstance(outcome, Redirected):
            raise DrainingError(f"{processor.name} is being drained")
        if not isinstance(outcome, Accepted):
            raise outcome.error
        processor.hurry()  # who waits gives up before a batch may come of age
        await waiter.acked
    finally:
        processor.appender.close_stream(stream)
