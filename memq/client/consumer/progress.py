"""A reader's progress in one partition: records before it, removed records, finished batches. Pure.

One fold per write partition (`memq.format.totals`, with the theory) gives both ends of a lag: records stored, before
dedup, filter and damage. A commit is always a contiguous prefix: the position after the last batch before which all
are finished. Control pointers, copies and damaged blocks are not handed out, and count as finished.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from memq.errors import InvalidRequestError, PositionExpiredError, PositionLostError
from memq.format.pointer import Pointer, pointer_mark
from memq.format.totals import TotalsFold
from memq.limits import COVERED_MAX
from memq.topic import Committed, Covered, Position, ReadPartition, Totals


@dataclass(slots=True)
class LedgerEntry:
    """A batch that was handed out, or passed over: the position after it, and whether it is done."""

    behind: Committed
    done: bool


class CommitLedger:
    """The batches of one partition that were handed out, in order, until they are done."""

    def __init__(self) -> None:
        self._entries: deque[LedgerEntry] = deque()
        self._prefix: Committed | None = None
        self._stored: Committed | None = None
        self._tried: tuple[tuple[int, int], ...] = ()

    def __len__(self) -> int:
        """Number of kept positions: those after unfinished batches, and all later ones."""
        return len(self._entries)

    def hand(self, behind: Committed) -> LedgerEntry:
        """Note a batch that was handed out; `behind` is the position after it."""
        entry = LedgerEntry(behind, done=False)
        self._entries.append(entry)
        return entry

    def passed(self, behind: Committed) -> None:
        """Note that the cursor moved to `behind` without a batch to hand out."""
        self._entries.append(LedgerEntry(behind, done=True))
        self._take_done()

    def knows(self, position: Position) -> bool:
        """Whether a batch that ends at `position` was handed out, or all up to there is done."""
        if self._prefix is not None and position <= self._prefix.position:
            return True
        return any(entry.behind.position == position for entry in self._entries)

    def finish(self, position: Position) -> None:
        """Note that all before `position` is done."""
        for entry in self._entries:
            if entry.behind.position > position:
                break
            entry.done = True
        self._take_done()

    def finish_entry(self, entry: LedgerEntry) -> None:
        """Note that one batch is done; those before it may not be."""
        entry.done = True
        self._take_done()

    def reach(self, entry: LedgerEntry, committed: Committed) -> None:
        """Note that the records of a batch before `committed` are done.

        The prefix moves there if all batches before this one are done.
        """
        first = self._entries[0] if self._entries else None
        if first is entry and (self._prefix is None or self._prefix.position < committed.position):
            self._prefix = committed

    def note_tried(self, tried: Iterable[tuple[int, int]], otherwise: Committed) -> None:
        """Note which records were tried without an answer (`Committed`), to be stored with the position.

        Without a position yet, that is `otherwise`.
        """
        self._tried = tuple(tried)
        if self._tried and self._prefix is None and self._stored is None:
            self._prefix = otherwise

    @property
    def tried(self) -> tuple[tuple[int, int], ...]:
        """The records that were tried without an answer, as far as noted or stored."""
        return self._tried

    @property
    def prefix(self) -> Committed | None:
        """The position before which all batches are done; None if no batch is."""
        return self._prefix

    @property
    def due(self) -> Committed | None:
        """The position to commit; None when it is already stored."""
        reached = self._prefix or self._stored
        if reached is None:
            return None
        tried = tuple(each for each in self._tried if each[0] >= reached.position.offset)
        due = replace(reached, tried=tried) if tried or reached.tried else reached
        return None if due == self._stored else due

    @property
    def known(self) -> Committed | None:
        """The position that is known to be stored."""
        return self._stored

    @property
    def pending(self) -> bool:
        """Whether a batch that was handed out is not done."""
        return any(not entry.done for entry in self._entries)

    def is_stored(self, position: Position) -> bool:
        """Whether a position at or after `position` is known to be stored."""
        return self._stored is not None and self._stored.position >= position

    def stored(self, committed: Committed) -> None:
        """Note that `committed` was stored."""
        if self._stored is None:
            self._tried = committed.tried
        self._stored = committed

    def _take_done(self) -> None:
        """Move the prefix over finished batches, and drop their positions."""
        while self._entries and self._entries[0].done:
            self._prefix = self._entries.popleft().behind


@dataclass(frozen=True, slots=True)
class Gap:
    """The removed part: everything before offset `first`, with `before` records as far as known."""

    first: int
    before: Totals = field(default_factory=Totals)


def expired_error(partition: ReadPartition, position: Position, first: int, records: int = 0) -> PositionExpiredError:
    """Return the error for a position before offset `first`, the first one that is left."""
    valid = Position(partition.partition, first)
    lost = f": {records} records are gone" if records else ""
    error = PositionExpiredError(
        f"position {position} of topic '{partition.topic}' is before {valid}, the first remaining one{lost}",
        hint=f"continue at {valid}, at 'beginning', or read with on_expired='skip'",
    )
    error.topic, error.first = partition.topic, str(valid)
    return error


def lost_error(partition: ReadPartition, position: Position) -> PositionLostError:
    """Return the error for a position before which the log is not the one that was read."""
    error = PositionLostError(
        f"the log of topic '{partition.topic}' was cut before position {position}, and has grown again: a reader there "
        "would skip new records",
        hint=f"check that the position is one of this topic; if it is: {PositionLostError.default_hint}",
    )
    error.topic = partition.topic
    return error


def cut_error(partition: ReadPartition, position: Position, end: int) -> PositionLostError:
    """Return the error for a position that was read, and is after the end of its log now."""
    error = PositionLostError(
        f"the log of topic '{partition.topic}' was cut before position {position}: it ends at "
        f"{Position(partition.partition, end)}"
    )
    error.topic = partition.topic
    return error


def past_batch_error(partition: ReadPartition, position: Position, records: int) -> InvalidRequestError:
    """Return the error for a position after the last record of its batch, which has `records`."""
    batch = Position(partition.partition, position.pointer_offset)
    return InvalidRequestError(
        f"position {position} of topic '{partition.topic}' is after its batch: {batch} has {records} records",
        hint=f"the next batch is at {Position(partition.partition, position.pointer_offset + 1)}",
    )


class LogContinuity:
    """The last pointers that a reader took: they show whether its log was cut and has grown again.

    After its `opened` an owner numbers the batches of an epoch densely, and epochs only grow. So a pointer that does
    not follow on the last one of its write partition may follow on pointers that were never read. Retention, a change
    of the owner and a late pointer look the same. The mark tells them apart: it is compared with the log.
    """

    def __init__(self, start: Position, mark: int) -> None:
        self.reached = start  # the position after the last pointer that was taken, or within it
        self.mark = mark  # of `reached` (see `Committed`)
        self._last: dict[int, tuple[int, int]] = {}  # epoch and batch of the last pointer of each write partition

    def note(self, pointer: Pointer) -> None:
        """Note a pointer before the start."""
        _note(self._last, pointer)

    def take(self, offset: int, pointer: Pointer | None) -> None:
        """Note the next pointer; None if it can't be read."""
        self.reached = Position(self.reached.read_partition, offset + 1)
        self.mark = 0
        if pointer is not None:
            self.mark = pointer_mark(pointer)
            _note(self._last, pointer)

    def pass_gap(self, first: int) -> None:
        """Note that retention has removed all up to offset `first`: there is no last pointer to compare."""
        self.reached, self.mark = Position(self.reached.read_partition, first), 0

    def is_broken_by(self, pointers: Iterable[Pointer | None]) -> bool:
        """Whether a pointer does not follow on the last one of its write partition; false without a mark."""
        last = dict(self._last)
        for pointer in pointers if self.mark else ():
            if pointer is not None:
                if not _follows(pointer, last.get(pointer.partition)):
                    return True
                _note(last, pointer)
        return False


def _note(last: dict[int, tuple[int, int]], pointer: Pointer) -> None:
    before = last.get(pointer.partition)
    if pointer.kind == "data":
        last[pointer.partition] = (pointer.epoch, pointer.batch_sequence)
    elif before is None or before[0] != pointer.epoch:
        last[pointer.partition] = (pointer.epoch, -1)


def _follows(pointer: Pointer, before: tuple[int, int] | None) -> bool:
    """Whether a pointer is the next batch of its epoch.

    The last batch once more may be a pointer that was published twice. Or a broker has shown it at a lower offset
    before, where the log has another pointer.
    """
    if pointer.kind != "data" or before is None:
        return False
    epoch, batch = before
    return pointer.epoch == epoch and pointer.batch_sequence == batch + 1


@dataclass(slots=True)
class _CoveredPart:
    """The covered batches of a write partition.

    They are all batches below epoch `floor`, and of each epoch those before `next_`.
    """

    floor: int = 0
    next_: dict[int, int] = field(default_factory=dict)
    met_ms: dict[int, int] = field(default_factory=dict)  # the queue time of the first pointer of each epoch

    def note(self, pointer: Pointer, time_ms: int, keep_ms: int) -> None:
        epoch = pointer.epoch
        if epoch < self.floor:
            return
        for known in self.next_:
            self.met_ms.setdefault(known, time_ms)  # of a stored position
        self.met_ms.setdefault(epoch, time_ms)
        reached = pointer.batch_sequence + 1 if pointer.kind == "data" else 0
        self.next_[epoch] = max(reached, self.next_.get(epoch, 0))
        self.pass_time(time_ms, keep_ms)

    def pass_time(self, time_ms: int, keep_ms: int) -> None:
        """Cover all lower epochs than one that was met over `keep_ms` ago."""
        old = [each for each, met_ms in self.met_ms.items() if time_ms - met_ms > keep_ms and self.next_[each]]
        if old and max(old) > self.floor:
            self.floor = max(old)
            self.next_ = {each: next_ for each, next_ in self.next_.items() if each >= self.floor}
            self.met_ms = {each: met_ms for each, met_ms in self.met_ms.items() if each >= self.floor}


class ReadProgress:
    """Folds the pointers of one read partition, in order of offset, into totals and covered batches.

    Late pointers of lower epochs come at most `keep_ms` (queue time) after the first pointer of an epoch: then all
    lower epochs are covered (G5). Without `keep_ms`, covered batches are not counted.
    """

    def __init__(self, keep_ms: int = 0) -> None:
        self._parts: dict[int, TotalsFold] = {}
        self._keep_ms = keep_ms
        self._start: Covered = ()
        self._covered: dict[int, _CoveredPart] = {}

    def cover(self, covered: Covered) -> None:
        """Take the batches before the start that its stored position names."""
        self._start = covered
        self._covered = {
            writer: _CoveredPart(floor, dict(zip(numbers[::2], numbers[1::2], strict=True)))
            for writer, floor, numbers in covered
        }

    def again(self) -> ReadProgress:
        """Return the progress at the start."""
        made = ReadProgress(self._keep_ms)
        made.cover(self._start)
        return made

    def pass_over(self, pointer: Pointer, time_ms: int = 0) -> None:
        """Count the records of a pointer as before the position; `time_ms` is its queue time."""
        self._part(pointer.partition).add(pointer)
        if self._keep_ms:
            self._covered.setdefault(pointer.partition, _CoveredPart()).note(pointer, time_ms, self._keep_ms)

    def pass_time(self, time_ms: int) -> None:
        """Note that the log has come to a queue time, by pointers of whichever writer."""
        for part in self._covered.values():
            part.pass_time(time_ms, self._keep_ms)

    @property
    def covered(self) -> Covered:
        """The batches that the position covers (`Committed`)."""
        parts = self._covered
        if len(parts) > COVERED_MAX or any(len(part.next_) > COVERED_MAX for part in parts.values()):
            return ()
        return tuple(
            (writer, part.floor, tuple(number for pair in sorted(part.next_.items()) for number in pair))
            for writer, part in sorted(parts.items())
        )

    def start_at(self, pointer: Pointer) -> None:
        """Take the totals that `pointer`, the first of its write partition here or later, states."""
        self._part(pointer.partition).reach(pointer.totals)

    def join(self, other: ReadProgress) -> None:
        """Take the totals of `other` before the same position, for each write partition where they are higher."""
        for partition, part in other._parts.items():
            self._part(partition).reach(part.totals)

    def _part(self, partition: int) -> TotalsFold:
        found = self._parts.get(partition)
        if found is None:
            found = self._parts[partition] = TotalsFold()
        return found

    @property
    def totals(self) -> Totals:
        """The totals before the position, over all write partitions."""
        total = Totals()
        for part in self._parts.values():
            total = total.plus(part.totals.records, part.totals.bytes)
        return total

    def knows(self, partitions: Iterable[int]) -> bool:
        """Whether each of these write partitions was met."""
        return all(partition in self._parts for partition in partitions)

    def is_settled(self, partition: int) -> bool:
        """Whether the pointers of a write partition alone show that its totals are exact."""
        found = self._parts.get(partition)
        return found is not None and found.settled
