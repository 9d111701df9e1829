"""Accepts runs of blocks for a partition: applies limits, dedup, spool and ring, in that order."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Protocol

from memq.broker.ingest.quotas import Limiters, refusal_of, room_of
from memq.broker.partition.append import (
    ACCEPTED,
    REPEATED,
    AckSink,
    BlockRun,
    Outcome,
    ProducerState,
    Redirected,
    Refused,
    Stream,
    Throttled,
    turned_away,
)
from memq.broker.partition.known_blocks import EpochHolder, KnownBlocks
from memq.broker.partition.ownership import Ownership
from memq.broker.partition.ring import RingStream, SlotState
from memq.broker.partition.staged_batch import StagedBatch
from memq.broker.spool.writer import Spool
from memq.errors import MemqError, MovedError, ThrottledError, TopicSealedError
from memq.format.blocks.header import parse_header
from memq.format.pointer import ProducerEnd
from memq.protocol.frames import AckLevel
from memq.topic import Topic, namespace_of

FULL_RETRY_MS = 100
WAITS_HINT = "repair what the broker waits for: it tries again without end"


def sealed_error(topic: Topic) -> TopicSealedError:
    """Return the answer to new records of a sealed topic."""
    return TopicSealedError(f"topic '{topic.name}' is sealed, and takes no more records")


class RingHolder(EpochHolder, Protocol):
    """The owner of a partition, as its appender sees it."""

    topic: Topic
    scope: int
    delivery_timeout_ms: int
    draining: bool
    failure: MemqError | None
    moved_to: str  # address of its next owner, "" while unknown
    known: KnownBlocks
    changed: asyncio.Event  # a batch was published, or the epoch given up; a waiter clears it first

    def owned(self) -> Ownership:
        """Return the state of the present epoch."""
        ...

    def pump(self) -> None:
        """Execute the instructions of the ring now."""
        ...

    def pump_soon(self) -> None:
        """Execute the instructions of the ring in the next step of the event loop."""
        ...

    async def end_producer(self, end: ProducerEnd) -> None:
        """Record in the queue where a producer ended. Raises: the failure of the partition."""
        ...


class Appender:
    """Implements `memq.broker.partition.append.Partition` for one partition, over all its epochs."""

    def __init__(self, processor: RingHolder) -> None:
        self._processor = processor
        self._streams: dict[Stream, None] = {}
        self._topic_limiters: Limiters = ()
        self._namespace = namespace_of(processor.topic.name)
        self.spool: Spool | None = None  # stores blocks on disk before ack=1; None: they stay in memory
        self.follow(processor.topic)

    def follow(self, topic: Topic) -> None:
        """Apply changed settings of the topic."""
        services = self._processor.services
        self._topic_limiters = services.limits.of_topic(topic.id)
        self.spool = services.spool if topic.settings.ack1 == "disk" else None

    # ---- the interface for front doors: memq.broker.partition.append.Partition ---------------------

    @property
    def name(self) -> str:
        """Name of the partition in logs and errors."""
        return self._processor.name

    @property
    def topic(self) -> Topic:
        """Topic of the partition, with its current settings."""
        return self._processor.topic

    @property
    def partition(self) -> int:
        """Number of the partition in its topic."""
        return self._processor.partition

    @property
    def scope(self) -> int:
        """Number in the header of each block for this partition."""
        return self._processor.scope

    @property
    def delivery_timeout_ms(self) -> int:
        """Greatest age of a block."""
        return self._processor.delivery_timeout_ms

    def room(self, stream: Stream, now_s: float) -> tuple[int, int]:
        """Return how many blocks and bytes are taken of a stream now."""
        processor = self._processor
        if processor.draining or (self.spool is not None and self._spool_refusal(stream) is not None):
            return 0, 0
        room = processor.ring.room()
        if room[0] and (limiters := self._limiters_of(stream)):
            requests, size = room_of(limiters, now_s)
            return min(room[0], requests), min(room[1], size)
        return room

    def append(self, stream: Stream, run: BlockRun, now_s: float) -> Outcome:
        """Take a run, all or nothing."""
        assert isinstance(stream, RingStream), "`open_stream` made it"
        if self.spool is not None:
            refusal = self._spool_refusal(stream)
            if refusal is not None:
                return turned_away(refusal)
        producer = stream.producer
        if run.first < producer.next:
            try:
                if self._is_repeated(stream, run):
                    return REPEATED
            except MemqError as error:
                return turned_away(error)
        processor = self._processor
        if (closed := self._closed(stream, now_s)) is not None:
            return closed
        limiters = self._limiters_of(stream)
        if limiters:
            over = refusal_of(limiters, now_s)
            if over is not None:
                return Refused(over.error) if over.hard else Throttled(over.error)
        if not processor.ring.extend(stream, run, now_s):
            why = processor.services.waits.describe()
            text = f"the ring of the partition is full: {why}" if why else "the ring of the partition is full"
            return Throttled(ThrottledError(text, hint=WAITS_HINT if why else "", retry_after_ms=FULL_RETRY_MS))
        stream.expected = run.next
        producer.next = max(producer.next, run.next)
        if self.spool is not None and stream.acks == AckLevel.ONE:
            self.spool.take(stream, run, processor.topic.id_bytes, processor.owned(), stream.run_slot)
        for limiter in limiters:
            limiter.take(len(run.extents), run.bytes, run.next - run.first)
        return ACCEPTED

    def appended(self, stream: Stream) -> None:
        """Ack the appended blocks of a stream at level ONE, and schedule the work of the ring."""
        own = self._processor.own
        if stream.acks == AckLevel.ONE and own is not None and self.spool is None:
            stream.sink.send_ack(stream, AckLevel.ONE, stream.expected, own.epoch)
        self._processor.pump_soon()

    def open_stream(
        self,
        number: int,
        sink: AckSink,
        producer_id: int,
        acks: int,
        sequence: int,
        producer_epoch: int = 0,
        limiters: Limiters | None = (),
        *,
        positions: bool = False,
    ) -> Stream:
        """Open a stream. Call it after `ready`, and for a named producer after `admit_producer`."""
        producer = self._processor.owned().producer(producer_id)
        producer.streams += 1
        stream = RingStream(number, sink, self, producer, acks, sequence, producer_epoch, limiters, positions=positions)
        self._streams[stream] = None
        return stream

    def close_stream(self, stream: Stream) -> None:
        """Forget a stream whose front door is gone, or that is opened again; its blocks stay."""
        stream.open = False
        if self._streams.pop(stream, stream) is None:
            stream.producer.streams -= 1

    async def end_producer(self, end: ProducerEnd) -> None:
        """Record in the queue where a producer ended. Raises: the failure of the partition."""
        await self._processor.end_producer(end)

    def redirect_streams(self, of: ProducerState | None = None) -> None:
        """Close all streams, or those of one producer: their producers open again, here or elsewhere."""
        for stream in [stream for stream in self._streams if of is None or stream.producer is of]:
            if of is None:
                del self._streams[stream]
            if stream.open:
                stream.open = False
                stream.sink.send_redirect(stream, self._processor.moved_to)

    # ---- staged batches ----------------------------------------------------------------------------

    async def idle_of_staged(self) -> None:
        """Wait until no staged batch is in flight, also for gone clients. Raises: the partition's failure."""
        processor = self._processor
        while any(slot.staged is not None for slot in processor.ring):
            if processor.failure is not None:
                raise processor.failure
            await self._change()

    async def append_staged(self, own: Ownership, batch: StagedBatch) -> None:
        """Append a stored batch in the epoch of `own`, as soon as the ring has room.

        The batch's `settle` gets the outcome. Raises: MovedError when the epoch is over.
        """
        processor = self._processor
        clock = processor.services.runtime.clock
        while True:
            if processor.own is not own or processor.failure is not None or processor.draining:
                raise MovedError(f"{processor.name} is not open any more")
            if processor.topic.sealed_ms:
                raise sealed_error(processor.topic)
            if processor.ring.add_staged(batch, clock.monotonic(), clock.wall_ms()):
                processor.pump()
                return
            await self._change()

    async def _change(self) -> None:
        self._processor.changed.clear()
        await self._processor.changed.wait()

    # ---- inside ------------------------------------------------------------------------------------

    def _closed(self, stream: Stream, now_s: float) -> Outcome | None:
        """Return the outcome for a new block of a partition that takes none; None if it does.

        A sealed topic takes what another broker forwards, since that has acked it. It refuses a block of a producer
        only when no earlier owner can have published it.
        """
        processor = self._processor
        if processor.draining:
            return Redirected(processor.moved_to)
        if not processor.topic.sealed_ms or stream.limiters is None:
            return None
        if processor.services.queue.refuses_by_age and not processor.owned().is_alone(now_s):
            text = f"{processor.name} is sealed, and an earlier owner may have published the block"
            return Throttled(ThrottledError(text, retry_after_ms=FULL_RETRY_MS))
        return Refused(sealed_error(processor.topic))

    def _limiters_of(self, stream: Stream) -> Limiters:
        if stream.limiters is None:
            return ()
        return self._topic_limiters + stream.limiters + self._processor.services.quotas.of_namespace(self._namespace)

    def _spool_refusal(self, stream: Stream) -> MemqError | None:
        return self.spool.refusal if self.spool is not None and stream.acks == AckLevel.ONE else None

    def _is_repeated(self, stream: RingStream, run: BlockRun) -> bool:
        """Check a block below its producer's `next`; True if the ring or the queue holds it: then ack it.

        The owner acks a copy only when the first block is in the queue, and never before the earlier blocks of its
        stream. Raises: IdentityConflictError for a block with other content; ThrottledError while the queue is
        searched.
        """
        assert len(run.extents) == 1, "a block that may be repeated comes alone"
        processor = self._processor
        slab, start, _ = run.extents[0]
        known, holder = processor.known.holds(stream.producer, parse_header(slab.view, start))
        if not known:
            return False
        processor.services.counters.duplicate_blocks += 1
        stream.expected = run.next
        if stream.acks == AckLevel.ALL:
            last, waits_for = stream.run_slot, holder
            if last is not None and last.state not in (SlotState.PUBLISHED, SlotState.FREE):
                waits_for = last if waits_for is None or waits_for.number < last.number else waits_for
            claim = (stream.producer_id, run.first, run.next)
            positions_of = partial((processor.known if holder is None else holder).positions_of, *claim)
            if waits_for is None:
                positions = positions_of() if stream.positions else ()
                stream.sink.send_ack(stream, AckLevel.ALL, run.next, processor.owned().epoch, positions)
            else:
                stream.run_slot = waits_for  # acks of later copies wait, too: they cover this block
                waits_for.later_acks.append((stream, run.next, positions_of))
        elif stream.acks == AckLevel.ONE:
            if holder is not None:
                holder.promised.append((stream.producer_id, run.first, run.next))
            if self.spool is not None:
                self.spool.take(stream, run, processor.topic.id_bytes, processor.owned(), holder)
        return True
