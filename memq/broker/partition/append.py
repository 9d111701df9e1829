"""The interface of a partition: connections append runs of blocks, and get an outcome for each.

A front door receives blocks: the WRITE frames of a connection, or blocks that another broker forwards. A front door
opens a `Stream` for each producer, asks the partition for room, and appends. The sink of the stream gets the acks.
Ring, spool, limits and dedup are behind this interface (`memq.broker.partition.appender`).
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
from memq.protocol.frames import AckPosition
from memq.topic import Topic


class BlockRun(NamedTuple):
    """Checked blocks of one stream in one slab, without a gap: sequences `first` up to `next`.

    A block that starts below its producer's `next` may be repeated; it is a run of its own.
    """

    extents: list[Extent]
    first: int
    next: int
    bytes: int  # of the blocks


@dataclass(frozen=True, slots=True)
class Accepted:
    """The partition holds the blocks; known blocks are not `new`. The sink of the stream gets their ack."""

    new: bool


@dataclass(frozen=True, slots=True)
class Throttled:
    """The blocks are not taken now, for the reason in `error`: the producer sends them again later."""

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
        """Name of the partition in logs and errors."""
        ...

    @property
    def topic(self) -> Topic:
        """Topic of the partition, with its current settings."""
        ...

    @property
    def partition(self) -> int:
        """Number of the partition in its topic."""
        ...

    @property
    def scope(self) -> int:
        """Number in the header of each block for this partition."""
        ...

    @property
    def delivery_timeout_ms(self) -> int:
        """Greatest age of a block; the caller refuses older blocks."""
        ...

    def room(self, stream: Stream, now_s: float) -> tuple[int, int]:
        """Return how many blocks and bytes are taken now; for 0 blocks, `append` returns the reason."""
        ...

    def append(self, stream: Stream, run: BlockRun, now_s: float) -> Outcome:
        """Take a run from the stream's `expected` on, all or nothing; the caller holds its slab meanwhile."""
        ...

    def appended(self, stream: Stream) -> None:
        """Start the work on the appended blocks of a stream; called once after many runs."""
        ...

    def close_stream(self, stream: Stream) -> None:
        """Forget a stream whose front door is gone, or that is opened again; its blocks stay."""
        ...

    async def end_producer(self, end: ProducerEnd) -> None:
        """Record in the queue where a producer ended. Raises: the failure of the partition."""
        ...


class AckSink(Protocol):
    """Gets the outcome of the blocks of a stream after `append`; the connection, as a partition sees it."""

    def send_ack(
        self, stream: Stream, level: int, next_sequence: int, epoch: int, positions: Sequence[AckPosition] = ()
    ) -> None:
        """Ack the stream's blocks below `next_sequence`, with the known `positions` of their records."""
        ...

    def send_throttle(self, stream: Stream, first: int, error: MemqError) -> None:
        """Close the stream: blocks from sequence `first` on are not acked; they may be stored or not."""
        ...

    def send_redirect(self, stream: Stream, address: str) -> None:
        """Close the stream: the partition moved to `address`; "" if unknown, or if its owner opens it again."""
        ...


class AwaitedAck:
    """Sink of a stream of one run: `acked` gets the positions of its records, or the error without an ack."""

    def __init__(self) -> None:
        self.acked: asyncio.Future[Sequence[AckPosition]] = asyncio.get_running_loop().create_future()

    def send_ack(
        self, stream: Stream, level: int, next_sequence: int, epoch: int, positions: Sequence[AckPosition] = ()
    ) -> None:
        """See `AckSink`."""
        if not self.acked.done():
            self.acked.set_result(positions)

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

    `next` is above every sequence that the queue or the ring holds. A block that starts at `next` or later is new,
    without a search. `seen_ms` is the queue time of the producer's last pointer. `epoch` is the newest instance of a
    named producer, and 0 for a producer without a name. `proven`: a client showed the secret of its id. `holder` is
    the instance and the principal for whom it was opened; this owner forgets both with its epoch.
    """

    __slots__ = ("epoch", "holder", "id", "next", "proven", "queued", "seen_ms", "streams")

    def __init__(self, producer_id: int) -> None:
        self.id = producer_id
        self.epoch = 0
        self.queued = RangeSet()
        self.next = 0
        self.seen_ms = 0
        self.streams = 0
        self.proven = False
        self.holder = (0, "")


class Stream:
    """One stream of blocks: dense sequences of one producer for one partition through one front door.

    `target` is the partition. `limiters` are the limits of its client; None: its blocks were counted before, so no
    limit applies to them. With `positions`, its acks have the positions of its records. `proven`: its client showed
    the secret of the producer.
    """

    __slots__ = (
        "acks",
        "checked",
        "expected",
        "limiters",
        "number",
        "open",
        "positions",
        "producer",
        "producer_epoch",
        "producer_id",
        "proven",
        "sink",
        "target",
    )

    def __init__(
        self,
        number: int,
        sink: AckSink,
        target: Partition,
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
        self.target = target
        self.producer = producer
        self.producer_id = producer.id
        self.producer_epoch = producer_epoch
        self.acks = acks
        self.limiters = limiters
        self.expected = sequence
        self.open = True
        self.proven = False
        self.checked = False  # whether a block of it was opened
        self.positions = positions
