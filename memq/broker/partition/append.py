"""The interface of a partition: connections append runs of blocks, and get an outcome for each.

A front door is whatever brings blocks: the WRITE frames of a connection, a block that another broker forwards. It
opens a `Stream` for each producer, asks for the room, appends, and then learns by the sink of the stream how far its
blocks are acked. Ring, spool, limits and dedup are behind this interface (`memq.broker.partition.appender`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from memq.broker.ingest.quotas import Limiters
from memq.broker.ingest.slabs import Extent
from memq.errors import MemqError, MovedError, ThrottledError
from memq.format.pointer import ProducerEnd
from memq.format.ranges import RangeSet
from memq.protocol.frames import AckPlace
from memq.topic import Topic


class BlockRun(NamedTuple):
    """Checked blocks of one stream in one slab, without a gap: sequences `first` up to `next`.

    A block of sequences below the known end of its producer may be a repeated one: it comes alone.
    """

    extents: list[Extent]
    first: int
    next: int
    bytes: int  # of the blocks


@dataclass(frozen=True, slots=True)
class Accepted:
    """The blocks are held here, or known already: then not `new`. The sink of their stream gets their ack."""

    new: bool


@dataclass(frozen=True, slots=True)
class Throttled:
    """The blocks are not taken now: the producer sends them again later, and `error` says why."""

    error: MemqError


@dataclass(frozen=True, slots=True)
class Redirected:
    """The blocks belong to another owner, at `address` when that is known."""

    address: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The blocks are not taken at all, for the reason in `error`."""

    error: MemqError


ACCEPTED, REPEATED = Accepted(new=True), Accepted(new=False)
TurnedAway = Throttled | Redirected | Refused
Outcome = Accepted | TurnedAway


def turned_away(error: MemqError) -> Throttled | Refused:
    """Return the outcome of blocks that met an error."""
    return Throttled(error) if isinstance(error, ThrottledError) else Refused(error)


class Partition(Protocol):
    """One write partition at its owner, as a front door sees it."""

    @property
    def name(self) -> str:
        """Its name in logs and errors."""
        ...

    @property
    def topic(self) -> Topic:
        """Its topic, with the present settings."""
        ...

    @property
    def partition(self) -> int:
        """Its number in the topic."""
        ...

    @property
    def scope(self) -> int:
        """The number in the header of each block that belongs here."""
        ...

    @property
    def delivery_timeout_ms(self) -> int:
        """The greatest age of a block; the caller refuses older ones."""
        ...

    def room(self, stream: Stream, now_s: float) -> tuple[int, int]:
        """Return how many blocks and bytes are taken now; with 0 blocks `append` has the reason."""
        ...

    def append(self, stream: Stream, run: BlockRun, now_s: float) -> Outcome:
        """Take a run that begins where the stream is, all or nothing; its slab is kept meanwhile."""
        ...

    def appended(self, stream: Stream) -> None:
        """Start the work on what a stream has appended; called once after many runs."""
        ...

    def close_stream(self, stream: Stream) -> None:
        """Forget a stream whose front door is gone, or that is opened again; what it sent stays."""
        ...

    async def end_producer(self, end: ProducerEnd) -> None:
        """Record in the queue where a producer ended. Raises: the failure of the partition."""
        ...


class AckSink(Protocol):
    """Gets the fate of the blocks of a stream after `append`: the connection, as a partition sees it."""

    def send_ack(
        self, stream: Stream, level: int, next_sequence: int, epoch: int, places: Sequence[AckPlace] = ()
    ) -> None:
        """Ack everything of the stream below `next_sequence`; of some of its records the place is known."""
        ...

    def send_throttle(self, stream: Stream, first: int, error: MemqError) -> None:
        """Close the stream: from block `first` on nothing is acked, and it may be stored or not."""
        ...

    def send_redirect(self, stream: Stream, address: str) -> None:
        """Close the stream: the partition moved to `address`, or its owner opens again when that is empty."""
        ...


class AwaitedAck:
    """The sink of a stream of one run: `acked` ends with its places, or the error that prevents its ack."""

    def __init__(self) -> None:
        self.acked: asyncio.Future[Sequence[AckPlace]] = asyncio.get_running_loop().create_future()

    def send_ack(
        self, stream: Stream, level: int, next_sequence: int, epoch: int, places: Sequence[AckPlace] = ()
    ) -> None:
        """See `AckSink`."""
        if not self.acked.done():
            self.acked.set_result(places)

    def send_throttle(self, stream: Stream, first: int, error: MemqError) -> None:
        """See `AckSink`."""
        if not self.acked.done():
            self.acked.set_exception(error)

    def send_redirect(self, stream: Stream, address: str) -> None:
        """See `AckSink`."""
        text = "the partition was moved, or lost its epoch, with the block in its ring"
        self.send_throttle(stream, stream.expected, MovedError(text))


class ProducerState:
    """One producer in one partition: which of its sequences the queue holds, and how far it came.

    `next` is above every sequence that the queue or the ring has seen: a block that starts there or
    later is new, and no search is needed. `seen_ms` is the queue time of its last pointer. `epoch` is that of the
    newest instance of a named producer, 0 of one without a name.
    """

    __slots__ = ("epoch", "id", "next", "queued", "seen_ms", "streams")

    def __init__(self, producer_id: int) -> None:
        self.id = producer_id
        self.epoch = 0
        self.queued = RangeSet()
        self.next = 0
        self.seen_ms = 0
        self.streams = 0


class Stream:
    """One stream of blocks: dense sequences of one producer for one partition through one front door.

    `limiters` are those of its client; None: its blocks were counted before, and no limit holds for them.
    `positions` says whether its acks name the places of its records.
    """

    __slots__ = (
        "acks",
        "expected",
        "home",
        "limiters",
        "number",
        "open",
        "positions",
        "producer",
        "producer_epoch",
        "producer_id",
        "sink",
    )

    def __init__(
        self,
        number: int,
        sink: AckSink,
        home: Partition,
        producer: ProducerState,
        acks: int,
        sequence: int,
        producer_epoch: int = 0,
        limiters: Limiters | None = (),
        *,
        positions: bool = False,
    ) -> None:
        self.number = number
        self.sink = sink
        self.home = home
        self.producer = producer
        self.producer_id = producer.id
        self.producer_epoch = producer_epoch
        self.acks = acks
        self.limiters = limiters
        self.expected = sequence
        self.open = True
        self.positions = positions
