"""The proof of held records: units in pointers, and what their shards say. Pure.

Theory. Delayed records, and records of transactions, come as units. A shard, which is a service partition of
`_memq_state`, numbers its units of a write partition without holes. It states with each unit how many records it has
released for the partition up to it: in the pointer of the unit's batch, and in each `opened`. So between two statements
of a shard the log has exactly as many held records as the statements differ. The shard itself says how many units are
done: those are in the log. So no held record needs an account of a producer. Sequences say which records were held.

A late pointer of a former owner may show a unit after a later one. Its records then fill what was missing before.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from memq.audit.account import Fate
from memq.format.pointer import Pointer
from memq.topic import Topic

BLOCKS_KEPT_MAX = 1 << 24  # that are known by 12 bytes each; later ones are judged by the counts of their units alone
SHORTFALLS_MAX = 4_096
UNKNOWN = -1
_MASK = (1 << 64) - 1
_SPREAD = 0x9E37_79B9_7F4A_7C15
_PREFIX_SHIFT = 48


class ShardCounts(NamedTuple):
    """The counts of a shard for a write partition: last unit, and records of all and of those done.

    `dropped` counts the delayed records that were cancelled.
    """

    partition: int
    shard: int
    released: int
    released_records: int
    done: int
    done_records: int
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class ReleaseAnswer:
    """The counts of all shards for a topic, or why they are not known.

    `waiting` counts its waiting delayed records. `next_ms` is when the next delayed record of a write partition is due
    (Unix ms); 0 if none is.
    """

    shards: tuple[ShardCounts, ...] = ()
    waiting: int = 0
    error: str = ""
    next_ms: dict[int, int] = field(default_factory=dict)

    def of(self, partitions: Collection[int], *, first: bool) -> ReleaseAnswer:
        """Return the counts for some write partitions; only the `first` part of several has what waits."""
        shards = tuple(each for each in self.shards if each.partition in partitions)
        return replace(self, shards=shards, waiting=self.waiting if first else 0)


NOT_ASKED = ReleaseAnswer(error="no broker was asked for it")
AskReleased = Callable[[Topic], Awaitable[ReleaseAnswer]]  # raises nothing


class UnitState(NamedTuple):
    """The last unit of a shard that pointers name, and its records up to it; UNKNOWN: not stated."""

    number: int
    records: int


@dataclass(slots=True)
class Shortfall:
    """Records of units that a pointer should have shown, and that are missing.

    `units` has for each shard of that pointer the last unit before it, and its own. A late pointer with a unit between
    them may bring the records; none says anything for a state of an earlier release.
    """

    offset: int
    time_ms: int
    records: int
    cause: str
    units: dict[int, tuple[int, int]] = field(default_factory=dict)

    def may_come_with(self, pointer: Pointer) -> bool:
        """Whether a late pointer may have these records; a copy of a later batch does not."""
        units = [(entry.producer, entry.last_sequence) for entry in pointer.named if entry.is_shard]
        bounds = ((self.units.get(shard, (0, 0)), number) for shard, number in units)
        return not self.units or any(before < number < last for (before, last), number in bounds)


@dataclass(slots=True)
class ReleaseFacts:
    """The units of one write partition, as its pointers state them.

    `short` has what is missing. `begun`: its units were counted from the first pointer on that was read.
    """

    shards: dict[int, UnitState] = field(default_factory=dict)
    short: list[Shortfall] = field(default_factory=list)
    begun: bool = False
    met: dict[int, tuple[int, int]] = field(default_factory=dict)  # of the last pointer, as `Shortfall.units`

    def meet(self, pointer: Pointer, *, whole: bool, has_held: bool = True) -> int | None:
        """Return how many new held records a pointer states; None if that is not known.

        `whole`: no pointer before it is missing, so a new shard has no earlier unit. Without
        `has_held`, the batch has no held record: a count of 0 is that of an empty unit. With some, a broker of an
        earlier release did not count.
        """
        stated, known, named = 0, True, False
        self.met = {}
        whole &= self.begun
        for entry in pointer.named:
            if not entry.is_shard:
                continue
            named = True
            before = self.shards.get(entry.producer, UnitState(0, 0 if whole else UNKNOWN))
            if entry.last_sequence <= before.number:
                continue
            records = entry.records if entry.records or not has_held else UNKNOWN
            if UNKNOWN in (records, before.records) or records < before.records:
                known = False
            else:
                stated += records - before.records
            self.shards[entry.producer] = UnitState(entry.last_sequence, records)
            self.met[entry.producer] = before.number, entry.last_sequence
        return stated if known and named else None

    def compare(self, pointer: Pointer, offset: int, time_ms: int, stated: int | None, found: int) -> int:
        """Compare what a pointer states with its new held records; return how many no shard has released."""
        if stated is None:
            return 0
        if found < stated:
            units = [
                f"{entry.last_sequence} of shard {entry.producer:016x}" for entry in pointer.named if entry.is_shard
            ]
            cause = f"units up to {', '.join(units[:3])} have {stated} records, {found} are there"
            if len(self.short) < SHORTFALLS_MAX:
                self.short.append(Shortfall(offset, time_ms, stated - found, cause, self.met))
            else:
                self.short[-1].records += stated - found
            return 0
        surplus = found - stated
        for short in reversed(self.short):
            if surplus and short.may_come_with(pointer):
                filled = min(surplus, short.records)
                surplus -= filled
                short.records -= filled
        self.short = [short for short in self.short if short.records]
        return surplus

    def awaited_with(self, pointer: Pointer) -> int:
        """Return how many missing records a late pointer may bring."""
        return sum(short.records for short in self.short if short.may_come_with(pointer))

    def forget(self) -> None:
        """Begin the counts again: a pointer was not read that may have units."""
        self.shards = {shard: UnitState(state.number, UNKNOWN) for shard, state in self.shards.items()}

    def absent(self, counts: ShardCounts, *, whole: bool) -> int:
        """Return how many records are done, as a shard says, and in no pointer that was read."""
        known = self.shards.get(counts.shard, UnitState(0, 0) if whole else None)
        if known is None or counts.done <= known.number:
            return 0
        return max(counts.done_records - known.records, 0) if known.records != UNKNOWN else counts.done - known.number

    def pending(self, counts: ShardCounts) -> int:
        """Return how many records are released, not done, and in no pointer: they are on their way."""
        known = self.shards.get(counts.shard, UnitState(0, 0))
        if counts.released <= max(counts.done, known.number):
            return 0
        return counts.released_records - max(counts.done_records, known.records)


class ReleasedBlocks:
    """The blocks of held records that a reader has met: a hash of 8 bytes and a time of 4 bytes each."""

    def __init__(self, window_ms: int) -> None:
        self._window_s = -(-window_ms * 9 // 8_000)  # as `RecentRanges`
        self._hashes: dict[int, array[int]] = {}  # by prefix, in order
        self._seconds: dict[int, array[int]] = {}
        self._count = 0

    def meet(self, producer: int, first: int, time_ms: int) -> Fate:
        """Take a block of this queue time (Unix ms) and return how readers treat it."""
        hash_ = (producer ^ first * _SPREAD) & _MASK
        prefix, now_s = hash_ >> _PREFIX_SHIFT, max(time_ms, 0) // 1_000
        hashes = self._hashes.get(prefix)
        if hashes is None:
            hashes, self._seconds[prefix] = array("Q"), array("I")
            self._hashes[prefix] = hashes
        seconds, at = self._seconds[prefix], bisect_left(hashes, hash_)
        if at < len(hashes) and hashes[at] == hash_:
            recent = now_s - seconds[at] <= self._window_s
            seconds[at] = max(seconds[at], now_s)
            return Fate.COPY if recent else Fate.DOUBLED
        if self._count < BLOCKS_KEPT_MAX:
            hashes.insert(at, hash_)
            seconds.insert(at, now_s)
            self._count += 1
        return Fate.NEW
