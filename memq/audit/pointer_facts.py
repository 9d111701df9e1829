"""Totals, epochs and beginning of a write partition, as its pointers state them. Pure.

Each pointer states how many records its write partition had before it. So the pointer after a batch proves that the
batch existed, also if its producer never reported an end, and if its batch sequence was the last of its epoch. Only
"more than was shown" is a finding: a late pointer is in the log before an owner finds and counts it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from memq.audit.released import ReleaseFacts
from memq.format.pointer import Pointer


@dataclass(slots=True)
class RunningTotals:
    """The records of one write partition, as its pointers show them from the first one on.

    `begin` is the queue's.
    """

    begin: int
    shown: int | None = None

    def forget(self) -> None:
        """Begin again with the next pointer: an unreadable one was met."""
        self.shown = None

    def take(self, pointer: Pointer, *, follows_copies: bool) -> int:
        """Return how many records the pointer counts that were not shown before it.

        Each is reported once.
        0 while it follows what may be copies of pointers that retention took: with them went what it counts.
        """
        stated = pointer.totals.records
        if self.shown is None:
            self.shown = stated
        else:  # what retention took was shown once, and may be counted only now
            self.shown += sum(late.records for late in pointer.adopted if late.offset < self.begin)
        missing = max(stated - self.shown, 0)
        self.shown += missing + pointer.records
        return 0 if follows_copies else missing


@dataclass(slots=True)
class PointerFacts:
    """Facts from the pointers of one write partition, apart from its producers.

    When retention took something before its first pointer (`expired`), its pointers up to the queue time `copies_ms`
    may be copies of that, landed late: the queue refuses what is older than the topic's bound. `epoch` is the highest
    that was met. `owners` has the broker of each epoch, "" once the epoch was closed in order.
    """

    expired: bool = False
    copies_ms: int = -1
    epoch: int = 0
    totals: RunningTotals | None = None  # None before the first pointer
    owners: dict[int, str] = field(default_factory=dict)
    released: ReleaseFacts = field(default_factory=ReleaseFacts)

    def begin(self, pointer: Pointer, begin: int, time_ms: int, late_ms: int) -> None:
        """Begin with the first pointer of a log that begins at the offset `begin`; `late_ms` bounds late ones."""
        self.expired = begin > 0 and pointer.totals.records > 0
        self.copies_ms = time_ms + late_ms if self.expired else -1
        self.totals = RunningTotals(begin)
        self.released.begun = True

    def meet(self, pointer: Pointer, time_ms: int) -> int:
        """Take a pointer; return how many records it counts that no pointer before it shows."""
        assert self.totals is not None, "the first pointer begins"
        self.epoch = max(self.epoch, pointer.epoch)
        if pointer.kind == "closed":
            self.owners[pointer.epoch] = ""
        else:
            self.owners.setdefault(pointer.epoch, pointer.broker)
        return self.totals.take(pointer, follows_copies=time_ms <= self.copies_ms)

    def holders(self) -> list[str]:
        """Return the brokers that may hold records of it: those that own it, or lost an epoch of it."""
        return sorted({broker for broker in self.owners.values() if broker})

    def may_be_late(self) -> bool:
        """Whether an epoch was lost, not closed, so that a pointer of it may land after its end."""
        return any(broker and epoch < self.epoch for epoch, broker in self.owners.items())

    def forget_totals(self) -> None:
        """Begin the totals again: an entry that was not read may explain their difference."""
        if self.totals is not None:
            self.totals.forget()
        self.released.forget()
