"""The rules of delayed records, by the logs alone: none early, none undecided, none cancelled, none lost (H1 to H5).

Each record is its own stream, so that `Checker` finds a record that comes twice. The state logs say what was decided:
`StateLogs` folds them as their entries land.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memq.client.producer.delayed import CancelOutcome
from memq.format.held_object import HoldId
from memq.holds.machine import HoldState
from memq.simulation.ports.groups import StateLogs
from memq.simulation.world.node import EPOCH_MS, FOREVER
from tests.simulation.reader import Delivered

CALM_LATE_S = 8.0  # an opening and some back-offs after a record is due


@dataclass(slots=True)
class Delayed:
    """A delayed record: when it is due (Unix ms of the true time), what its producer did and learned, its landing."""

    due_ms: int
    hold: HoldId | None = None  # as the producer learned
    held_s: float = FOREVER
    cancelling: bool = False  # the cancel was asked for
    outcome: CancelOutcome | None = None
    landed_s: float = FOREVER


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
