"""The broker's knowledge of one producer, and of one stream of its blocks. Pure data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from memq.errors import MemqError
from memq.format.ranges import RangeSet

if TYPE_CHECKING:
    from memq.broker.partition.ring import BatchSlot, SlotRun
    from memq.broker.partition.topic_processor import TopicProcessor


class AckSink(Protocol):
    """The connection of a stream, as a partition sees it."""

    def send_ack(self, stream: Stream, level: int, next_sequence: int, epoch: int) -> None:
        """Ack everything of the stream below `next_sequence`."""
        ...

    def send_throttle(self, stream: Stream, first: int, error: MemqError) -> None:
        """Close the stream: from block `first` on nothing is acked, and it may be stored or not."""
        ...

    def send_redirect(self, stream: Stream) -> None:
        """Close the stream: the partition moved, or its owner opens again."""
        ...


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
    """One stream of blocks: dense sequences of one producer for one partition over one connection."""

    __slots__ = (
        "acks",
        "expected",
        "number",
        "open",
        "processor",
        "producer",
        "producer_epoch",
        "producer_id",
        "run",
        "run_slot",
        "sink",
    )

    def __init__(
        self,
        number: int,
        sink: AckSink,
        processor: TopicProcessor,
        producer: ProducerState,
        acks: int,
        sequence: int,
        producer_epoch: int = 0,
    ) -> None:
        self.number = number
        self.sink = sink
        self.processor = processor
        self.producer = producer
        self.producer_id = producer.id
        self.producer_epoch = producer_epoch
        self.acks = acks
        self.expected = sequence
        self.open = True
        self.run: SlotRun | None = None
        self.run_slot: BatchSlot | None = None
