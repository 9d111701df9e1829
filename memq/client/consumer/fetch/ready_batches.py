"""Batches between cursors and user: prepared, delivered, not yet finished. Pure.

Theory: a request to the I/O thread costs 100 µs of CPU, since it wakes two threads: 200 ns for each record of 1 KB. So
one request brings several batches, and the thread of a sync consumer takes the others from here without the I/O
thread. That needs no lock: the I/O thread adds no batch meanwhile, and each of its reads is one atomic step on a deque.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from memq.client.consumer.assigned import Assigned
from memq.client.consumer.batch import Batch
from memq.client.consumer.progress import LedgerEntry
from memq.topic import Position, Totals


@dataclass(slots=True)
class ReadyBatch:
    """A batch, the partition that it is from, its entry there, and the totals before its pointer."""

    assigned: Assigned
    batch: Batch
    totals: Totals
    entry: LedgerEntry
    done: bool = False


class ReadyBatches:
    """The batches of one consumer. A batch is done when the next one is requested.

    With `urgent` the next request must reach the I/O side, before the prepared batches are taken. With `settled_by`
    the user settles batches in any order: that function is called before a commit, and reports what is done. While
    `holding`, the consumer returns no batches, only changes of its assignment and errors.
    """

    def __init__(self, settled_by: Callable[[], None] | None = None) -> None:
        self.urgent = False
        self.holding = False
        self._settled_by = settled_by
        self._ahead: deque[ReadyBatch] = deque()
        self._handed: deque[ReadyBatch] = deque()
        self._asked: ReadyBatch | None = None  # handed out by the current request, or the last one
        self._dropped_records = 0

    def __iter__(self) -> Iterator[ReadyBatch]:
        """Yield the prepared batches, the next one first."""
        return iter(self._ahead)

    def add(self, ready: ReadyBatch) -> None:
        """Add a batch after the prepared ones."""
        self._ahead.append(ready)

    def ask(self) -> None:
        """Note that a request begins: the user has all batches that were handed out before."""
        self._asked = None

    def take_back(self) -> None:
        """Put the batch of the current request back before the others: it has not reached the user."""
        asked, self._asked = self._asked, None
        if asked is not None and self._handed[-1] is asked:
            self._ahead.appendleft(self._handed.pop())

    def finish(self) -> None:
        """Note that the next batch is requested: the last one is done."""
        if self._handed:
            self._handed[-1].done = True

    def take(self) -> Batch | None:
        """Hand out the next batch of a partition that is still read and not paused; None without one."""
        paused: list[ReadyBatch] = []
        found = None
        while self._ahead and found is None:
            ready = self._ahead.popleft()
            if ready.assigned.removed:
                self._dropped_records += len(ready.batch)
            elif ready.assigned.cursor.paused:
                paused.append(ready)
            else:
                found = ready
        self._ahead.extendleft(reversed(paused))
        if found is None:
            return None
        if self._settled_by is None:
            self._handed.append(found)
        self._asked = found
        return found.batch

    @property
    def taken(self) -> ReadyBatch | None:
        """The batch that was handed out last."""
        return self._asked

    def settle(self) -> None:
        """Report finished batches to their ledgers."""
        if self._settled_by is not None:
            self._settled_by()
        while self._handed and self._handed[0].done:
            ready = self._handed.popleft()
            ready.assigned.ledger.finish(ready.batch.next)

    def settle_finished(self) -> None:
        """Report batches that were read completely, before the next is requested.

        Only call it while the user waits: then no batch changes.
        """
        for ready in self._handed:
            if ready.batch.finished:
                ready.assigned.ledger.finish(ready.batch.next)

    def ahead_of(self, assigned: Assigned) -> tuple[Position, Totals] | None:
        """Return the position of the next prepared batch of a partition, and the totals before its pointer.

        None without one. Only call it, and the methods below, while the user waits.
        """
        for ready in self:
            if ready.assigned is assigned:
                return ready.batch.first, ready.totals
        return None

    @property
    def waiting(self) -> bool:
        """Whether there are prepared batches."""
        return bool(self._ahead)

    @property
    def records_kept(self) -> int:
        """Number of records that were counted as delivered, and did not reach the user yet, or were dropped."""
        return self._dropped_records + sum(len(ready.batch) for ready in self)
