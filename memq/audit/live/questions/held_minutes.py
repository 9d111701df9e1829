"""Held records in the live audit: counts by minute, and the questions to their shards. Pure.

A held record counts in the minute that its sequence has: in which it is due, or in which its transaction began. So the
state grows with minutes, not with records. Producers report how many records are held or committed, and how many they
have cancelled; pointers show how many came. What lacks in a minute that is over is lost when the shards say that they
have nothing left of it, and the queue was read to its end after that.

A client that does not report may have cancelled a record. Shards count what they dropped: as many records as were
dropped and not reported are unproven, not lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import get_args

from memq.audit.finding import Kind
from memq.audit.minutes import MINUTE_MS, QUEUE, MinuteRow
from memq.audit.pointer_facts import PointerFacts
from memq.audit.released import ReleaseAnswer, UnitState
from memq.format.held_sequences import HELD_BEGIN, due_time_of, held_minute, is_transactional
from memq.format.pointer import Pointer
from memq.format.report import HeldSpan, ReadStage
from memq.topic import CLOCK_ERROR_MS

MINUTES_MAX = 65_536  # that are compared; of more, the latest ones are not
LOST_HELD = "reported as held, due, in no pointer, and no service partition has it"
LOST_COMMITTED = "reported as committed, in no pointer, and no service partition has it"
UNPROVEN_HELD = "reported as held, due and in no pointer; a client that does not report may have cancelled it"
UNPROVEN_BLIND = "reported as held or committed, and the pointers of that time were not read"
_READ_STAGES: tuple[str, ...] = get_args(ReadStage)
Note = Callable[[Kind, str, int, int, int, int], None]  # kind, cause, minute, records, offset, now (Unix ms)
Block = tuple[int, int, int]  # producer, first, next


@dataclass(slots=True)
class HeldMinute:
    """Records of one minute: reported as held or cancelled, in the queue, and in findings."""

    held: int = 0
    ended: int = 0
    queued: int = 0
    lost: int = 0
    unproven: int = 0

    @property
    def missing(self) -> int:
        """How many records are awaited."""
        return max(self.held - self.ended - self.queued, 0)


@dataclass(slots=True)
class HeldState:
    """The held records of one write partition, by minute.

    `delayed` has delayed ones, `committed` those of transactions. `cancelled` and `queued` are sums. Up to the minute
    `blind` nothing is judged. `short` has the minutes of findings about pointers, by offset.
    """

    delayed: dict[int, HeldMinute] = field(default_factory=dict)
    committed: dict[int, HeldMinute] = field(default_factory=dict)
    cancelled: int = 0
    queued: int = 0
    blind: int = -1
    short: dict[int, int] = field(default_factory=dict)


class HeldAudit:
    """Audits the held records of the write partition `partition`.

    A record may be on its way for `active_ms`. `row` returns the row of a minute, and `note` sets the records of a
    finding.
    """

    def __init__(
        self,
        partition: int,
        state: HeldState,
        facts: PointerFacts,
        active_ms: int,
        row: Callable[[int], MinuteRow],
        note: Note,
    ) -> None:
        self._partition = partition
        self._state = state
        self._facts = facts
        self._active_ms = active_ms
        self._row = row
        self._note = note
        self._answer: ReleaseAnswer | None = None
        self._open: set[tuple[bool, int]] = set()  # minutes with records that are asked for
        self._asked: set[tuple[bool, int]] = set()

    def asks(self, *, again: bool) -> bool:
        """Whether shards are to be asked for records; `again`: also for those that they were asked for."""
        wanted = self._open if again else self._open - self._asked
        self._asked |= self._open
        return bool(wanted)

    @property
    def waits(self) -> bool:
        """Whether records are asked for."""
        return bool(self._open)

    # ---- what comes in -----------------------------------------------------------------------------

    def take_reported(self, spans: Iterable[HeldSpan], group: str | None, *, task: bool) -> None:
        """Take what a client reports of held records, for the `group` of a reader. `task`: Spark reads."""
        for span in spans:
            if span.stage in _READ_STAGES:
                stage = "processed" if task and span.stage == "fetched" else span.stage
                if group is not None:
                    self._row(span.minute).side(group).count(stage, span.records)
                continue
            side = self._row(span.minute).side(QUEUE)
            if span.stage in ("held", "committed"):
                side.count("sent", span.records)
                self._of_minute(span.stage == "committed", span.minute).held += span.records
            elif span.stage == "cancelled":
                side.count("cancelled", span.records)
                self._state.cancelled += span.records
                self._of_minute(False, span.minute).ended += span.records
            else:
                side.count(span.stage, span.records)

    def take_pointer(self, offset: int, time_ms: int, pointer: Pointer, all_blocks: Sequence[Block]) -> Sequence[Block]:
        """Take the next pointer of the write partition, with its blocks; return those of other records."""
        blocks = [block for block in all_blocks if block[1] >= HELD_BEGIN]
        facts, now_minute = self._facts.released, time_ms // MINUTE_MS
        if not facts.begun and self._state.blind < now_minute:  # of an older release that did not count them
            self._state.blind = now_minute
        known = {entry.producer: facts.shards.get(entry.producer, UnitState(0, 0)) for entry in pointer.named}
        shards = [entry for entry in pointer.named if entry.is_shard]
        old = [entry for entry in shards if entry.last_sequence <= known[entry.producer].number]
        awaited = facts.awaited_with(pointer)
        stated = facts.meet(pointer, whole=not self._facts.expired, has_held=not all_blocks or bool(blocks))
        found = sum(next_ - first for _, first, next_ in blocks)
        new = found
        if old and (stated is not None or len(old) == len(shards)):  # others came before, by another pointer
            new = min(found, (stated or 0) + awaited)
        surplus = facts.compare(pointer, offset, time_ms, stated, new)
        if surplus:
            cause = "more held records than their shards have released"
            self._note(Kind.UNRELEASED, cause, now_minute, surplus, offset, time_ms)
        early = 0
        for _, first, next_ in blocks:
            records, minute = next_ - first, held_minute(first)
            counted = min(records, new)
            new -= counted
            side = self._row(minute).side(QUEUE)
            side.count("copies", records - counted)
            side.count("committed", counted)
            self._of_minute(is_transactional(first), minute).queued += counted
            self._state.queued += counted
            if pointer.sealed_ms and due_time_of(first) > pointer.sealed_ms + CLOCK_ERROR_MS:
                early += counted
        if early:
            self._note(Kind.EARLY, "in the log before they are due", now_minute, early, offset, time_ms)
        return all_blocks if not blocks else [block for block in all_blocks if block[1] < HELD_BEGIN]

    def take_answer(self, answer: ReleaseAnswer) -> None:
        """Take the answer of the shards; the next `settle` uses it, after the queue was read to its end."""
        self._answer = answer

    def distrust(self, minute: int) -> None:
        """Judge nothing up to a minute: reports may be counted twice."""
        self._state.blind = max(self._state.blind, minute)

    # ---- the verdict -------------------------------------------------------------------------------

    def settle(self, now_ms: int) -> None:
        """Judge the minutes that are over."""
        self._settle_short(now_ms)
        self._open.clear()
        left = sum(short.records for short in self._facts.released.short)
        for committed, minutes in ((False, self._state.delayed), (True, self._state.committed)):
            dropped = self._dropped() if not committed else 0
            over = (now_ms - self._active_ms) // MINUTE_MS
            for minute in sorted(minute for minute in minutes if minute < over):
                counts, blind = minutes[minute], minute <= self._blind()
                # A cancel explains delayed records alone, a loss at a pointer both kinds: so cancels come first.
                spare = 0 if blind else counts.unproven if self._answer is None else dropped
                unproven = min(counts.missing, spare)
                dropped = max(dropped - unproven, 0)
                elsewhere = min(left, counts.missing - unproven)  # a finding about a pointer has them
                left -= elsewhere
                missing = counts.missing - elsewhere
                if missing > counts.lost + counts.unproven:
                    self._open.add((committed, minute))
                if blind:
                    unproven = missing
                if self._decides(minute, committed=committed):
                    self._find(committed, minute, counts, missing - unproven, unproven, now_ms)
                elif missing < counts.lost + counts.unproven:
                    lost = min(counts.lost, missing)
                    self._find(committed, minute, counts, lost, missing - lost, now_ms)
                if counts == HeldMinute(counts.held, counts.ended, counts.held - counts.ended):
                    del minutes[minute]
            for minute in sorted(minutes)[MINUTES_MAX:] if len(minutes) > MINUTES_MAX else ():
                del minutes[minute]
        self._asked &= self._open
        self._answer = None

    def _settle_short(self, now_ms: int) -> None:
        short = {each.offset: each for each in self._facts.released.short}
        for offset, minute in list(self._state.short.items()):
            if offset not in short:
                self._note(Kind.LOST, _LOST_UNIT, minute, 0, offset, now_ms)
                del self._state.short[offset]
        for offset, each in short.items():
            minute = self._state.short.setdefault(offset, each.time_ms // MINUTE_MS)
            self._note(Kind.LOST, _LOST_UNIT, minute, each.records, offset, now_ms)

    def _blind(self) -> int:
        return max(self._state.blind, self._facts.copies_ms // MINUTE_MS)

    def _dropped(self) -> int:
        """Return how many records were dropped, and by no client that reports."""
        shards = self._answer.shards if self._answer is not None else ()
        return max(sum(each.dropped for each in shards if each.partition == self._partition) - self._state.cancelled, 0)

    def _decides(self, minute: int, *, committed: bool) -> bool:
        """Whether the shards say that they have nothing left of a minute."""
        answer = self._answer
        if answer is None or answer.error:
            return False
        if any(each.released > each.done for each in answer.shards if each.partition == self._partition):
            return False
        next_ms = answer.next_ms.get(self._partition, 0)
        return committed or not next_ms or next_ms >= (minute + 1) * MINUTE_MS

    def _find(self, committed: bool, minute: int, counts: HeldMinute, lost: int, unproven: int, now_ms: int) -> None:
        counts.lost, counts.unproven = lost, unproven
        blind, state = minute <= self._blind(), self._state
        unproven = sum(minutes[minute].unproven for minutes in (state.delayed, state.committed) if minute in minutes)
        self._note(Kind.LOST, LOST_COMMITTED if committed else LOST_HELD, minute, lost, -1, now_ms)
        self._note(Kind.HOLE, UNPROVEN_BLIND, minute, unproven if blind else 0, -1, now_ms)
        self._note(Kind.HOLE, UNPROVEN_HELD, minute, 0 if blind else unproven, -1, now_ms)

    def _of_minute(self, committed: bool, minute: int) -> HeldMinute:
        minutes = self._state.committed if committed else self._state.delayed
        return minutes.setdefault(minute, HeldMinute())


_LOST_UNIT = "their shard has released more held records than the pointers up to this one show"
