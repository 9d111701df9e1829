"""Counts queue items of a service partition, for the metrics of its broker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from memq.holds.keeper import Durations
from memq.queues.block import QueueBlock
from memq.queues.decisions import GrantedBlock, ItemOutcome, LeasedItems, Outcomes, with_outcomes
from memq.runtime.clock import Clock

COUNT_S_MIN = 1.0  # between two counts
COUNT_TIMES = 50  # a count takes at most 2 % of the time


class QueueCounters(Protocol):
    """The counters of queue items of a broker."""

    queue_enqueued_items: int
    queue_leased_items: int
    queue_redelivered_items: int
    queue_acked_items: int
    queue_nacked_items: int
    queue_expired_items: int
    queue_dead_items: int
    queue_cancelled_items: int

    @property
    def queue_processing_seconds(self) -> Durations:
        """Durations in seconds from the first due time of items to their acks."""


class QueueCounts(NamedTuple):
    """Numbers of items of a queue by state; `oldest_ms` (Unix ms) is the earliest due time of ready items."""

    ready: int
    leased: int
    delayed: int
    dead: int
    oldest_ms: int


class QueueMeter:
    """Counts decisions, and keeps the last sums of a service partition."""

    def __init__(self, counters: QueueCounters, clock: Clock, shard: int) -> None:
        self.shard = shard
        self.sums = QueueCounts(0, 0, 0, 0, 0)
        self._counters = counters
        self._clock = clock
        self._next_s = 0.0

    def enqueued(self, count: int) -> None:
        """Count new items."""
        self._counters.queue_enqueued_items += count

    def granted(self, blocks: Sequence[GrantedBlock]) -> None:
        """Count leases. A lease of an at-most-once item is also its ack."""
        for each in blocks:
            self._counters.queue_leased_items += each.granted
            self._counters.queue_redelivered_items += sum(run.end - run.begin for run in each.items if run.attempt > 1)
            if not each.lease_ms:
                self._acked(each.block.due_ms, each.granted)

    def changed(self, leases: Sequence[LeasedItems], outcomes: Outcomes, due_ms: Mapping[int, int]) -> None:
        """Count the outcomes of acks, nacks and ends. `due_ms` has the first due time of each block (Unix ms)."""
        for block, begin, end, outcome in with_outcomes((lease.items for lease in leases), outcomes):
            match outcome:
                case ItemOutcome.ACKED:
                    self._acked(due_ms.get(block, 0), end - begin)
                case ItemOutcome.RETURNED:
                    self._counters.queue_nacked_items += end - begin
                case ItemOutcome.DEAD:
                    self._counters.queue_dead_items += end - begin
                case ItemOutcome.EXPIRED:
                    self._counters.queue_expired_items += end - begin

    def cancelled(self, outcomes: Outcomes) -> None:
        """Count items that were cancelled."""
        self._counters.queue_cancelled_items += sum(
            run.items for run in outcomes if run.outcome is ItemOutcome.CANCELLED
        )

    def _acked(self, due_ms: int, count: int) -> None:
        self._counters.queue_acked_items += count
        if due_ms:
            delay_s = max(0, self._clock.wall_ms() - due_ms) / 1_000
            self._counters.queue_processing_seconds.observe(delay_s, count)

    @property
    def is_due(self) -> bool:
        """Whether the sums are old enough to be counted again."""
        return self._clock.monotonic() >= self._next_s

    def take(self, sums: QueueCounts, took_s: float) -> None:
        """Set the sums. Their count took `took_s`, which sets the time of the next one."""
        self.sums = sums
        self._next_s = self._clock.monotonic() + max(COUNT_S_MIN, COUNT_TIMES * took_s)

    def oldest_s(self) -> float:
        """Return the age of the oldest ready item in seconds; 0 without one."""
        if not self.sums.ready:
            return 0.0
        return max(0, self._clock.wall_ms() - self.sums.oldest_ms) / 1_000


def dues_of(blocks: Mapping[int, QueueBlock], leases: Sequence[LeasedItems]) -> dict[int, int]:
    """Return the first due times of the blocks of leases."""
    return {
        lease.items.block: blocks[lease.items.block].block.due_ms for lease in leases if lease.items.block in blocks
    }


def sum_of(counts: Mapping[str, QueueCounts]) -> QueueCounts:
    """Return the sums over queues, and the oldest time of all."""
    oldest = min((each.oldest_ms for each in counts.values() if each.ready), default=0)
    sums = [sum(column) for column in zip(*counts.values(), strict=True)] or [0] * 5
    return QueueCounts(sums[0], sums[1], sums[2], sums[3], oldest)


def count_waiting(counts: list[int], due_ms: int, items: int, now_ms: int) -> None:
    """Count items without a worker in the fields of `QueueCounts`."""
    if due_ms > now_ms:
        counts[2] += items
        return
    counts[0] += items
    counts[4] = min(counts[4] or due_ms, due_ms)
