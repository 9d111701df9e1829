"""The rules of delayed records, by the logs alone: none early, none undecided, none cancelled, none lost (H1 to H5).

Counts of those that wait are right for all service partitions, also while some move (S6).

Each record is its own stream, so that `Checker` finds a record that comes twice. The state logs say what was decided:
`StateLogs` folds them as their entries land.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from memq.client.producer.delayed import CancelOutcome
from memq.format.held_object import HoldId, Target
from memq.holds.decisions import HoldState
from memq.simulation.ports.groups import StateLogs
from memq.simulation.world.node import EPOCH_MS, FOREVER
from memq.topic import ReadPartition
from tests.simulation.reader import Delivered

CALM_LATE_S = 8.0  # an opening and some back-offs after a record is due
QUESTIONS_MAX = 50
Counts = dict[tuple[ReadPartition, Target], int]  # of delayed records that wait, by state log and target


@dataclass(slots=True)
class Delayed:
    """A delayed record: when it is due (Unix ms of the true time), what its producer did and learned, its landing."""

    due_ms: int
    hold: HoldId | None = None  # as the producer learned
    held_s: float = FOREVER
    cancelling: bool = False  # the cancel was asked for
    outcome: CancelOutcome | None = None
    landed_s: float = FOREVER


class CountQuestion:
    """A question for the waiting records: the least and the most of each log and target until its answer."""

    def __init__(self, counts: Counts) -> None:
        self.least = dict(counts)
        self.most = dict(counts)

    def meet(self, counts: Counts) -> None:
        """Note the counts after an entry of a log."""
        for place in counts.keys() | self.most.keys():
            count = counts.get(place, 0)
            self.least[place] = min(count, self.least.get(place, 0))
            self.most[place] = max(count, self.most.get(place, 0))


class DelayRules:
    """`fail` gets each finding; `now` is the virtual time, and clocks of processes differ from it by `error_ms`."""

    def __init__(
        self,
        states: StateLogs,
        fail: Callable[[str], None],
        now: Callable[[], float],
        error_ms: int,
        *,
        calm: bool,
    ) -> None:
        self.records: dict[bytes, Delayed] = {}
        self._states = states
        self._fail = fail
        self._now = now
        self._error_ms = error_ms
        self._calm = calm
        self._questions: dict[CountQuestion, None] = {}
        states.changed = self._changed

    def ask_counts(self) -> CountQuestion:
        """A program is about to ask how many records wait."""
        question = CountQuestion(self._counts())
        self._questions[question] = None
        while len(self._questions) > QUESTIONS_MAX:  # of programs that were killed
            del self._questions[next(iter(self._questions))]
        return question

    def counted(self, question: CountQuestion, topic_id: str, found: Mapping[int, int] | None) -> None:
        """A program got the counts by partition, or an error (None). Each log is counted once, at one moment (S6)."""
        if question not in self._questions:
            return
        del self._questions[question]
        places = [place for place in question.most if place[1].topic_id == topic_id] if found is not None else []
        for partition in sorted({target.partition for _, target in places}):
            least = sum(question.least[place] for place in places if place[1].partition == partition)
            most = sum(question.most[place] for place in places if place[1].partition == partition)
            count = found.get(partition, 0) if found is not None else 0
            if not least <= count <= most:
                self._fail(f"{least} to {most} delayed records wait in partition {partition}, the answer was {count}")

    def _changed(self, _log: ReadPartition) -> None:
        if self._questions:
            counts = self._counts()
            for question in self._questions:
                question.meet(counts)

    def _counts(self) -> Counts:
        logs = self._states.holds.items()
        return {(log, target): count for log, each in logs for target, count in each.waiting.items()}

    def sent(self, value: bytes, due_ms: int) -> None:
        """A producer is about to delay a record."""
        self.records[value] = Delayed(due_ms)

    def held(self, value: bytes, hold: HoldId) -> None:
        """A producer was notified that the record is held."""
        record = self.records[value]
        record.hold, record.held_s = hold, self._now()

    def cancelling(self, value: bytes) -> None:
        """A producer is about to cancel a record: from now on it may be dropped, also if the answer gets lost."""
        self.records[value].cancelling = True

    def cancelled(self, value: bytes, outcome: CancelOutcome) -> None:
        """A producer was notified of the end of a record that it cancelled."""
        record = self.records[value]
        if record.outcome is not None and record.outcome is not outcome:
            self._fail(f"delayed record {value[:40]!r} is {outcome}, and was {record.outcome}")
        record.outcome = outcome
        if outcome is CancelOutcome.CANCELLED and record.landed_s < FOREVER:
            self._fail(f"delayed record {value[:40]!r} is cancelled, and was delivered")
        if outcome is CancelOutcome.CANCELLED and record.hold not in self._states.dropped:
            self._fail(f"delayed record {value[:40]!r} is cancelled, and no log dropped it")
        if outcome is CancelOutcome.UNKNOWN and record.held_s < FOREVER:
            self._fail(f"delayed record {value[:40]!r} was held, and is unknown")

    def cancelled_holds(self) -> list[HoldId]:
        """Return the holds of which producers were notified that they are cancelled."""
        cancelled = [each for each in self.records.values() if each.outcome is CancelOutcome.CANCELLED]
        return [each.hold for each in cancelled if each.hold is not None]

    def landed(self, found: Delivered) -> None:
        """A record is in the log of its partition."""
        record = self.records.get(found.value)
        if record is None:
            return
        record.landed_s = self._now()
        early_ms = record.due_ms - self._error_ms - int(EPOCH_MS + self._now() * 1_000)
        if early_ms > 0:
            self._fail(f"delayed record {found.value[:40]!r} is delivered {early_ms} ms before it is due")
        if record.outcome is CancelOutcome.CANCELLED:
            self._fail(f"delayed record {found.value[:40]!r} is delivered, and was cancelled")
        state = self._states.state_of(HoldId(found.source[1], found.sequence))
        if state is not HoldState.RELEASED:
            self._fail(f"delayed record {found.value[:40]!r} is delivered, and its state is {state}")
        due_s = max((record.due_ms + self._error_ms - EPOCH_MS) / 1_000, record.held_s if self._calm else 0.0)
        if self._calm and record.held_s < FOREVER and self._now() - due_s > CALM_LATE_S:
            self._fail(f"delayed record {found.value[:40]!r} is {self._now() - due_s:.1f} s late in a calm world")

    def missing(self) -> list[bytes]:
        """Return the records of which producers learned that they are held or delivered, and that are not in the log.

        A record that was dropped after its producer asked for it is not missing, also if the answer got lost.
        """
        return [
            value
            for value, record in self.records.items()
            if record.landed_s == FOREVER
            and not (record.cancelling and record.hold in self._states.dropped)
            and (record.held_s < FOREVER or record.outcome is CancelOutcome.DELIVERED)
        ]
