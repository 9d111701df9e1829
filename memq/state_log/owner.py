"""The owner of a state log in one epoch: proposals become numbered entries, one at a time. Pure.

The owner does one step at a time, a publish or a read to the end, and learns its outcome. `fold` is the state that
counts: an entry on its way changes nothing (S3). A decision states its conditions, and the fold judges them in the
state before its entry. So an answer rests on entries that count, and on nothing else (S4).

===============  ====================================================================================
event            what follows
===============  ====================================================================================
published        at the next offset: the entry counts. Further ahead: read. Below: the log was cut
failed           the entry may be in the log, now or later: read to the end, then the same bytes again (S5)
met own entry    it counts: answers go out
met `opened`     of a higher epoch: what did not count before it is void for ever, "not done" may be said
met a hole       a newer owner has trimmed, or the queue lost entries: what is on its way is unknown
===============  ====================================================================================
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from memq.errors import EpochFencedError, LogCutError, LogLostError, MemqError, QueueError
from memq.format.state_log.entry import (
    HEAD,
    OpenedState,
    StateDecision,
    StateDecisions,
    StateEntry,
    StateSnapshot,
    decision_bytes,
    encode_state_entry,
)
from memq.format.state_log.snapshot import SavedState
from memq.limits import MIB, POINTER_BYTES_MAX
from memq.state_log import Answer
from memq.state_log.fold import Judgement, StateFold

UNCOVERED_BYTES_MAX = 4 * MIB  # of entries, before the next snapshot


class OwnerPhase(Enum):
    """IDLE, PUBLISHING, READING; ENDED: fenced, or the owner has lost track of the log."""

    IDLE = auto()
    PUBLISHING = auto()
    READING = auto()
    ENDED = auto()


SUCCESSORS: dict[OwnerPhase, frozenset[OwnerPhase]] = {
    OwnerPhase.IDLE: frozenset({OwnerPhase.PUBLISHING, OwnerPhase.READING, OwnerPhase.ENDED}),
    OwnerPhase.PUBLISHING: frozenset({OwnerPhase.IDLE, OwnerPhase.ENDED}),
    OwnerPhase.READING: frozenset({OwnerPhase.IDLE, OwnerPhase.ENDED}),
    OwnerPhase.ENDED: frozenset(),
}


class ProposalFate(Enum):
    """Of a proposal. COUNTS: it is in the log. VOID: it never will be. UNKNOWN: it may be."""

    COUNTS = auto()
    VOID = auto()
    UNKNOWN = auto()


class Settled(NamedTuple):
    """The outcome of a proposal; `answer` is the machine's, when the proposal counts."""

    ticket: int
    fate: ProposalFate
    answer: Answer = None


class PublishStep(NamedTuple):
    """Publish these bytes, and call `published` or `failed`."""

    body: bytes


class ReadStep(NamedTuple):
    """Read from `offset` to the end, which is not before `end`.

    Call `meet` for each entry, then `read`; or `failed`.
    """

    offset: int
    end: int


class TrimStep(NamedTuple):
    """A snapshot counts: trim the log below `before`, and delete the snapshot `replaced`."""

    before: int
    replaced: StateSnapshot | None


@dataclass(slots=True)
class SealedEntry:
    """The entry on its way: its bytes never change (S5). `since_s` is when it was first handed over."""

    entry: StateEntry
    body: bytes
    tickets: tuple[tuple[int, bool], ...]  # of its proposals, and whether each is a decision
    since_s: float = math.inf


class SnapshotPace:
    """When the next snapshot is due (S8): by the bytes of entries, or by the age of the first change.

    Both are of entries that no snapshot covers. `uncovered_bytes` is the size of such entries at the opening.
    """

    def __init__(self, age_s_max: float, uncovered_bytes: int, now_s: float) -> None:
        self._age_s_max = age_s_max
        self._bytes = self._saved_bytes = uncovered_bytes
        self._since_s = now_s if uncovered_bytes else math.inf
        self._since_saved_s = math.inf  # the first change after the last saved state

    def counts(self, size: int, now_s: float, *, changes: bool) -> None:
        """Note an entry that counts. The age of one that `changes` no state does not matter."""
        self._bytes += size
        if changes:
            self._since_s = min(self._since_s, now_s)
            self._since_saved_s = min(self._since_saved_s, now_s)

    def due_s(self, now_s: float) -> float:
        """Return when a snapshot is due, perhaps in the past; infinite if nothing needs one."""
        return now_s if self._bytes >= UNCOVERED_BYTES_MAX else self._since_s + self._age_s_max

    def saved(self) -> None:
        """Note that a snapshot with the state of this moment is being stored."""
        self._saved_bytes, self._since_saved_s = self._bytes, math.inf

    def covered(self) -> None:
        """Note that the entry of that snapshot counts."""
        self._bytes -= self._saved_bytes
        self._saved_bytes, self._since_s = 0, self._since_saved_s


class StateOwner:
    """See the module. Times are monotonic seconds of one process."""

    def __init__(self, fold: StateFold, pace: SnapshotPace) -> None:
        self.fold = fold
        self.epoch = fold.epoch
        self.pace = pace
        self.phase = OwnerPhase.IDLE
        self.end_cause: MemqError | None = None
        self.proved_s = -math.inf  # at this moment no higher epoch was in the log
        self.waiting_bytes = 0
        self._waiting: deque[tuple[int, StateDecision | None]] = deque()
        self._sealed: SealedEntry | None = None
        self._naming: tuple[StateSnapshot, float] | None = None  # a stored snapshot, and until when it may be named
        self._tickets = 0
        self._settled: list[Settled] = []
        self._trims: list[TrimStep] = []
        self._unread = False
        self._known_end = fold.offset
        if fold.snapshot is not None:  # its owner may have died before it trimmed
            self._trims.append(TrimStep(fold.snapshot.offset, None))

    # ---- proposals ---------------------------------------------------------------------------

    def propose(self, decision: StateDecision | None) -> int:
        """Add a decision to the next entry, or None for a proof (S6); return the ticket of its outcome.

        A proof counts like a decision: its entry is made after the request came in. A read of the queue would be no
        proof, because a replica that lags shows an early end. Raises: TooLargeError.
        """
        assert self.phase is not OwnerPhase.ENDED, "the owner has ended"
        self.waiting_bytes += decision_bytes(*decision) if decision else 0
        self._tickets += 1
        self._waiting.append((self._tickets, decision))
        return self._tickets

    def take_settled(self) -> list[Settled]:
        """Return the outcomes since the last call."""
        settled, self._settled = self._settled, []
        return settled

    @property
    def busy(self) -> bool:
        """Whether proposals have no outcome yet."""
        return bool(self._waiting or self._sealed)

    def has_ended(self) -> bool:
        """Whether the epoch has ended for this owner."""
        return self.phase is OwnerPhase.ENDED

    # ---- steps -------------------------------------------------------------------------------

    def next_step(self, now_s: float) -> PublishStep | ReadStep | None:
        """Begin the next step; None: there is nothing to do, or the owner has ended."""
        if self.has_ended():
            return None
        assert self.phase is OwnerPhase.IDLE, "one step at a time (S5)"
        if self._unread:
            self._become(OwnerPhase.READING)
            return ReadStep(self.fold.offset, self._known_end)
        if self._naming is not None and now_s > self._naming[1]:
            self._drop_snapshot()
            if self.end_cause:
                return None
        if self._sealed is None:
            self._sealed = self._seal()
        if self._sealed is None:
            return None
        self._sealed.since_s = min(self._sealed.since_s, now_s)
        self._become(OwnerPhase.PUBLISHING)
        return PublishStep(self._sealed.body)

    def _seal(self) -> SealedEntry | None:
        """Make the next entry: the name of a snapshot, else as many waiting proposals as fit."""
        tickets: list[tuple[int, bool]] = []
        content: StateSnapshot | StateDecisions
        if self._naming is not None:
            content = self._naming[0]
        elif self._waiting:
            decisions: list[StateDecision] = []
            room = POINTER_BYTES_MAX - HEAD.size
            while self._waiting:
                ticket, decision = self._waiting[0]
                size = decision_bytes(*decision) if decision else 0
                if size > room:
                    break
                room -= size
                self.waiting_bytes -= size
                self._waiting.popleft()
                tickets.append((ticket, decision is not None))
                decisions += [decision] if decision else []
            content = StateDecisions(tuple(decisions))
        else:
            return None
        entry = StateEntry(self.epoch, self.fold.number, content)
        return SealedEntry(entry, encode_state_entry(entry), tuple(tickets))

    def published(self, offset: int, now_s: float) -> None:
        """The queue has put the entry at `offset`. An offset that does not follow says nothing (S4)."""
        if self.has_ended():
            return
        self._become(OwnerPhase.IDLE)
        assert self._sealed is not None, "nothing is on its way"
        if offset == self.fold.offset:
            self.meet(offset, self._sealed.entry, now_s)
        elif offset > self.fold.offset:
            self._unread, self._known_end = True, max(self._known_end, offset + 1)
        else:
            self.end(LogCutError(f"the queue put an entry at offset {offset}, below {self.fold.offset}"))

    def failed(self) -> None:
        """A step has failed, timed out or was refused. A publish may have landed, or may land later (S5)."""
        if not self.has_ended():
            self._become(OwnerPhase.IDLE)
            self._unread = True

    def read(self, next_: int) -> None:
        """The log was read to its end: `next_` is the offset after the last entry."""
        if self.has_ended():
            return
        self._become(OwnerPhase.IDLE)
        self._unread = False
        if next_ > self.fold.offset:
            self.end(LogLostError(f"the state log has nothing from offset {self.fold.offset} to {next_}"))

    def meet(self, offset: int, entry: StateEntry, now_s: float) -> None:
        """Take an entry of the log; one that is known changes nothing."""
        if self.has_ended() or offset < self.fold.offset:
            return
        if offset > self.fold.offset:
            self.end(LogLostError(f"the state log has nothing from offset {self.fold.offset} to {offset}"))
            return
        replaced = self.fold.snapshot
        judgement, answers = self.fold.meet(offset, entry) if self._is_expected(entry) else (Judgement.GAP, ())
        if judgement is Judgement.GAP:
            text = f"offset {offset} of the state log has entry {entry.number} of epoch {entry.epoch}, which can't be"
            self.end(LogLostError(text))
        elif judgement is Judgement.COUNTS and isinstance(entry.content, OpenedState):
            self._fence(EpochFencedError(f"epoch {self.epoch} of the state log is over: epoch {entry.epoch} is open"))
        elif judgement is Judgement.COUNTS:
            self._counts(answers, replaced, now_s)

    def _is_expected(self, entry: StateEntry) -> bool:
        """Whether an entry can be in the log: the next one of this epoch is the one on its way, and no other."""
        if isinstance(entry.content, OpenedState) or (entry.epoch, entry.number) != (self.epoch, self.fold.number):
            return True
        return self._sealed is not None and entry == self._sealed.entry

    def _counts(self, answers: tuple[Answer, ...], replaced: StateSnapshot | None, now_s: float) -> None:
        """The entry on its way counts: answer its proposals (S4); after a snapshot, trim (S7)."""
        sealed, self._sealed = self._sealed, None
        assert sealed is not None, "an entry of this epoch counts, and none was on its way"
        left = iter(answers)
        for ticket, is_decision in sealed.tickets:
            self._settled.append(Settled(ticket, ProposalFate.COUNTS, next(left) if is_decision else None))
        self.proved_s = max(self.proved_s, sealed.since_s)
        self.pace.counts(len(sealed.body), now_s, changes=bool(answers))
        if isinstance(sealed.entry.content, StateSnapshot):
            self._naming = None
            self.pace.covered()
            self._trims.append(TrimStep(sealed.entry.content.offset, replaced))

    # ---- snapshots ---------------------------------------------------------------------------

    def save(self) -> Iterator[SavedState | None]:
        """Return the steps to the state that counts now, for a snapshot (S7). See `StateFold.begin_save`."""
        assert self._naming is None, "one snapshot at a time"
        self.pace.saved()
        return self.fold.begin_save()

    def name(self, snapshot: StateSnapshot, until_s: float) -> None:
        """Name a stored snapshot by the next entry, which is handed over until `until_s` and not later.

        The sweep deletes objects that no entry names, after a safety age (ADR 6).
        """
        self._naming = (snapshot, until_s)

    @property
    def naming(self) -> bool:
        """Whether a stored snapshot waits for its entry to count."""
        return self._naming is not None

    def take_trims(self) -> list[TrimStep]:
        """Return the trims since the last call."""
        trims, self._trims = self._trims, []
        return trims

    def _drop_snapshot(self) -> None:
        """Name a snapshot no more: its object is too old. If its entry is on its way, the epoch ends."""
        assert self._naming is not None, "no snapshot waits"
        snapshot, self._naming = self._naming[0], None
        if self._sealed is not None and self._sealed.entry.content == snapshot:
            self.end(QueueError(f"the entry of snapshot '{snapshot.key}' did not count in the time of its key"))

    # ---- the end -----------------------------------------------------------------------------

    def end(self, cause: MemqError) -> None:
        """End the epoch: this owner does not know what counts from now on."""
        self._end(cause, ProposalFate.UNKNOWN)

    def _fence(self, cause: MemqError) -> None:
        """End the epoch behind a higher `opened`: what did not count before it is void for ever (S5)."""
        self._end(cause, ProposalFate.VOID)

    def _end(self, cause: MemqError, on_its_way: ProposalFate) -> None:
        if self.has_ended():
            return
        self._become(OwnerPhase.ENDED)
        self.end_cause = cause
        sealed = self._sealed.tickets if self._sealed is not None else ()
        self._settled += [Settled(ticket, on_its_way) for ticket, _ in sealed]
        self._settled += [Settled(ticket, ProposalFate.VOID) for ticket, _ in self._waiting]
        self._sealed = self._naming = None
        self._waiting.clear()
        self.waiting_bytes = 0

    def _become(self, phase: OwnerPhase) -> None:
        assert phase in SUCCESSORS[self.phase], f"{self.phase.name} to {phase.name}"
        self.phase = phase
