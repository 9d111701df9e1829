"""The ring of batch slots of one topic partition: open, sealed, stored and published. Pure.

One slot is open and takes blocks. Sealed slots upload in parallel, but only the head may publish its pointer, and its
acks follow the publication. So a reader never sees batch 8 before batch 7, and a cumulative ack never covers a block
whose pointer is not in the queue. Slots hold extents, not bytes.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from memq.broker.ingest.slabs import Extent, Slab
from memq.broker.partition.append import BlockRun, Stream
from memq.broker.partition.staged_batch import StagedBatch
from memq.broker.spool.segments import Ticket
from memq.protocol.frames import AckLevel, AckPosition

GROUP_S_MAX = 0.002  # how long a batch that could be stored at once waits for blocks that are arriving
WORTH_SHARE = 8  # a batch of an eighth of its greatest size is worth an upload in parallel with others
FAST_BYTES_S = 20_000_000  # a batch that fills faster waits for more blocks
FAST_S_MAX = 0.125  # longest wait of such a batch
GAP_S_MAX = 0.016  # longest gap between blocks during that wait
GOAL_GROWS = 1.05  # growth of the size for which such a batch waits, with each batch that reaches it
_IDENTITY = struct.Struct("<QQ")  # producer id and first sequence in a block's header
_IDENTITY_AT = 32
LaterAck = tuple[Stream, int, Callable[[], list[AckPosition]]]  # stream, next sequence, positions of the copy


class SlotState(Enum):
    """State of a batch."""

    FREE = auto()
    OPEN = auto()
    SEALED = auto()
    STORING = auto()
    STORED = auto()
    PUBLISHED = auto()


# state -> the states that may follow; a ring that is given up frees its slots from any state.
SUCCESSORS: dict[SlotState, frozenset[SlotState]] = {
    SlotState.FREE: frozenset({SlotState.OPEN}),
    SlotState.OPEN: frozenset({SlotState.SEALED, SlotState.FREE}),
    SlotState.SEALED: frozenset({SlotState.STORING, SlotState.FREE}),
    SlotState.STORING: frozenset({SlotState.STORED, SlotState.SEALED, SlotState.FREE}),
    SlotState.STORED: frozenset({SlotState.PUBLISHED, SlotState.SEALED, SlotState.FREE}),
    SlotState.PUBLISHED: frozenset({SlotState.FREE}),
}


class RingStream(Stream):
    """A stream in the ring: `run` has its last blocks; the ack of batch `run_slot` covers them."""

    run: SlotRun | None = None
    run_slot: BatchSlot | None = None


class SlotRun:
    """Blocks of one stream in one batch, in order and without a gap: sequences `first` up to `next`.

    Blocks of other streams may split a run. Each piece has its first sequence and its record index in the batch.
    """

    __slots__ = ("first", "next", "pieces", "stream")

    def __init__(self, stream: Stream, first: int) -> None:
        self.stream = stream
        self.first = first
        self.next = first
        self.pieces: list[tuple[int, int]] = []

    def positions(self, pointer_offset: int) -> list[AckPosition]:
        """Return the positions of its records in the batch whose pointer is at `pointer_offset`."""
        ends = [first for first, _ in self.pieces[1:]] + [self.next]
        return [
            AckPosition(first, end, pointer_offset, index)
            for (first, index), end in zip(self.pieces, ends, strict=True)
        ]


class UnitNumber(NamedTuple):
    """A unit of held records: its shard, its number, and how many records the shard's units have up to it."""

    shard: int
    number: int
    records: int = 0


class BatchSlot:
    """One batch, from its first block to its published pointer."""

    __slots__ = (
        "bytes",
        "extents",
        "hurried",
        "last_run",
        "last_s",
        "late",
        "later_acks",
        "number",
        "opened_s",
        "pointer_offset",
        "promised",
        "put_s",
        "records",
        "runs",
        "sealed_ms",
        "slabs",
        "sought",
        "staged",
        "state",
        "tickets",
        "units",
    )

    def __init__(self, number: int, now_s: float) -> None:
        self.state = SlotState.OPEN
        self.number = number  # the batch sequence, dense within an epoch
        self.extents: list[Extent] = []
        self.slabs: list[Slab] = []
        self.sought = 0  # the extent after the last one that `block` has found
        self.runs: list[SlotRun] = []
        self.last_run: SlotRun | None = None  # the run with the last block
        self.pointer_offset: int | None = None  # of its pointer in the queue; None: unknown, or readers may take a copy
        self.later_acks: list[LaterAck] = []  # acks of copies that wait for this batch
        self.bytes = 0
        self.records = 0
        self.opened_s = now_s
        self.last_s = now_s  # when the last block came
        self.put_s = 0.0
        self.hurried = False  # sealed as soon as no other batch is in flight, even without `seal_when_idle`
        self.late = False  # the time of its own key is over
        self.sealed_ms = 0
        self.promised: list[tuple[int, int, int]] = []  # copies acked with ack=1: producer id, first, next
        self.tickets: list[Ticket] = []  # for its blocks in the spool
        self.staged: StagedBatch | None = None  # set if a writer has put the batch into the store
        self.units: list[UnitNumber] = []  # units of held records in it

    def become(self, state: SlotState) -> None:
        """Change to a state that the table allows."""
        assert state in SUCCESSORS[self.state], f"batch {self.number}: {self.state.name} to {state.name}"
        self.state = state

    def acks(self) -> dict[Stream, int]:
        """Return what the published batch acks at level ALL: the next sequence of each stream."""
        acks = {run.stream: run.next for run in self.runs if run.stream.acks == AckLevel.ALL}
        for stream, sequence, _ in self.later_acks:
            acks[stream] = max(sequence, acks.get(stream, sequence))
        return acks

    def positions(self) -> dict[Stream, list[AckPosition]]:
        """Return the known positions of acked records, for each stream that asked for positions."""
        found: dict[Stream, list[AckPosition]] = {}
        for run in self.runs:
            if run.stream.positions and self.pointer_offset is not None:
                found.setdefault(run.stream, []).extend(run.positions(self.pointer_offset))
        for stream, _, positions_of in self.later_acks:
            if stream.positions:
                found.setdefault(stream, []).extend(positions_of())
        return found

    def positions_of(self, producer_id: int, first: int, next_: int) -> list[AckPosition]:
        """Return the positions of some records of a producer; empty while they are unknown."""
        return [
            position
            for run in self.runs
            if run.stream.producer_id == producer_id and self.pointer_offset is not None
            for position in run.positions(self.pointer_offset)
            if position.first < next_ and first < position.next
        ]

    def release_tickets(self) -> None:
        """Release the spooled copies of its blocks, because the pointer is in the queue."""
        for ticket in self.tickets:
            ticket.release()

    def drop_blocks(self) -> list[Slab]:
        """Drop the blocks; return their slabs, each with one reference. A stream may still hold the slot."""
        slabs, self.slabs, self.extents = self.slabs, [], []
        return slabs

    def block(self, producer_id: int, first: int) -> memoryview | None:
        """Return the block of a producer that begins at a sequence, None without one.

        Repeated blocks arrive in the order of the batch. So each search begins after the last found block, and most
        searches succeed at once.
        """
        for number in (*range(self.sought, len(self.extents)), *range(self.sought)):
            slab, start, end = self.extents[number]
            if _IDENTITY.unpack_from(slab.view, start + _IDENTITY_AT) == (producer_id, first):
                self.sought = number + 1
                found: memoryview = slab.view[start:end]
                return found
        return None

    def views(self) -> list[memoryview]:
        """Return the bytes of the blocks, one view each, without a copy."""
        return [slab.view[start:end] for slab, start, end in self.extents]


@dataclass(frozen=True, slots=True)
class RingLimits:
    """How a ring seals and how much it holds; see `memq.topic.TopicSettings`."""

    slots: int
    batch_bytes_max: int
    batch_blocks_max: int
    batch_age_s_max: float
    seal_when_idle: bool
    uploads_in_flight_max: int


@dataclass(frozen=True, slots=True)
class RingPlan:
    """The shell's next steps: uploads, the batch to publish, and when to ask again (monotonic s)."""

    uploads: list[BatchSlot]
    publish: BatchSlot | None
    wake_s: float | None


class Ring:
    """The batches of one partition in one epoch, oldest first."""

    def __init__(self, limits: RingLimits) -> None:
        self.limits = limits
        self.open: BatchSlot | None = None
        self.batches: deque[BatchSlot] = deque()  # sealed and later, the head is the oldest
        self.publishing = False
        self.flushing = False
        self._next_number = 0
        self._goal_bytes = float(limits.batch_bytes_max)  # size for which a batch that fills fast waits
        self._vain_bytes = 0  # size of the last batch if it waited for more blocks in vain
        self._published_s = 0.0  # when a batch was published last

    def __len__(self) -> int:
        """How many slots are not free."""
        return len(self.batches) + (self.open is not None)

    @property
    def uploads(self) -> int:
        """How many batches are being uploaded."""
        return [slot.state for slot in self.batches].count(SlotState.STORING)

    def __iter__(self) -> Iterator[BatchSlot]:
        """Yield the slots that are not free, oldest first."""
        yield from self.batches
        if self.open is not None:
            yield self.open

    def room(self) -> tuple[int, int]:
        """Return how many blocks, and how many bytes, the open batch takes until it is sealed; 0 blocks: full."""
        slot = self.open
        if slot is None:
            if len(self.batches) >= self.limits.slots:
                return 0, 0
            return self.limits.batch_blocks_max, self.limits.batch_bytes_max
        return self.limits.batch_blocks_max - len(slot.extents), self.limits.batch_bytes_max - slot.bytes

    def extend(self, stream: RingStream, blocks: BlockRun, now_s: float, *, bounded: bool = True) -> bool:
        """Add checked blocks to the open batch; False when it has no room for all, and then nothing changed.

        The slot takes one reference on each slab that it points into. Without `bounded`, the batch may exceed its
        limits, and stays open.
        """
        slot, (extents, first, next_, size) = self.open, blocks
        if slot is None:
            if len(self.batches) >= self.limits.slots:
                return False
            self._learn(now_s)
            slot = self.open = BatchSlot(self._next_number, now_s)
            self._next_number += 1
        elif bounded and len(slot.extents) + len(extents) > self.limits.batch_blocks_max:
            return False
        slot.extents += extents
        slot.last_s = now_s
        slab = extents[0][0]
        if not slot.slabs or slot.slabs[-1] is not slab:
            slot.slabs.append(slab)
            slab.references += 1
        run = stream.run
        if run is None or stream.run_slot is not slot or run.next != first:  # after burned sequences or a copy
            run = stream.run = SlotRun(stream, first)
            stream.run_slot = slot
            slot.runs.append(run)
        if slot.last_run is not run:
            slot.last_run = run
            run.pieces.append((first, slot.records))
        run.next = next_
        slot.records += next_ - first
        slot.bytes += size
        if bounded and self._is_full(slot):
            self.seal()
        return True

    def extend_unit(self, runs: Sequence[tuple[RingStream, BlockRun]], unit: UnitNumber, now_s: float) -> bool:
        """Add all blocks of a unit of held records to one batch; False if the ring is full (H4).

        A unit is published whole, by the pointer that has its number. So an open batch with too little room is sealed.
        """
        blocks, size = self.room()
        if self.open is not None and (len(runs) > blocks or sum(run.bytes for _, run in runs) > size):
            self.seal()
        if self.open is None and len(self.batches) >= self.limits.slots:
            return False
        for stream, run in runs:
            self.extend(stream, run, now_s, bounded=False)
        slot = self.open
        assert slot is not None, "the unit has blocks, and the batch that takes them stays open"
        slot.units.append(unit)
        if self._is_full(slot):
            self.seal()
        return True

    def last_unit(self, shard: int) -> int:
        """Return the number of a shard's last unit in the ring; 0 for none."""
        return max((unit.number for slot in self for unit in slot.units if unit.shard == shard), default=0)

    def add_staged(self, staged: StagedBatch, now_s: float, now_ms: int) -> bool:
        """Add a batch that is already stored, after all other batches; False when the ring is full."""
        if len(self) >= self.limits.slots:
            return False
        if self.open is not None:
            self.seal()
        slot = BatchSlot(self._next_number, now_s)
        self._next_number += 1
        slot.state, slot.staged, slot.sealed_ms, slot.put_s = SlotState.STORED, staged, now_ms, now_s
        slot.bytes, slot.records = staged.location.length, staged.records
        self.batches.append(slot)
        return True

    def alter(self, limits: RingLimits) -> None:
        """Apply other limits from now on; seal an open batch that has reached them.

        If more slots are in use than the new limit, the ring takes no blocks until enough slots are free.
        """
        if limits.batch_bytes_max != self.limits.batch_bytes_max:
            self._goal_bytes = float(limits.batch_bytes_max)
        self.limits = limits
        if self.open is not None and self._is_full(self.open):
            self.seal()

    def _is_full(self, slot: BatchSlot) -> bool:
        return slot.bytes >= self.limits.batch_bytes_max or len(slot.extents) >= self.limits.batch_blocks_max

    def seal(self) -> None:
        """Close the open batch for further blocks."""
        slot = self.open
        assert slot is not None, "no batch is open"
        slot.become(SlotState.SEALED)
        self.batches.append(slot)
        self.open = None
        if slot.bytes >= self._goal_bytes:
            self._goal_bytes = min(self._goal_bytes * GOAL_GROWS, float(self.limits.batch_bytes_max))

    def hurry(self) -> None:
        """Let the open batch wait only for other batches in flight, not for its age or more blocks."""
        if self.open is not None:
            self.open.hurried = True

    def find(self, producer_id: int, first: int, next_: int) -> BatchSlot | None:
        """Return the slot that holds these sequences of a producer, the youngest one when several do."""
        for slot in reversed(tuple(self)):
            for run in slot.runs:
                if run.stream.producer_id == producer_id and run.first <= first and next_ <= run.next:
                    return slot
        return None

    def overlaps(self, producer_id: int, first: int, next_: int) -> bool:
        """Whether the ring holds some of these sequences of a producer."""
        return any(
            run.stream.producer_id == producer_id and run.first < next_ and first < run.next
            for slot in self
            for run in slot.runs
        )

    def plan(self, now_s: float, *, may_publish: bool = True, growing: bool = False) -> RingPlan:
        """Seal a batch that is due, and return the next steps; with `may_publish`, also the head to publish.

        With `growing`, blocks have just arrived, and the caller calls again in the next round of the event loop.
        """
        wake_s = self._seal_due(now_s, growing)
        busy = sum(1 for slot in self.batches if slot.state is SlotState.STORING)
        uploads = []
        for slot in self.batches:
            if busy >= self.limits.uploads_in_flight_max:
                break
            if slot.state is SlotState.SEALED:
                slot.become(SlotState.STORING)
                uploads.append(slot)
                busy += 1
        head = self.batches[0] if self.batches else None
        ready = may_publish and head is not None and head.state is SlotState.STORED and not self.publishing
        if ready:
            self.publishing = True
        return RingPlan(uploads, head if ready else None, wake_s)

    def _seal_due(self, now_s: float, growing: bool) -> float | None:
        """Seal by age, or because an upload slot is free; return when the open batch has to be checked again.

        An upload slot is free while fewer batches than `uploads_in_flight_max` are in flight, up to their publication.
        If the store or the queue fails, the open batch grows instead, so that the ring holds full batches.
        A batch of any size costs 1 to 3 ms of CPU for its object, pointer and acks. Small batches would keep
        themselves small, because this cost slows the producers down. Therefore a batch waits although a slot is free:
        - for arriving blocks, at most 2 ms;
        - for a batch in flight, until that is published or the open batch has an eighth of the full size. So a slow
          producer costs one PUT at a time, not several in parallel;
        - for its full size, if it fills fast and blocks keep coming. Its acks come up to 125 ms later, but it needs a
          fraction of the PUTs.
        """
        slot = self.open
        if slot is None:
            return None
        due_s = slot.opened_s + self.limits.batch_age_s_max
        idle = (self.limits.seal_when_idle or slot.hurried) and len(self.batches) < self.limits.uploads_in_flight_max
        idle = idle and not (growing and now_s - slot.opened_s < GROUP_S_MAX)
        idle = idle and (slot.bytes * WORTH_SHARE >= self.limits.batch_bytes_max or not self.batches)
        if idle and not self.flushing and not slot.hurried:
            fast_s = min(due_s, self._fast_until_s(slot))
            if now_s < fast_s:
                return fast_s
            self._vain_bytes = slot.bytes if self._in_vain(slot, now_s) else 0
        if self.flushing or idle or (now_s >= due_s and len(self.batches) < self.limits.slots - 1):
            self.seal()
            return None
        return due_s if now_s < due_s else None

    def _fast_until_s(self, slot: BatchSlot) -> float:
        """Return until when (monotonic s) a batch that fills fast waits for more blocks."""
        if slot.bytes >= self._goal_bytes:
            return slot.opened_s
        return min(slot.opened_s + min(slot.bytes / FAST_BYTES_S, FAST_S_MAX), slot.last_s + GAP_S_MAX)

    def _in_vain(self, slot: BatchSlot, now_s: float) -> bool:
        """Whether a batch filled fast, and then no more blocks came.

        A batch that is too small for an upload in parallel with others is no evidence.
        """
        came_fast = slot.bytes >= FAST_BYTES_S * (slot.last_s - slot.opened_s)
        worth = self.limits.batch_bytes_max / WORTH_SHARE <= slot.bytes < self._goal_bytes
        return came_fast and worth and now_s - slot.opened_s < FAST_S_MAX

    def _learn(self, now_s: float) -> None:
        """Lower the size to wait for when blocks come only after the ack of a batch that waited in vain.

        Its producers waited for that ack. With a quarter of what they sent, they fill one batch while others are in
        flight. `seal` raises the size again, slowly, as batches reach it.
        """
        if self._vain_bytes and not self.batches and now_s - self._published_s <= GAP_S_MAX:
            self._goal_bytes = max(self._vain_bytes / 4, self.limits.batch_bytes_max / WORTH_SHARE)
        self._vain_bytes = 0

    def stored(self, slot: BatchSlot, started_s: float) -> None:
        """Note that a batch is stored, under a key whose first put began at `started_s` (monotonic s)."""
        slot.become(SlotState.STORED)
        slot.put_s = started_s

    def store_again(self, slot: BatchSlot) -> None:
        """Upload a stored batch again under another key, because the time of its key is over."""
        slot.become(SlotState.SEALED)
        slot.late = True
        self.publishing = False

    def published(self, now_s: float) -> BatchSlot:
        """Remove and return the head, whose pointer is in the queue."""
        slot, self._published_s = self.batches.popleft(), now_s
        slot.become(SlotState.PUBLISHED)
        self.publishing = False
        return slot

    def give_up(self) -> list[BatchSlot]:
        """Empty the ring, from the head on, at the end of an epoch; return its batches."""
        slots = list(self)
        for slot in slots:
            slot.become(SlotState.FREE)
        self.batches.clear()
        self.open = None
        self.publishing = False
        return slots
