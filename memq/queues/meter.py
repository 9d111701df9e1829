"""Counts queue items of a service partition, for the metrics of its broker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from memq.holds.keeper import Durations
from memq.queues.block import QueueBlock
from memq.queues.decisions import GrantedBlock, ItemOutcome, LeasedItems, Outcomes, with_outcomes
from memq.runtime.clock import Clock

COUNT_S_MIN = 1.0  # between two counts
QUEUES_COUNTED_MAX = 25  # queues of a service partition with counts of their own: each is five lines of metrics
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


class QueueEvents(NamedTuple):
    """Numbers of items of a queue by event, or items per second. A redelivered item had a lease before."""

    enqueued: float = 0
    leased: float = 0
    redelivered: float = 0
    acked: float = 0
    dead: float = 0

    def plus(self, **more: int) -> QueueEvents:
        """Return the sum with the counts of some events."""
        return self._replace(**{name: getattr(self, name) + count for name, count in more.items()})


class CountedBlock(NamedTuple):
    """The queue of a block, and its first due time (Unix ms)."""

    queue: str
    due_ms: int


class QueueMeter:
    """Counts decisions, and keeps the last sums of a service partition.

    The queues that were used last have counts and rates of their own.
    """

    def __init__(self, counters: QueueCounters, clock: Clock, shard: int) -> None:
        self.shard = shard
        self.sums = QueueCounts(0, 0, 0, 0, 0)
        self._counters = counters
        self._clock = clock
        self._next_s = 0.0
        self.events: dict[str, QueueEvents] = {}  # by queue, the one that was used last at the end
        self._rates: dict[str, QueueEvents] = {}
        self._before: dict[str, QueueEvents] = {}
        self._rated_s = clock.monotonic()

    def _note(self, queue: str, **counts: int) -> None:
        known = self.events.pop(queue, None)
        if known is None and len(self.events) >= QUEUES_COUNTED_MAX:
            del self.events[next(iter(self.events))]
        self.events[queue] = (known or QueueEvents()).plus(**counts)

    def rates(self, queue: str) -> QueueEvents:
        """Return the events of a queue per second, between the last two counts."""
        return self._rates.get(queue, QueueEvents())

    def enqueued(self, queue: str, count: int) -> None:
        """Count new items."""
        self._counters.queue_enqueued_items += count
        if count:
            self._note(queue, enqueued=count)

    def granted(self, blocks: Sequence[GrantedBlock]) -> None:
        """Count leases. A lease of an at-most-once item is also its ack."""
        for each in blocks:
            self._counters.queue_leased_items += each.granted
            again = sum(run.end - run.begin for run in each.items if run.attempt > 1)
            self._counters.queue_redelivered_items += again
            self._note(each.topic, leased=each.granted, redelivered=again)
            if not each.lease_ms:
                self._acked(CountedBlock(each.topic, each.block.due_ms), each.granted)

    def changed(self, leases: Sequence[LeasedItems], outcomes: Outcomes, origins: Mapping[int, CountedBlock]) -> None:
        """Count the outcomes of acks, nacks and ends; `origins` are those of their blocks before the decision."""
        for block, begin, end, outcome in with_outcomes((lease.items for lease in leases), outcomes):
            match outcome:
                case ItemOutcome.ACKED:
                    self._acked(origins.get(block), end - begin)
                case ItemOutcome.RETURNED:
                    self._counters.queue_nacked_items += end - begin
                case ItemOutcome.DEAD:
                    self._counters.queue_dead_items += end - begin
                    if block in origins:
                        self._note(origins[block].queue, dead=end - begin)
                case ItemOutcome.EXPIRED:
                    self._counters.queue_expired_items += end - begin

    def cancelled(self, outcomes: Outcomes) -> None:
        """Count items that were cancelled."""
        self._counters.queue_cancelled_items += sum(
            run.items for run in outcomes if run.outcome is ItemOutcome.CANCELLED
        )

    def _acked(self, origin: CountedBlock | None, count: int) -> None:
        self._counters.queue_acked_items += count
        if origin is not None:
            self._note(origin.queue, acked=count)
            delay_s = max(0, self._clock.wall_ms() - origin.due_ms) / 1_000
            self._counters.queue_processing_seconds.observe(delay_s, count)

    @property
    def is_due(self) -> bool:
        """Whether the sums are old enough to be counted again."""
        return self._clock.monotonic() >= self._next_s

    def take(self, sums: QueueCounts, took_s: float) -> None:
        """Set the sums. Their count took `took_s`, which sets the time of the next one."""
        self.sums = sums
        now_s = self._clock.monotonic()
        span_s, before = max(COUNT_S_MIN, now_s - self._rated_s), self._before
        self._rates = rates = dict[str, QueueEvents]()
        for queue, each in self.events.items():
            pairs = zip(each, before.get(queue, each), strict=True)
            rates[queue] = QueueEvents(*(max(0.0, now - then) / span_s for now, then in pairs))
        self._before, self._rated_s = dict(self.events), now_s
        self._next_s = self._clock.monotonic() + max(COUNT_S_MIN, COUNT_TIMES * took_s)

    def oldest_s(self) -> float:
        """Return the age of the oldest ready item in seconds; 0 without one."""
        if not self.sums.ready:
            return 0.0
        return max(0, self._clock.wall_ms() - self.sums.oldest_ms) / 1_000


def origins_of(blocks: Mapping[int, QueueBlock], leases: Sequence[LeasedItems]) -> dict[int, CountedBlock]:
    """Return queues and first due times of the blocks of leases."""
    found = {lease.items.block: blocks.get(lease.items.block) for lease in leases}
    return {id_: CountedBlock(block.topic, block.block.due_ms) for id_, block in found.items() if block is not None}


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
