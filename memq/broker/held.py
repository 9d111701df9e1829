"""The blocks of a lost epoch that were acked with 1: held until the queue has them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from memq.broker.ownership import Ownership
from memq.broker.ring import Slot
from memq.broker.slabs import Slab
from memq.format.block import BlockHeader, parse_header
from memq.format.pointer import Pointer
from memq.format.ranges import RangeSet
from memq.protocol.frames import AckLevel
from memq.topic import Topic


class HeldBlock:
    """One block: whose, which sequences, and where its bytes lie. It has a reference on its slab."""

    __slots__ = ("end", "first", "next", "producer_id", "slab", "start")

    def __init__(self, header: BlockHeader, slab: Slab, start: int, end: int) -> None:
        self.slab = slab
        self.start = start
        self.end = end
        self.producer_id = header.producer_id
        self.first = header.first_sequence
        self.next = header.next_sequence
        slab.references += 1

    @property
    def view(self) -> memoryview:
        """Its bytes, without a copy."""
        return self.slab.view[self.start : self.end]


class HeldBlocks:
    """What one epoch of one partition leaves. `release` gets the slab of each block that is let go.

    The knowledge of the lost epoch goes on: what the queue holds of these producers, below `read_to`. `settled_s`
    (monotonic): from then on no publish of that epoch can land any more.
    """

    def __init__(self, topic: Topic, partition: int, own: Ownership, release: Callable[[Slab], None]) -> None:
        self.topic = topic
        self.partition = partition
        self.read_to = own.read_to
        self.settled_s = own.handed_over_s + own.stale_publish_s
        self.blocks: dict[HeldBlock, None] = {}
        self._own = own
        self._queued: dict[int, RangeSet] = {}
        self._release = release

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def name(self) -> str:
        """Its partition, for people."""
        return f"topic '{self.topic.name}' partition {self.partition}"

    def keep(self, slot: Slot) -> None:
        """Keep the blocks of a batch that were acked with 1; those of acks=all are sent again by their producers."""
        acked: dict[int, RangeSet] = {}
        for run in slot.runs:
            if run.stream.acks == AckLevel.ONE:
                acked.setdefault(run.stream.producer_id, RangeSet()).add(run.first, run.next)
        for slab, start, end in slot.extents if acked else ():
            header = parse_header(slab.view, start)
            ranges = acked.get(header.producer_id)
            if ranges is not None and ranges.covers(header.first_sequence, header.next_sequence):
                self.blocks[HeldBlock(header, slab, start, end)] = None
                self._queued.setdefault(header.producer_id, self._own.producer(header.producer_id).queued)

    def meet(self, offset: int, pointer: Pointer | None) -> None:
        """Take the next entry of the queue; None when nobody can read it."""
        if offset < self.read_to:
            return
        self.read_to = offset + 1
        if pointer is None or pointer.partition != self.partition or pointer.kind != "data":
            return
        for entry in pointer.producers:
            queued = self._queued.get(entry.producer)
            if queued is not None:
                for first, next_ in entry.ranges:
                    queued.add(first, next_)

    def let_go_of_queued(self) -> None:
        """Let go of what the queue holds."""
        for block in list(self.blocks):
            if self._queued[block.producer_id].covers(block.first, block.next):
                self.let_go(block)

    def let_go(self, block: HeldBlock) -> None:
        """Hold a block no longer."""
        del self.blocks[block]
        self._release(block.slab)

    def describe(self, blocks: Iterable[HeldBlock] | None = None) -> list[str]:
        """Name each block, or some of them, for the operator who gives up waiting."""
        return [
            f"{self.name}, of a lost epoch: producer {block.producer_id:016x} sequences {block.first} to"
            f" {block.next - 1}, acks=one"
            for block in (self.blocks if blocks is None else blocks)
        ]
