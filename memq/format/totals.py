"""How much a write partition committed, folded from its pointers in order.

Pure, the same for owner and reader.
Theory. Let S(x) be the records and bytes of all batches at offsets below x. S counts each pointer of kind `data` once,
copies and late pointers too. Lag is S(end) - S(position), so a reader must know S at its position, even if it can't
read from offset 0.

1. *Stated totals never exceed the real ones.* An owner counts each pointer that it met or published once. So the totals
   T of a pointer P are S(k), where k <= P is the offset up to which the owner had read when it made P. T <= S(P),
   whatever was late, doubled or refused.
2. *So a reader takes the greater of its own count and the stated totals, and then adds the pointer's content.* The
   result never exceeds S. From offset 0 it is S without any statement. From another offset it is S from the first
   *tight* pointer on. A tight pointer has T = S: its owner had read everything before it.
3. *Where a tight pointer is.* P is not tight only if another pointer landed between the owner's last read and P. The
   queue refuses pointers older than the stale-publish bound (or all that are not its owner's own tries). So the queue
   time of that neighbour is before the read by at most the bound plus the clock error. An owner publishes nothing, also
   no `opened`, after a read that is older than a third of the bound. So P is younger than the read by at most that. The
   neighbour is tight itself, or has such a neighbour. In a quiet partition there is none, and P is tight. `CONTENDED`
   spans of this length before a partition's last pointer settle the totals: openings and readers read these spans, and
   retention keeps them.
4. *How a tight pointer is recognised.* An owner reads up to its last pointer before it makes the next, and lists the
   pointers that it met between. Take three adjacent batches of one epoch, numbered in order. Each states the totals
   after the one before it, and adopts nothing. Then the last one is tight: a pointer that came twice is listed by
   the next one but one.

`adopted` needs no fold: it names for the audit the batches that are counted late. T counts all that the owner met, so
the last entry of a full list stands for all late pointers without an entry. If T left them out, P would not be tight,
and (3) would not hold. An owner that opens folds the same way, from a tail that settles (3). It states S of what it
read in `opened`, so no error grows from owner to owner.
"""

from __future__ import annotations

from memq.format.pointer import Adopted, Pointer
from memq.topic import CLOCK_ERROR_MS, Totals

CONTENDED = 2  # how many neighbours in a row may be late before a pointer
PROOFS = 3  # an owner publishes for a third of the stale-publish bound after it has read
RUN = 2  # batches that must follow a first one as (4) requires


class TotalsFold:
    """The totals of one write partition after the last pointer added.

    `settled` is true from the first pointer on that is recognised as tight (4).
    """

    def __init__(self) -> None:
        self.totals = Totals()
        self.settled = False
        self._epoch = 0
        self._batch = -1
        self._run = 0

    def reach(self, stated: Totals) -> None:
        """Raise the totals to those that a pointer states, where these are greater."""
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
    """Return the span of queue time (ms) before a pointer that settles the totals after it (3)."""
    return CONTENDED * (stale_publish_ms + stale_publish_ms // PROOFS + CLOCK_ERROR_MS)


def adopted_of(offset: int, pointer: Pointer) -> Adopted:
    """Return an owner's entry for a late pointer."""
    return Adopted(
        offset=offset,
        epoch=pointer.epoch,
        batch_sequence=pointer.batch_sequence,
        records=pointer.records,
        bytes=pointer.stored_bytes,
    )
