"""Takes one forwarded block of a lost epoch at its new owner, until its pointer is in the queue."""

from __future__ import annotations

import asyncio

from memq.broker.ingest.slabs import Slab
from memq.broker.ingest.streams import Stream
from memq.broker.partition.topic_processor import TopicProcessor
from memq.errors import MemqError, MovedError, NotReadyError, ThrottledError, TooOldError
from memq.format.blocks.header import check_block
from memq.protocol.frames import AckLevel

READY_TIMEOUT_S = 10.0
FULL_RETRY_MS = 100


class _Waiter:
    """The sink of one block's stream: who hands it over waits here."""

    def __init__(self) -> None:
        self.acked: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def send_ack(self, stream: Stream, level: int, next_sequence: int, epoch: int) -> None:
        """See `memq.broker.ingest.streams.AckSink`."""
        if not self.acked.done():
            self.acked.set_result(None)

    def send_throttle(self, stream: Stream, first: int, error: MemqError) -> None:
        """See `memq.broker.ingest.streams.AckSink`."""
        if not self.acked.done():
            self.acked.set_exception(error)

    def send_redirect(self, stream: Stream) -> None:
        """See `memq.broker.ingest.streams.AckSink`."""
        if not self.acked.done():
            self.acked.set_exception(
                MovedError("the partition was moved, or lost its epoch, with the block in its ring")
            )


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
    waiter = _Waiter()
    stream = processor.open_stream(0, waiter, header.producer_id, AckLevel.ALL, first)
    try:
        if not (first < stream.producer.next and processor.duplicate(stream, header)):
            if not processor.ring.append(stream, first, header.count, slab, start, end, now_s):
                raise ThrottledError("the ring of the partition is full", retry_after_ms=FULL_RETRY_MS)
            stream.producer.next = max(stream.producer.next, next_)
        processor.hurry()  # who waits gives up before a batch may come of age
        await waiter.acked
    finally:
        processor.close_stream(stream)
