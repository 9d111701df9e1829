"""Batches between cursors and user: prepared, delivered, not yet finished. Pure.

Theory: to ask the I/O thread for a batch costs 100 µs of CPU, since two threads that sleep are woken: 200 ns for each
record of 1 KB. So one question brings several batches, and the thread of a sync consumer takes the others from here by
itself. That needs no lock: while it takes them the I/O thread adds none, and what that reads meanwhile are single
steps on a deque, each atomic.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from memq.client.consumer.assigned import Assigned
from memq.client.consumer.batch import Batch
from memq.topic import Position, Totals


@dataclass(slots=True)
class ReadyBatch:
    """A batch, the partition that it is from, and the totals before its pointer."""

    assigned: Assigned
    batch: Batch
    totals: Totals
    done: bool = False


class ReadyBatches:
    """The batches of one consumer. A batch is done when the next one is asked for.

    `urgent` says that the next question must reach the I/O side: there is news that can't wait for what is ahead.
    """

    def __init__(self) -> None:
        self.urgent = False
        self._ahead: deque[ReadyBatch] = deque()
        self._handed: deque[ReadyBatch] = deque()
        self._asked: ReadyBatch | None = None  # handed out by the question under way, or the last one
        self._dropped_records = 0

    def __iter__(self) -> Iterator[ReadyBatch]:
        """Yield those that are ahead, the next one first."""
        return iter(self._ahead)

    def add(self, handout: ReadyBatch) -> None:
        """Put a batch after those that are ahead."""
        self._ahead.append(handout)

    def ask(self) -> None:
        """A question begins; whatever was handed out before has arrived."""
        self._asked = None

    def take_back(self) -> None:
        """Put what the question under way has handed out back before the others: it has not arrived."""
        asked, self._asked = self._asked, None
        if asked is not None and self._handed[-1] is asked:
            self._ahead.appendleft(self._handed.pop())

    def finish(self) -> None:
        """The next batch is asked for: the last one is done."""
        if self._handed:
            self._handed[-1].done = True

    def take(self) -> Batch | None:
        """Hand out the next batch; None when there is none whose partition is read, and not paused, now."""
        paused: list[ReadyBatch] = []
        found = None
        while self._ahead and found is None:
            handout = self._ahead.popleft()
            if handout.assigned.removed:
                self._dropped_records += len(handout.batch)
            elif handout.assigned.cursor.paused:
                paused.append(handout)
            else:
                found = handout
        self._ahead.extendleft(reversed(paused))
        if found is None:
            return None
        self._handed.append(found)
        self._asked = found
        return found.batch

    def settle(self) -> None:
        """Report finished batches to their ledgers."""
        while self._handed and self._handed[0].done:
            handout = self._handed.popleft()
            handout.assigned.ledger.finish(handout.batch.next)

    def settle_finished(self) -> None:
        """Report batches that were read completely, before the next is requested.

        While the user waits for this: only then it does not change.
        """
        for handout in self._handed:
            if handout.batch.finished:
                handout.assigned.ledger.finish(handout.batch.next)

    def ahead_of(self, assigned: Assigned) -> tuple[Position, Totals] | None:
        """Return what comes next in a partition, and the totals before its pointer, when that was made ahead.

        While the user waits for this, as all that follows.
        """
        for handout in self:
            if handout.assigned is assigned:
                return handout.batch.first, handout.totals
        return None

    @property
    def waiting(self) -> bool:
        """Whether there are batches that were made ahead."""
        return bool(self._ahead)

    @property
    def records_kept(self) -> int:
        """How many records were counted as delivered, and are ahead or were dropped there."""
        return self._dropped_records + sum(len(handout.batch) for handout in self)
