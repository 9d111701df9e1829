"""The account of one producer in one write partition: sequences that arrived or are missing. Pure.

A sequence is lost only if two facts are known: the producer used it (it stated its end), and everything that could
hold it was read. Otherwise it is unproven, and never reported as lost. A broker may hold a record that it acked with
less than `all`. Such a sequence is lost only after the brokers were asked for it, and the queue was read up to its end
after their answers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum

from memq.format.pointer import ProducerEnd
from memq.format.ranges import Range, RangeSet

# A broker passes on so many burned ranges of a producer: with as many, there may have been more.
BURNED_RANGES_CUT = 256
ACKS_ALL = 2  # the level of acks that only the queue can give
SLICES = 8  # what was delivered lately is forgotten in eighths of the window


class Fate(Enum):
    """How readers treat a block: deliver it, drop it as a copy, or deliver records a second time."""

    NEW = "new"
    COPY = "copy"
    DOUBLED = "doubled"


class TailKnowledge(Enum):
    """Whether the last sequence of a producer is known.

    The producer stated it, or may still be sending, or has been silent.
    """

    PROVEN = "proven"
    IN_FLIGHT = "in flight"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class HeldWord:
    """The answers of brokers about one producer.

    `held` are the sequences of `asked` that they hold. After the answers the queue was read to its end. `doubt` is the
    reason why they may hold more, "" for none.
    """

    asked: RangeSet = field(default_factory=RangeSet)
    held: RangeSet = field(default_factory=RangeSet)
    doubt: str = ""


NOT_ASKED = HeldWord(doubt="no broker was asked whether it holds them")


@dataclass(frozen=True, slots=True)
class Evidence:
    """Evidence about a whole write partition, and the brokers' answers about one producer.

    `expired`: retention has removed some records. `unread`: a pointer or object that could hold any sequence was not
    read. `active_since_ms`: producers seen at this queue time or later may still be sending.
    """

    expired: bool = False
    unread: bool = False
    active_since_ms: int = 0
    word: HeldWord = NOT_ASKED


@dataclass(frozen=True, slots=True)
class Balance:
    """The sequences of one producer by outcome.

    Ranges are half-open and ascend; each sequence is in one kind. `next_sequence` is the stated end, or one above the
    highest sequence that was seen. `unproven` are holes that may be given up, in flight or lost; `doubt` says why those
    below the end are not lost. `held` are sequences that a broker has and the queue has not. `expired` counts sequences
    before the first remaining one, `copies` the records that readers drop.
    """

    partition: int
    producer: int
    delivered: int
    next_sequence: int
    tail: TailKnowledge
    lost: tuple[Range, ...] = ()
    doubled: tuple[Range, ...] = ()
    corrupt: tuple[Range, ...] = ()
    unread: tuple[Range, ...] = ()
    unproven: tuple[Range, ...] = ()
    held: tuple[Range, ...] = ()
    doubt: str = ""
    burned: int = 0
    expired: int = 0
    copies: int = 0

    @property
    def clean(self) -> bool:
        """Whether there is no fault and no open sequence."""
        wrong = self.lost or self.doubled or self.corrupt or self.unread or self.unproven or self.held
        return not wrong and self.tail is TailKnowledge.PROVEN


@dataclass(slots=True)
class RecentRanges:
    """The sequences of the last `window_ms` of queue time, which every reader remembers.

    Memory: one range set for each eighth of the window, with the time of its first range. It remembers up to an eighth
    more than the window; a reader that has read for long remembers up to a quarter more.
    """

    window_ms: int
    slices: list[tuple[int, RangeSet]] = field(default_factory=list)
    now_ms: int = 0

    def add(self, first: int, next_: int, time_ms: int) -> None:
        """Remember a range of this queue time. Times never decrease."""
        self.now_ms = max(self.now_ms, time_ms)
        step_ms = self.window_ms // SLICES
        if not self.slices or self.now_ms >= self.slices[-1][0] + step_ms:
            self.slices.append((self.now_ms, RangeSet()))
        self.slices[-1][1].add(first, next_)
        while self.slices[0][0] + step_ms <= self.now_ms - self.window_ms:
            del self.slices[0]

    def holds(self, first: int, next_: int, time_ms: int) -> bool:
        """Whether the whole range is remembered at this queue time."""
        horizon_ms = max(self.now_ms, time_ms) - self.window_ms - self.window_ms // SLICES
        left = [(first, next_)]
        for start_ms, ranges in self.slices:
            if start_ms > horizon_ms:
                left = [hole for piece in left for hole in ranges.holes(*piece)]
        return not left


@dataclass(slots=True)
class Account:
    """The account of one producer in one write partition.

    It takes sequences by block, in the order of the queue. A block up to the queue time `copies_ms` may be a late copy
    of a removed one: it proves nothing about the sequences after it. A later block can't be such a copy.
    """

    recent: RecentRanges
    copies_ms: int = -1
    start: int | None = None  # the least that came after `copies_ms`: from here on nothing may be missing
    delivered: RangeSet = field(default_factory=RangeSet)
    doubled: RangeSet = field(default_factory=RangeSet)
    corrupt: RangeSet = field(default_factory=RangeSet)
    unread: RangeSet = field(default_factory=RangeSet)
    burned: RangeSet = field(default_factory=RangeSet)
    burned_cut: bool = False
    end: int | None = None
    end_ms: int = 0  # when the end was stated last
    weak: bool = False  # an end does not say that its acks were all
    seen_ms: int = 0
    copies: int = 0

    def deliver(self, first: int, next_: int, time_ms: int, *, differs: bool = False) -> Fate:
        """Add a sound block of this queue time (Unix ms) and return how readers treat it.

        They drop known sequences, unless the block `differs` from the known block of the same sequences.
        """
        self._see(first, time_ms)
        fate = Fate.NEW
        if self.delivered.overlaps(first, next_):
            fate = Fate.COPY if self.recent.holds(first, next_, time_ms) and not differs else Fate.DOUBLED
        if fate is Fate.DOUBLED:
            for piece in common([(first, next_)], self.delivered):
                self.doubled.add(*piece)
        if fate is Fate.COPY:
            self.copies += next_ - first
        else:
            self.delivered.add(first, next_)
        self.recent.add(first, next_, time_ms)
        return fate

    def miss(self, first: int, next_: int, time_ms: int, *, damaged: bool) -> None:
        """Add a block that readers do not get, because it is damaged or could not be read."""
        self._see(first, time_ms)
        (self.corrupt if damaged else self.unread).add(first, next_)

    def begin_again(self, copies_ms: int) -> None:
        """Forget evidence so far: unread entries may be between it and the next block."""
        self.copies_ms, self.start = copies_ms, None

    def close(self, end: ProducerEnd, time_ms: int) -> None:
        """Add the end that the producer stated; of two ends the higher one is valid."""
        self.seen_ms = max(self.seen_ms, time_ms)
        self.end_ms = max(self.end_ms, time_ms)
        self.end = max(self.end or 0, end.next_sequence)
        self.burned_cut |= len(end.burned) >= BURNED_RANGES_CUT
        self.weak |= end.acks != ACKS_ALL
        for piece in end.burned:
            self.burned.add(*piece)

    def settle(self, partition: int, producer: int, evidence: Evidence) -> Balance:
        """Return the balance: each sequence from the first to the last known one, in exactly one kind."""
        seen = [ranges for ranges in (self.delivered, self.corrupt, self.unread) if len(ranges)]
        reach = max((ranges.next for ranges in seen), default=0)
        end = self.end or 0
        start = self._start(reach, end) if evidence.expired else 0
        missing = apart([(start, max(reach, end, start))], self.delivered, self.burned)
        corrupt, missing = common(missing, self.corrupt), apart(missing, self.corrupt)
        unread, missing = common(missing, self.unread), apart(missing, self.unread)
        proof = RangeSet() if evidence.unread or self.burned_cut else RangeSet([(0, end)])
        lost, held, doubt = self._lost(common(missing, proof), evidence.word)
        return Balance(
            partition=partition,
            producer=producer,
            delivered=self.delivered.total,
            next_sequence=max(reach, end),
            tail=self._tail(reach, evidence),
            lost=tuple(lost),
            doubled=tuple(self.doubled),
            corrupt=tuple(corrupt),
            unread=tuple(unread),
            unproven=tuple(apart(missing, RangeSet(lost), RangeSet(held))),
            held=tuple(held),
            doubt=doubt,
            burned=self.burned.total,
            expired=sum(next_ - first for first, next_ in apart([(0, start)], self.delivered)),
            copies=self.copies,
        )

    def sought(self, evidence: Evidence) -> tuple[Range, ...]:
        """Return the sequences that are lost unless a broker holds them."""
        if not self.weak or self.end is None:
            return ()
        sure = HeldWord(asked=RangeSet([(0, self.end)]))
        return self.settle(0, 0, replace(evidence, word=sure)).lost

    def _lost(self, missing: list[Range], word: HeldWord) -> tuple[list[Range], list[Range], str]:
        """Divide missing sequences below the end: lost, held by brokers, and why the rest is not lost."""
        if not self.weak:
            return missing, [], ""
        held, missing = common(missing, word.held), apart(missing, word.held)
        lost = [] if word.doubt else common(missing, word.asked)
        doubt = word.doubt or "its producer ended while the audit ran"
        return lost, held, "" if lost == missing else doubt

    def _see(self, first: int, time_ms: int) -> None:
        self.seen_ms = max(self.seen_ms, time_ms)
        if time_ms > self.copies_ms:
            self.start = first if self.start is None else min(self.start, first)

    def _start(self, reach: int, end: int) -> int:
        return max(reach, end) if self.start is None else self.start

    def _tail(self, reach: int, evidence: Evidence) -> TailKnowledge:
        if self.end is not None and self.end >= reach:
            return TailKnowledge.PROVEN
        return TailKnowledge.IN_FLIGHT if self.seen_ms >= evidence.active_since_ms else TailKnowledge.UNKNOWN


def apart(pieces: Iterable[Range], *known: RangeSet) -> list[Range]:
    """Return the parts of `pieces` that are in none of the `known` ranges, in order."""
    for ranges in known:
        pieces = [hole for first, next_ in pieces for hole in ranges.holes(first, next_)]
    return list(pieces)


def common(pieces: Iterable[Range], ranges: RangeSet) -> list[Range]:
    """Return the parts of `pieces` that are in `ranges`, in order."""
    found: list[Range] = []
    for first, next_ in pieces:
        at = first
        for hole in [*ranges.holes(first, next_), (next_, next_)]:
            if at < hole[0]:
                found.append((at, hole[0]))
            at = hole[1]
    return found
