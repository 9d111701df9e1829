"""How much a write partition committed, folded from its pointers in order.

Pure, the same for owner and reader.
Theory. Let S(x) be what the batches at offsets below x hold: every pointer of kind `data` once, copies and late ones
too. Lag is S(end) - S(here), so whoever is anywhere has to find S there, also one who can't read from offset 0.

1. *What is stated never exceeds what is there.* An owner counts each pointer that it met or published once. So the
   totals T of a pointer P are S(k) for a k up to P, what the owner had read when it made P; late pointers that
   `adopted` has no room for are left out until it has. T <= S(P), whoever was late, doubled or refused.
2. *So a reader takes the greater of what it counted and what is stated, and then adds what the pointer holds.* The
   result never exceeds S. From offset 0 it is S without any statement. From elsewhere it is S from the first *tight*
   pointer on: one with T = S, before which nothing lay that its owner had not read.
3. *Where a tight pointer is.* P is not tight only if something landed between its owner's last reading and P. The
   queue refuses what is older than the stale-publish bound (or all but its owner's own tries), so that neighbour is
   dated at most that and the clocks' error before P's reading; it is tight itself, or has such a neighbour. In a quiet
   partition there is none, and P is tight. `CONTENDED` spans of this length before a partition's last pointer settle
   it: openings and readers read them, retention leaves them.
4. *Where it shows.* An owner reads up to its last pointer before it makes the next, and lists what it met between. So
   of three batches of one epoch, numbered in order, next to each other, each stating what the one before it leads
   to, and adopting nothing, the last one is tight: a pointer that came twice is listed by the next one but one.

`adopted` needs no fold: it tells the audit which batches are counted late. An owner that opens folds the same way, from
a tail that settles (3), and what it states in `opened` is S of what it read: nothing drifts from owner to owner.
"""

from __future__ import annotations

from memq.format.pointer import Adopted, Pointer
from memq.topic import CLOCK_ERROR_MS, Totals

CONTENDED = 2  # how many neighbours in a row may be late before a pointer; each is one stale-publish bound older
RUN = 2  # batches that follow on each other as (4) says, behind the first of them


class TotalsFold:
    """The totals of one write partition behind the last pointer added.

    `settled` once a tight one has shown (4).
    """

    def __init__(self) -> None:
        self.totals = Totals()
        self.settled = False
        self._epoch = 0
        self._batch = -1
        self._run = 0

    def reach(self, stated: Totals) -> None:
        """Take what a pointer states to lie before it, where it is more than was counted."""
        mine = self.totals
        if stated.records > mine.records or stated.bytes > mine.bytes:
            self.totals = Totals(max(stated.records, mine.records), max(stated.bytes, mine.bytes))

    def add(self, pointer: Pointer) -> None:
        """Count the next pointer."""
        if pointer.kind == "data":
            follows = pointer.epoch == self._epoch and pointer.batch_sequence == self._batch + 1
            plain = pointer.totals == self.totals and not pointer.adopted
            self._run = self._run + 1 if follows and plain else 0
            self.settled = self.settled or self._run >= RUN
            self._epoch, self._batch = pointer.epoch, pointer.batch_sequence
        self.reach(pointer.totals)
        self.totals = self.totals.plus(pointer.records, pointer.stored_bytes)


def contended_ms(stale_publish_ms: int) -> int:
    """Return how much queue time before a pointer settles the totals behind it (3)."""
    return CONTENDED * (stale_publish_ms + CLOCK_ERROR_MS)


def adopted_of(offset: int, pointer: Pointer) -> Adopted:
    """Return how an owner names a late pointer."""
    return Adopted(
        offset=offset,
        epoch=pointer.epoch,
        batch_sequence=pointer.batch_sequence,
        records=pointer.records,
        bytes=pointer.stored_bytes,
    )
