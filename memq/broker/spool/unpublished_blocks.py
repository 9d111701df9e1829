"""Blocks of a lost epoch that were acked with ack=1, held until the queue has them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from memq.broker.ingest.slabs import Slab
from memq.broker.partition.ownership import Ownership, known_ms
from memq.broker.partition.ring import BatchSlot
from memq.broker.spool.segments import Ticket
from memq.format.blocks.header import BlockHeader, parse_header
from memq.format.pointer import Pointer, pointer_mark
from memq.format.ranges import RangeSet
from memq.protocol.frames import AckLevel
from memq.topic import Topic


class UnpublishedBlock:
    """One block: its producer, its sequences and its bytes. It has a reference on its slab."""

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
        """Bytes of the block, without a copy."""
        return self.slab.view[self.start : self.end]


class UnpublishedBlocks:
    """The blocks acked with ack=1 that one epoch of a partition leaves.

    `release` gets the slab of each block that is no longer needed. The state of the lost epoch is kept: the sequences
    of these producers that the queue holds below `read_to`. From `settled_s` (monotonic) on, no publish of that epoch
    can land. `tickets` keep the blocks on disk, too.
    """

    def __init__(
        self, topic: Topic, partition: int, read_to: int, settled_s: float, release: Callable[[Slab], None]
    ) -> None:
        self.topic = topic
        self.partition = partition
        self.read_to = read_to
        self.last_mark = 0  # of the entry before `read_to`; 0: unknown
        self.log_was_cut = False  # the log has other entries below `read_to` than the lost epoch has read
        # Copies of the blocks lie at `known_from` or later, or the lost epoch knew them. It knew the dedup window
        # before queue time `known_ms` (see `known_ms`); None: before now, for blocks of the spool.
        self.known_from = read_to
        self.known_ms: int | None = None
        self.settled_s = settled_s
        self.epoch = 0  # the lost one; 0: the blocks come from the spool
        self.blocks: dict[UnpublishedBlock, None] = {}
        self.tickets: list[Ticket] = []
        self.given_up = 0
        self._queued: dict[int, RangeSet] = {}
        self._release = release

    @classmethod
    def of_epoch(
        cls, topic: Topic, partition: int, own: Ownership, slots: Sequence[BatchSlot], release: Callable[[Slab], None]
    ) -> UnpublishedBlocks:
        """Return the blocks acked with ack=1 from the ring of a lost epoch."""
        held = cls(topic, partition, own.read_to, own.handed_over_s + own.stale_publish_s, release)
        held.epoch, held.known_ms = own.epoch, known_ms(own, slots)
        held.log_was_cut, held.last_mark = own.log_was_cut, own.last_mark
        for slot in slots:
            held._keep(slot, own)
        return held

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def name(self) -> str:
        """Name of the partition in logs and errors."""
        return f"topic '{self.topic.name}' partition {self.partition}"

    def add(self, block: UnpublishedBlock, queued: RangeSet | None = None) -> None:
        """Hold one more block; `queued` are the known sequences of its producer."""
        self.blocks[block] = None
        if block.producer_id not in self._queued:
            self._queued[block.producer_id] = RangeSet() if queued is None else queued

    def _keep(self, slot: BatchSlot, own: Ownership) -> None:
        """Keep the blocks of a batch that were acked with ack=1.

        The producers with ack=all send their blocks again.
        """
        self.tickets += slot.tickets
        acked: dict[int, RangeSet] = {}
        for run in slot.runs:
            if run.stream.acks == AckLevel.ONE:
                acked.setdefault(run.stream.producer_id, RangeSet()).add(run.first, run.next)
        for producer_id, first, next_ in slot.promised:
            acked.setdefault(producer_id, RangeSet()).add(first, next_)
        for slab, start, end in slot.extents if acked else ():
            header = parse_header(slab.view, start)
            ranges = acked.get(header.producer_id)
            if ranges is not None and ranges.covers(header.first_sequence, header.next_sequence):
                self.add(UnpublishedBlock(header, slab, start, end), own.producer(header.producer_id).queued)

    def restart(self, offset: int) -> None:
        """Read the queue again, from `offset` on: its log was cut, so nothing that was read is known any more."""
        self.read_to = self.known_from = offset
        self.last_mark = 0
        self.log_was_cut = False
        self._queued = {producer_id: RangeSet() for producer_id in self._queued}

    def meet(self, offset: int, pointer: Pointer | None) -> None:
        """Take the next entry of the queue; None if it is unreadable."""
        if offset < self.read_to:
            return
        self.read_to = offset + 1
        self.last_mark = 0 if pointer is None else pointer_mark(pointer)
        if pointer is None or pointer.partition != self.partition or pointer.kind != "data":
            return
        for entry in pointer.producers:
            queued = self._queued.get(entry.producer)
            if queued is not None:
                for first, next_ in entry.ranges:
                    queued.add(first, next_)

    def queued(self) -> list[UnpublishedBlock]:
        """Return blocks of which the queue shows all sequences: copies, or other blocks with the same ones."""
        return [block for block in self.blocks if self._queued[block.producer_id].covers(block.first, block.next)]

    def release(self, block: UnpublishedBlock) -> None:
        """Hold a block no longer."""
        del self.blocks[block]
        self._release(block.slab)

    def release_tickets(self) -> None:
        """Release the spooled copies, because the queue holds all blocks."""
        for ticket in self.tickets:
            ticket.release()

    def describe(self, blocks: Iterable[UnpublishedBlock] | None = None) -> list[str]:
        """Name each block, or some of them, for the operator who gives up waiting."""
        return [
            f"{self.name}, of a lost epoch: producer {block.producer_id:016x} sequences {block.first} to"
            f" {block.next - 1}, acks=one"
            for block in (self.blocks if blocks is None else blocks)
        ]
