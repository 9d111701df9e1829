"""The promises of an owner (docs/ownership.md), checked on each pointer of a write partition. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from memq.format.ranges import RangeSet
from memq.notification import Publication
from memq.simulation.world.node import EPOCH_MS, FOREVER, SimNode
from tests.simulation.reader import FindingError, LogEntry, Source

Refusal = Literal["epoch", "age"]
ROUNDING_MS = 2
MISREAD_MIN = 2  # an owner takes an object for lost or damaged when two answers agree


@dataclass(slots=True)
class Epoch:
    """One epoch: the broker that opened it, when that landed, its next batch, and the blocks that its owner knows."""

    broker: str
    node: SimNode  # one life of the broker
    opened_ms: float
    offset_ms: float  # how far its wall clock was off when it was opened
    known: dict[Source, RangeSet]
    opened_at: int = 0  # the offset of its `opened`
    next_batch: int = 0
    closed: bool = False
    hidden: bool = False  # the queue has lost its `opened`: an earlier owner can't meet it


@dataclass(slots=True)
class OwnerRules:
    """One write partition. `refuse` is the queue's own rule, which it must keep too."""

    refuse: Refusal
    brokers: dict[int, Epoch] = field(default_factory=dict)
    highest: int = 0
    _offsets: dict[tuple[Source, int], int] = field(default_factory=dict)  # where a block lies first
    _spans: dict[tuple[Source, int], int] = field(default_factory=dict)  # where a block ends
    _checksums: dict[tuple[Source, int], int] = field(default_factory=dict)  # of the block that lies first
    _keys: dict[tuple[Source, int], set[str]] = field(default_factory=dict)  # the objects that have a block
    _landed: dict[Source, RangeSet] = field(default_factory=dict)

    def take(
        self, entry: LogEntry, publication: Publication, node: SimNode, read_to: int, handed_over_s: float
    ) -> None:
        """Check one pointer as it lands, handed over at a virtual time; its owner had read the queue below `read_to`.

        Raises: FindingError.
        """
        pointer = entry.pointer
        if (pointer.partition, pointer.epoch) != (publication.write_partition, publication.epoch):
            raise FindingError(f"published as {publication.write_partition} epoch {publication.epoch}")
        if self.refuse == "epoch" and pointer.epoch < self.highest:
            raise FindingError(f"the queue took epoch {pointer.epoch} after {self.highest}")
        if pointer.kind == "opened":
            offset_ms = publication.time_ms - EPOCH_MS - handed_over_s * 1000
            self._open(pointer.epoch, pointer.broker, node, offset_ms, entry.offset)
            return
        epoch = self.brokers.get(pointer.epoch)
        if epoch is None or epoch.broker != pointer.broker:
            raise FindingError(f"{pointer.kind} by {pointer.broker} in epoch {pointer.epoch}, which it has not opened")
        self._check_proof(pointer.epoch, publication.time_ms - epoch.offset_ms)
        epoch.closed = epoch.closed or pointer.kind == "closed"
        if pointer.kind == "data":
            self._check_batch(epoch, entry, read_to)

    def _open(self, number: int, broker: str, node: SimNode, offset_ms: float, offset: int) -> None:
        """Note an opening. Its owner reads all present entries of the queue before it takes blocks.

        The same process may publish `opened` again, so that retention does not take the last one. The queue time of
        `opened` shows the error of the wall clock at this moment; the clock may jump later.
        """
        now_s = node.world.now
        known = {source: RangeSet(ranges) for source, ranges in self._landed.items()}
        epoch = self.brokers.setdefault(number, Epoch(broker, node, EPOCH_MS + now_s * 1000, offset_ms, known, offset))
        if (epoch.broker, epoch.node) != (broker, node):
            raise FindingError(
                f"epoch {number} is opened by {epoch.broker} and again by {broker}, process {node.index}"
            )
        self.highest = max(self.highest, number)

    def forget(self, end: int) -> None:
        """Forget all blocks from offset `end` on: the queue has lost them, and the next owner can't know them."""
        for place, offset in list(self._offsets.items()):
            if offset >= end:
                del self._offsets[place]
        for epoch in self.brokers.values():
            epoch.hidden = epoch.hidden or epoch.opened_at >= end
        self._landed = {}
        for (source, first), following in self._spans.items():
            if (source, first) in self._offsets:
                self._landed.setdefault(source, RangeSet()).add(first, following)

    def may_lose(self, sent_s: float, acked_s: float) -> bool:
        """Whether a block that was sent and acked with 1 then may be lost: an owner was killed that may have held it.

        An owner that only loses its epoch forwards its blocks to the next owner. One that published `closed` holds no
        block. A broker that opened the partition after the ack got the block by FORWARD, and published it before it
        answered.
        """
        acked_ms = EPOCH_MS + acked_s * 1000
        return any(
            sent_s <= epoch.node.killed_s < FOREVER and epoch.opened_ms <= acked_ms and not epoch.closed
            for epoch in self.brokers.values()
        )

    def may_hold(self, acked_s: float) -> bool:
        """Whether an owner that lost its epoch without `closed` may hold a block that was acked with 1 then."""
        acked_ms = EPOCH_MS + acked_s * 1000
        return any(
            number < self.highest and epoch.opened_ms <= acked_ms and not epoch.closed
            for number, epoch in self.brokers.items()
        )

    def _check_proof(self, epoch: int, proof_ms: float) -> None:
        """A proof says: at this moment no higher epoch was in the queue. `proof_ms` is true time."""
        for number, other in self.brokers.items():
            if number > epoch and not other.hidden and proof_ms > other.opened_ms + ROUNDING_MS:
                raise FindingError(
                    f"epoch {epoch} is proved {proof_ms - other.opened_ms:.0f} ms after epoch {number} was opened"
                )

    def _check_batch(self, epoch: Epoch, entry: LogEntry, read_to: int) -> None:
        """Check the number of a batch and that it leaves out what its owner knew; a later copy is no finding."""
        number = entry.pointer.batch_sequence
        if number > epoch.next_batch:
            raise FindingError(
                f"batch {number} of epoch {entry.pointer.epoch} comes before {epoch.next_batch}: a hole, or no order"
            )
        repeated = number < epoch.next_batch
        epoch.next_batch = max(epoch.next_batch, number + 1)
        for block in entry.blocks:
            known, place = epoch.known.setdefault(block.source, RangeSet()), (block.source, block.first)
            # Other content under a known identity is no copy, and an object that can't be read proves none. An owner
            # publishes a block that it does not know to be a copy.
            other = self._checksums.setdefault(place, block.checksum) != block.checksum
            keys = self._keys.setdefault(place, set())
            other = other or any(epoch.node.misread[key] >= MISREAD_MIN for key in keys)
            keys.update(location.key for location in entry.pointer.locations)
            if not (repeated or other) and known.covers(block.first, block.following):
                raise FindingError(
                    f"block {block.first} to {block.following} of {block.source} is published again by "
                    f"{epoch.broker}, which knew it"
                )
            read_at = self._offsets.get(place, read_to)
            if not (repeated or other) and entry.pointer.epoch == self.highest and read_at < read_to:
                raise FindingError(
                    f"block {block.first} to {block.following} of {block.source}, which lies at {read_at}, is "
                    f"published again by {epoch.broker}, which had read it"
                )
            known.add(block.first, block.following)
            self._offsets.setdefault(place, entry.offset)
            self._spans[place] = block.following
            self._landed.setdefault(block.source, RangeSet()).add(block.first, block.following)
