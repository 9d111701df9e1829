"""The cursor of one read partition: which entries to poll, fetch and deliver next, in order. Pure.

Pointers come in by `take_entries`, stored batches by `fetched`, and `deliver` gives out the next records. The
position moves only in `deliver`. Dedup happens there too, since only there the order is that of the queue.

=============  =================================================  ====================================
state          meaning                                            leads to
=============  =================================================  ====================================
LOOKING_BACK   pointers of the dedup window before the start      READING, by `begin`
READING        polls, fetches and delivers                        ENDED, when the end is delivered
ENDED          all up to the end was delivered; nothing is left   -
=============  =================================================  ====================================
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from memq.client.consumer.batch import Slice
from memq.client.consumer.fetch.cursor_outcomes import Conflict, Counts, ReadyRange, Seen
from memq.client.consumer.fetch.pointer_slot import PartChoice, PointerSlot, left_out_part, part_between, slot_of
from memq.client.consumer.progress import Gap, LogContinuity, ReadProgress, expired_error
from memq.client.consumer.record_filter import RecordFilter
from memq.errors import CorruptDataError, MemqError, UnsupportedFormatError
from memq.format.batch import BlockPiece, NumberedEntry, is_whole, numbered_entries
from memq.format.blocks.header import BlockHeader
from memq.format.object import BlockEntry
from memq.format.pointer import Pointer, SequencedBlock, read_pointer
from memq.format.ranges import Range
from memq.limits import KIB
from memq.notification import Entries, Entry, Span
from memq.notification.dedup_window import DedupWindow, Novelty
from memq.notification.stored_blocks import Claim, Copies, claim_of, conflict_of, stored_block
from memq.topic import Committed, Position, ReadPartition, Totals

# One delivery's unpacked bytes, about. Values that stay in the processor's caches, in memory that the allocator keeps,
# are read at half the price of a whole batch's (65 against 150 ns at 100 B); below this the handing over costs more.
DELIVERY_BYTES = 512 * KIB
PART_BYTES_MIN = 512 * KIB  # of a batch of which less is fetched, by its index: two requests more
SLOTS_MAX = 256  # pointers that are known but not delivered; a pointer has at most 64 KiB


class CursorState(Enum):
    """See the table at the top of the file."""

    LOOKING_BACK = auto()
    READING = auto()
    ENDED = auto()


SUCCESSORS: dict[CursorState, frozenset[CursorState]] = {
    CursorState.LOOKING_BACK: frozenset({CursorState.READING}),
    CursorState.READING: frozenset({CursorState.ENDED}),
    CursorState.ENDED: frozenset(),
}


def successor(state: CursorState, following: CursorState) -> CursorState:
    """Return `following`, which the table has after `state`."""
    assert following in SUCCESSORS[state], f"{state.name} to {following.name}"
    return following


@dataclass(slots=True)
class _Assembly:
    """The records of one batch while its pieces are judged."""

    slices: list[Slice] = field(default_factory=list)
    damaged: list[BlockPiece] = field(default_factory=list)
    failed: BlockPiece | None = None
    stop: int | None = None  # the record index before which it ends, when that is not the end of the batch


class PartitionCursor:
    """The machine of one read partition, from `start` on, to `end` when there is one.

    With `pass_damage` the cursor passes over damaged blocks, else it stays before the first one. `pass_expired` is the
    same for records that retention took. `known` has the totals before the start as far as they are known. It is None
    for a start that is no position: then records that retention takes before the first delivery are no loss.
    `mark` is that of the start (`Committed`); `window_ms` is the length of the dedup window. Of batches and blocks of
    which `wanted` wants no record nothing is fetched or delivered; the caller applies it to single records.
    """

    def __init__(
        self,
        partition: ReadPartition,
        start: Position,
        *,
        window_ms: int,
        end: Position | None = None,
        pass_damage: bool = False,
        pass_expired: bool = False,
        known: Totals | None = None,
        mark: int = 0,
        wanted: RecordFilter | None = None,
    ) -> None:
        self.partition = partition
        self.position = start
        self.end = end
        self.counts = Counts()
        self.state = CursorState.LOOKING_BACK
        self.paused = False
        self.held_bytes = 0  # stored bytes of batches that are fetched, or are being fetched
        self.pass_damage = pass_damage
        self._pass_expired = pass_expired
        self._start = start
        self._known = known
        self.dedup_window = DedupWindow(window_ms)
        self.continuity = LogContinuity(start, mark)
        self._mark = mark  # of the position
        self.progress = ReadProgress(window_ms)  # the totals before the pointer at the position, and covered batches
        self._slots: deque[PointerSlot] = deque()
        self._unfetched: deque[PointerSlot] = deque()  # those of them that are not fetched yet
        self.wanted = wanted
        self._choice = PartChoice(wanted)
        self._seen = Seen([], [], [])
        self.comparing: PointerSlot | None = None  # its blocks seemed to be copies; `PointerSlot.compare` answers
        self._moved_start: Position | None = None
        self._full = False
        self._next_offset = start.pointer_offset
        self._end_reached = end is not None and end <= start

    # ---- before the start ----------------------------------------------------------------------

    def begin_look_back(self) -> None:
        """Reset the counts: a repeated look back would count the same pointers again."""
        assert self.state is CursorState.LOOKING_BACK
        self.progress = self.progress.again()

    def look_back(self, entries: Iterable[Entry]) -> list[Pointer]:
        """Take pointers before the start, in order, and mark the sequences of their blocks as seen.

        Returns the pointers that do not name all their producers, or name blocks that readers skip: the first copies
        of these may be lost. The caller reads the indexes of their objects, and calls `note_index`.
        """
        assert self.state is CursorState.LOOKING_BACK
        incomplete: list[Pointer] = []
        for entry in entries:
            if entry.offset >= self.position.pointer_offset:
                break
            pointer = read_pointer(entry.body, newer="return")
            if not isinstance(pointer, Pointer):
                continue  # an earlier reader processed it
            self.dedup_window.advance(entry.time_ms)
            self.progress.pass_over(pointer, entry.time_ms)
            self.continuity.note(pointer)
            if pointer.skip or not pointer.producers_complete:
                incomplete.append(pointer)
                continue
            for producer in pointer.producers:
                for first, next_ in producer.ranges:
                    self.dedup_window.note(pointer.partition, producer.producer, first, next_)
        return incomplete

    def note_index(self, pointer: Pointer, blocks: Iterable[BlockEntry]) -> None:
        """Take seen blocks: of a batch that `look_back` returned, or before a start within a batch."""
        for entry in blocks:
            self.dedup_window.note(pointer.partition, entry.producer_id, entry.first_sequence, entry.next_sequence)

    def begin(self) -> None:
        """Start to read: the look-back is complete."""
        self.state = successor(self.state, CursorState.READING)
        self._mark = self.continuity.mark
        self._end_if_delivered()

    # ---- pointers come in ----------------------------------------------------------------------

    @property
    def poll_offset(self) -> int | None:
        """The offset from which to poll pointers; None when no pointers are needed now."""
        if len(self._slots) >= SLOTS_MAX:
            self._full = True
        elif len(self._slots) <= SLOTS_MAX // 2:
            self._full = False  # not before: else each delivery would ask for one pointer
        return None if self.state is not CursorState.READING or self._end_reached or self._full else self._next_offset

    def misses(self, span: Span, entries: Sequence[Entry]) -> int | None:
        """Return where reading continues when retention has passed `poll_offset`, else None."""
        first = entries[0].offset if entries else span.begin
        return min(first, span.begin) if min(first, span.begin) > self._next_offset else None

    def take_gap(self, first: int, before: Totals) -> None:
        """Note that retention took the offsets from `poll_offset` to `first`; `before` are their totals."""
        if self.state is CursorState.READING:
            self._append(PointerSlot(self._next_offset, 0, gap=Gap(first, before), damaged=True))
            self._next_offset = first
            self.continuity.pass_gap(first)

    def take_entries(self, entries: Entries, *, compared: bool = True) -> bool:
        """Take the entries of a poll from `poll_offset`; the end is reached once `entries.next` is past it.

        If the log was not `compared` and the entries do not follow on the last ones, take none and return False.
        """
        if self.state is not CursorState.READING:
            return True
        slots = [slot_of(entry, self.wanted) for entry in entries if entry.offset >= self._next_offset]
        if not compared and self.continuity.is_broken_by(slot.pointer for slot in slots):
            return False
        for slot in slots:
            if self._is_past_end(slot.offset):
                self._end_reached = True
                break
            self._append(slot)
            self.continuity.take(slot.offset, slot.pointer)
            self._next_offset = slot.offset + 1
        if not self._end_reached:
            self._next_offset = max(self._next_offset, entries.next)
            self._end_reached = self._is_past_end(self._next_offset)
        self._end_if_delivered()
        return True

    # ---- batches come in -----------------------------------------------------------------------

    def next_fetch(self) -> PointerSlot | None:
        """Return the first batch that is not being fetched; None without one, or while paused."""
        if self.state is not CursorState.READING or self.paused or not self._unfetched:
            return None
        return self._unfetched[0]

    def start_fetch(self, slot: PointerSlot) -> None:
        """Note that the batch is being fetched: all its bytes count as held, until `hold` is called."""
        assert self._unfetched[0] is slot, f"slot {slot.offset} is fetched twice, or not in its turn"
        self._unfetched.popleft()
        slot.fetching, slot.part = True, self._part_of(slot)
        self.hold(slot, slot.bytes)

    def hold(self, slot: PointerSlot, size: int) -> None:
        """Count so many bytes of a batch as held: of those that are fetched in part, the needed blocks."""
        self.held_bytes, slot.held_bytes = self.held_bytes + size - slot.held_bytes, size

    def fetched(
        self,
        slot: PointerSlot,
        pieces: Sequence[BlockPiece],
        before: Sequence[NumberedEntry] = (),
        passed: Sequence[NumberedEntry] | None = None,
    ) -> None:
        """Take the pieces of a fetched batch, unless the batch was dropped meanwhile.

        `before` are the blocks before the start that were not fetched: their sequences count as seen. `passed` are
        those that were not fetched because of the filter; None if it did not choose blocks.
        """
        if slot.fetching and slot.pointer is not None:
            slot.fetching, slot.pieces, slot.damaged = False, pieces, not is_whole(pieces)
            skip = frozenset(slot.pointer.skip)
            self.note_index(slot.pointer, [item.entry for item in before if item.number not in skip])
            slot.passed = passed or ()
            if passed is not None and not slot.cut:
                self._choice.learn(slot)
            slot.passed = [item for item in slot.passed if item.number not in skip]

    def identify(self, slot: PointerSlot, entries: Sequence[BlockEntry] | None) -> None:
        """Take the index entries of an unwanted batch; if None, which are unreadable, its blocks are fetched."""
        if not slot.fetching or slot.pointer is None:
            return
        slot.fetching = False
        if entries is None:
            slot.unwanted = False
            self.drop_fetched()  # later batches, which wait for this one, may hold all bytes
            return
        low, high = self._wanted_range(slot.offset, slot.pointer)
        skip, slot.left_out = frozenset(slot.pointer.skip), []
        for number, first, entry in numbered_entries(entries):
            if number in skip or first >= high:
                continue
            if first + entry.count <= low:
                self.note_index(slot.pointer, [entry])
                continue
            part = max(0, low - first), min(entry.count, high - first)
            slot.left_out.append(
                left_out_part(slot.pointer, entry.producer_id, entry.first_sequence, part, entry.least_ms)
            )

    def expire(self, slot: PointerSlot, first: int) -> None:
        """Note that retention took a batch during its fetch; `first` is the first offset that is left."""
        if slot.fetching:
            slot.fetching, slot.damaged, slot.gap = False, True, Gap(first)
            self.hold(slot, 0)

    def drop_fetched(self) -> None:
        """Drop all fetched batches, and those that are being fetched; the cursor fetches them again later."""
        for slot in self._slots:  # what was judged of a batch stays judged
            slot.fetching, slot.pieces, slot.claims, slot.passed, slot.held_bytes = False, None, (), (), 0
        self._unfetched = deque(slot for slot in self._slots if not slot.ready)
        self.held_bytes = 0

    # ---- records go out ------------------------------------------------------------------------

    @property
    def deliverable(self) -> bool:
        """Whether `deliver` could return something, or move on."""
        if self.state is not CursorState.READING or self.paused or not self._slots:
            return False
        return self._slots[0].ready and not self._slots[0].claims

    def deliver(self, *, whole: bool = False) -> ReadyRange | None:
        """Return the next records, or the error before which the cursor stays; None when nothing is ready.

        The position moves over control pointers, copies and expired records.
        With `whole` it stops before a batch that is damaged, so that nothing but records is returned.
        """
        while self.deliverable and not (whole and self._slots[0].damaged):
            slot = self._slots[0]
            delivery = self._deliver_slot(slot)
            self._end_if_delivered()
            if delivery is not None:
                return delivery
        return None

    def take_seen(self) -> Seen:
        """Return the blocks that met others of the same sequences, or are unwanted, since the last call."""
        seen, self._seen = self._seen, Seen([], [], [])
        return seen

    def take_moved_start(self) -> Position | None:
        """Return the new start if retention has overtaken "the first available" since the last call."""
        moved, self._moved_start = self._moved_start, None
        return moved

    @property
    def behind(self) -> Committed:
        """The position, how much lies before it, its mark, and what it covers."""
        return Committed(self.position, self._totals(), self._mark, self.progress.covered)

    # ---- inside --------------------------------------------------------------------------------

    def _append(self, slot: PointerSlot) -> None:
        if self._is_cut(slot):
            slot.cut, slot.left_out = True, None  # its pointer does not say which blocks lie between start and end
        self._slots.append(slot)
        if not slot.ready:
            self._unfetched.append(slot)

    def _part_of(self, slot: PointerSlot) -> tuple[int, int] | None:
        """Return the records to fetch of a large batch by its index; None if it is fetched whole."""
        if slot.bytes < PART_BYTES_MIN or slot.pointer is None:
            return None
        by_index = self._is_cut(slot) or self._choice.take()
        return self._wanted_range(slot.offset, slot.pointer) if by_index else None

    def _is_cut(self, slot: PointerSlot) -> bool:
        """Whether start or end lies within a batch."""
        inside = self.position.pointer_offset == slot.offset and self.position.record_index > 0
        return inside or self._end_index(slot.offset) is not None

    def _wanted_range(self, offset: int, pointer: Pointer) -> Range:
        """Return the record indexes of a batch from the position up to the end."""
        low = self.position.record_index if self.position.pointer_offset == offset else 0
        end = self._end_index(offset)
        return low, pointer.records if end is None else end

    def _is_past_end(self, offset: int) -> bool:
        return self.end is not None and Position(self.partition.partition, offset) >= self.end

    def _end_if_delivered(self) -> None:
        if self.state is CursorState.READING and self._end_reached and not self._slots:
            self.state = successor(self.state, CursorState.ENDED)

    def _deliver_slot(self, slot: PointerSlot) -> ReadyRange | None:
        """Deliver the first slot, or as much of it as the damage policy and the end allow."""
        if slot.cause is not None:
            return self._deliver_unreadable(slot, slot.cause)
        if slot.gap is not None:
            return self._deliver_gap(slot, slot.gap)
        pointer = slot.pointer
        assert pointer is not None
        self.dedup_window.advance(slot.time_ms)
        self.progress.start_at(pointer)
        if slot.unwanted:
            self._leave_out(slot, pointer)
            return None
        if not slot.pieces and not slot.passed:
            self._pass(slot)
            return None
        first = self.behind.marked_position
        if first.pointer_offset < slot.offset:
            first = Position(self.partition.partition, slot.offset)
        end = self._end_index(slot.offset)
        totals = self.progress.totals
        found = self._assemble(pointer, slot, first.record_index, end)
        if found.stop is None:
            self._leave_out_blocks(slot, pointer, pointer.records, (first.record_index, end))
        if found.failed is not None and not found.slices and not found.damaged:
            self._stop_in(slot, max(found.failed.first, first.record_index))
            return self._failure(pointer, found.failed)
        if found.stop is not None:
            self._stop_in(slot, found.stop)
        elif end is not None:
            self._stop_in(slot, min(end, pointer.records))
            self._release(slot)
        else:
            self._pass(slot)
        if not found.slices and not found.damaged:
            return None
        self.counts.records += sum(part.records for part in found.slices)
        return ReadyRange(first, self.behind, totals, pointer, tuple(found.slices), tuple(found.damaged))

    def _leave_out(self, slot: PointerSlot, pointer: Pointer) -> None:
        """Move over an unwanted batch, or up to the end in it."""
        left_out = slot.left_out or ()
        for each in left_out:
            self.dedup_window.note(each.writer, each.producer, each.first, each.next)
        self._seen.left_out.extend(left_out)
        named = sum(each.next - each.first for each in left_out)
        self.counts.filtered_records += named if slot.needs_index else pointer.records
        end = self._end_index(slot.offset)
        if end is None:
            self._pass(slot)
        else:
            self._stop_in(slot, min(end, pointer.records))
            self._release(slot)

    def _deliver_gap(self, slot: PointerSlot, gap: Gap) -> ReadyRange | None:
        """Skip what retention removed, or stop before it if a wanted record was in it."""
        pointer, lost = slot.pointer, self._records_lost(slot, gap)
        if lost != 0 and not self._pass_expired:
            error = expired_error(self.partition, self.position, gap.first, lost or 0)
            return ReadyRange(self.position, self.behind, failure=error)
        self.counts.expired_records += lost or 0
        silent, here = self._begins_anywhere, self._passed_totals()
        if pointer is not None:
            self._pass(slot)
        else:
            self.counts.expired_offsets += gap.first - slot.offset
            self._release(slot)
            self.position = max(self.position, Position(self.partition.partition, gap.first))
            self._mark = 0
        if silent:
            self._start = self._moved_start = self.position
        elif pointer is None:  # one more gap before the next record is judged from here
            self._start, self._known = self.position, max(here, gap.before, key=lambda totals: totals.records)
        return None

    @property
    def _begins_anywhere(self) -> bool:
        """Whether nothing was delivered yet of a reader that takes what there is: it misses no record."""
        return self.position == self._start and self._known is None

    def _passed_totals(self) -> Totals:
        """Return the known totals before the position; after an expired start the dedup window lacks them."""
        known = self._known if self.position == self._start else None
        return self.behind.totals if known is None else known

    def _records_lost(self, slot: PointerSlot, gap: Gap) -> int | None:
        """Return how many wanted records are gone; None if fewer are counted after the gap than before it.

        The log was cut, and the position is one of the lost log, or the totals are not exact.
        """
        if self._begins_anywhere:
            return 0
        if slot.pointer is not None:
            return slot.pointer.records - max(self.position, Position(0, slot.offset)).record_index
        lost = gap.before.records - self._passed_totals().records
        return lost if lost >= 0 else None

    def _end_index(self, offset: int) -> int | None:
        """Return the record index at which the cursor ends in this batch; None when it ends elsewhere."""
        if self.end is not None and self.end.pointer_offset == offset:
            return self.end.record_index
        return None

    def _pass(self, slot: PointerSlot) -> None:
        """Leave the first slot behind."""
        if slot.pointer is not None:
            self.progress.pass_over(slot.pointer, slot.time_ms)
        self._release(slot)
        self.position, self._mark = Position(self.partition.partition, slot.offset + 1), slot.mark

    def _stop_in(self, slot: PointerSlot, index: int) -> None:
        """Move to a record of the first slot; before its first one, the mark is that of the slot before it."""
        self.position = Position(self.partition.partition, slot.offset, index)
        self._mark = slot.mark if index else self._mark

    def _release(self, slot: PointerSlot) -> None:
        assert self._slots[0] is slot
        self._slots.popleft()
        self.hold(slot, 0)

    def _assemble(self, pointer: Pointer, slot: PointerSlot, start: int, end: int | None) -> _Assembly:
        """Judge the pieces from record index `start` up to `end`; stop before damage that is not passed over."""
        found = _Assembly()
        skip = frozenset(pointer.skip)
        gaps, size = self.dedup_window.gaps, 0
        pieces = slot.pieces or ()
        if slot.judged >= len(pieces) or pieces[slot.judged].first != start:
            slot.judged = 0  # the start lies inside, or the batch was fetched again and cut otherwise
        for piece in pieces[slot.judged :]:
            if end is not None and piece.first >= end:
                break
            self._leave_out_blocks(slot, pointer, piece.first, (start, end))
            if size >= DELIVERY_BYTES:
                found.stop = piece.first
                break
            before = piece.first + piece.records <= start
            if piece.header is None and not before and piece.number not in skip:
                if not self.pass_damage or not isinstance(piece.cause, CorruptDataError):
                    found.failed, found.stop = piece, piece.first
                    break
                found.damaged.append(piece)
                self.counts.damaged_blocks += 1
                self.counts.damaged_records += piece.records
            elif piece.header is not None and piece.number not in skip:
                if before:
                    self._note(pointer, piece.header)
                elif self.wanted is not None and self.wanted.excludes_block(piece.header):
                    part = part_between(piece.first, piece.records, start, end)
                    self._leave_out_block(pointer, piece.header, piece.header.base_ms, part)
                elif (new := self._is_new(slot, pointer, piece, piece.header)) is None:
                    self.comparing, slot.claims, found.stop = slot, self._claims(slot, pointer), piece.first
                    break
                elif new:
                    found.slices.append(Slice(piece, *part_between(piece.first, piece.records, start, end)))
                    size += piece.header.raw_length
            slot.judged += 1
        self.counts.gap_sequences += self.dedup_window.gaps - gaps
        return found

    def _leave_out_blocks(
        self, slot: PointerSlot, pointer: Pointer, index: int, between: tuple[int, int | None]
    ) -> None:
        """Leave out the blocks before a record index that were not fetched, in the order of the batch."""
        for _, first, entry in slot.take_passed(index):
            self._leave_out_block(pointer, entry, entry.least_ms, part_between(first, entry.count, *between))

    def _leave_out_block(self, pointer: Pointer, block: SequencedBlock, base_ms: int, part: Range) -> None:
        """Leave out a part of a block: the records from the first index up to the second."""
        self._note(pointer, block)
        self.counts.filtered_records += part[1] - part[0]
        self._seen.left_out.append(left_out_part(pointer, block.producer_id, block.first_sequence, part, base_ms))

    def _note(self, pointer: Pointer, header: SequencedBlock) -> None:
        self.dedup_window.note(pointer.partition, header.producer_id, header.first_sequence, header.next_sequence)

    def _claims(self, slot: PointerSlot, pointer: Pointer) -> list[Claim]:
        """Return the blocks of a batch whose sequences were seen."""
        headers = [piece.header for piece in slot.pieces or () if piece.header and piece.number not in pointer.skip]
        return [claim for claim in map(claim_of, headers) if self.dedup_window.seen(pointer.partition, *claim)]

    def _is_new(self, slot: PointerSlot, pointer: Pointer, piece: BlockPiece, header: BlockHeader) -> bool | None:
        """Whether a block is delivered; None when its sequences were seen and contents must be compared."""
        claim = claim_of(header)
        verdict = self.dedup_window.judge(pointer.partition, *claim)
        if verdict is Novelty.PARTLY:
            self.counts.overlapping_blocks += 1
        if verdict is not Novelty.SEEN:
            return True
        judged = (slot.pieces or ())[: slot.judged]
        here = tuple(each.header for each in judged if each.header is not None and each.number not in pointer.skip)
        if slot.stored is None and claim not in map(claim_of, here):
            return None
        copies = (slot.stored or {}).get(claim, Copies())
        stored = (*copies.blocks, *(stored_block(each) for each in here if claim_of(each) == claim))
        if copies.lost and not stored:
            return True
        if stored and not any(each.is_copied_by(header) for each in stored):
            self.counts.conflicting_blocks += 1
            position = Position(self.partition.partition, slot.offset, piece.first)
            self._seen.conflicts.append(Conflict(position, pointer, conflict_of(header, stored)))
            return True
        self.counts.duplicate_records += header.count
        self._seen.copies.append((pointer.partition, header))
        return False

    def _deliver_unreadable(self, slot: PointerSlot, cause: MemqError) -> ReadyRange | None:
        """A pointer that can't be read hides its batch: damage of unknown size."""
        position = Position(self.partition.partition, slot.offset)
        if self.pass_damage and isinstance(cause, CorruptDataError):
            self.counts.damaged_blocks += 1
            self._pass(slot)
            piece = BlockPiece(0, 0, 0, None, memoryview(b""), cause)
            return ReadyRange(position, self.behind, damaged=(piece,))
        error = type(cause)(
            f"pointer at {position} of topic '{self.partition.topic}': {cause}", hint=self._hint(slot.offset + 1)
        )
        return ReadyRange(position, self.behind, failure=error)

    def _failure(self, pointer: Pointer, piece: BlockPiece) -> ReadyRange:
        cause = piece.cause
        assert cause is not None
        known = isinstance(cause, CorruptDataError | UnsupportedFormatError)
        if not known:  # a key is missing: the next try may have it
            self.drop_fetched()
        error = type(cause)(
            f"block {piece.number} of object '{pointer.locations[0].key}' at {self.position} "
            f"of topic '{self.partition.topic}': {cause}",
            hint=self._hint(self.position.pointer_offset, piece.first + piece.records) if known else cause.hint,
        )
        error.__cause__ = cause
        return ReadyRange(self.position, self.behind, pointer=pointer, damaged=(piece,), failure=error)

    def _hint(self, offset: int, index: int = 0) -> str:
        behind = Position(self.partition.partition, offset, index)
        return f"run memq verify; seek to {behind} to continue after it, or use on_damaged='skip'"

    def _totals(self) -> Totals:
        return self.progress.totals.plus(self.position.record_index, 0)
