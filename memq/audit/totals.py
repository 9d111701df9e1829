"""Follows stated totals: records that are counted and that no pointer shows are missing. Pure.

Each pointer states how much its write partition held before it. So the pointer behind a batch proves that the batch
was there, also when its producer never said where it ended and its batch sequence was the last of its epoch. Only
"more than was shown" is a finding: late pointers are shown before an owner meets and counts them.
"""

from __future__ import annotations

from dataclasses import dataclass

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
        None while it follows what may be copies of pointers that retention took: with them went what it counts.
        """
        stated = pointer.totals.records
        if self.shown is None:
            self.shown = stated
        else:  # what retention took was shown once, and may be counted only now
            self.shown += sum(late.records for late in pointer.adopted if late.offset < self.begin)
        missing = max(stated - self.shown, 0)
        self.shown += missing + pointer.records
        return 0 if follows_copies else missing
