"""A broker's counters, their export to Prometheus, and its partitions' load for the governor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields

from prometheus_client.core import HistogramMetricFamily, Metric

from memq.broker.ingest.quota_book import QuotaBook
from memq.broker.ingest.quotas import Quotas
from memq.governor import Load
from memq.observe.metrics import METRICS, lines_of
from memq.queues.meter import QueueMeter
from memq.storage_handlers import CountingStore, StorageHandler
from memq.topic import PartitionKey

LATENCY_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
PROCESSING_BOUNDS_S = (
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    300.0,
    1_800.0,
    7_200.0,
    86_400.0,
)
LOADS_MAX = 1_000  # partitions whose load is reported, the busiest first: one node of the coordinator holds them
_LOAD_DIGITS = 2


class Histogram:
    """Counts of seconds by bucket; `observe` costs a scan of a short tuple, once per batch."""

    def __init__(self, bounds_s: tuple[float, ...] = LATENCY_BOUNDS_S) -> None:
        self._bounds_s = bounds_s
        self.counts = [0] * (len(bounds_s) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float, count: int = 1, /) -> None:
        """Count a duration, `count` times."""
        self.sum_s += seconds * count
        for number, bound in enumerate(self._bounds_s):
            if seconds <= bound:
                self.counts[number] += count
                return
        self.counts[-1] += count

    def buckets(self) -> list[tuple[str, float]]:
        """Return cumulative counts by upper bound, in the format of Prometheus."""
        total, found = 0, []
        for bound, count in zip((*map(str, self._bounds_s), "+Inf"), self.counts, strict=True):
            total += count
            found.append((bound, float(total)))
        return found


@dataclass(slots=True)
class Counters:
    """Counters of a broker.

    Each field is the metric of the same name after `memq_broker_` in `memq.observe.metrics`.
    """

    received_bytes: int = 0
    received_blocks: int = 0
    received_records: int = 0
    duplicate_blocks: int = 0
    conflicting_blocks: int = 0
    refused_blocks: int = 0
    throttled_blocks: int = 0
    sealed_batches: int = 0
    stored_objects: int = 0
    stored_bytes: int = 0
    store_retries: int = 0
    published_pointers: int = 0
    publish_retries: int = 0
    skipped_blocks: int = 0
    late_pointers: int = 0
    damaged_pointers: int = 0
    openings: int = 0
    opening_retries: int = 0
    coordinator_failures: int = 0
    fenced: int = 0
    suspicions: int = 0
    early_takeovers: int = 0
    forwarded_blocks: int = 0
    forward_retries: int = 0
    given_up_blocks: int = 0
    lost_held_blocks: int = 0
    spool_kept_blocks: int = 0
    spooled_blocks: int = 0
    spooled_bytes: int = 0
    spool_syncs: int = 0
    spool_copied_bytes: int = 0
    spool_refused_blocks: int = 0
    replayed_blocks: int = 0
    spool_damages: int = 0
    spool_undecided_blocks: int = 0
    acks: int = 0
    read_requests: int = 0
    read_hot_requests: int = 0
    poll_batches: int = 0
    read_bytes: int = 0
    connections: int = 0
    rejected_connections: int = 0
    turned_away_connections: int = 0
    slow_frames: int = 0
    swept_objects: int = 0
    swept_bytes: int = 0
    kept_objects: int = 0
    unnamed_objects: int = 0
    retired_pointers: int = 0
    retired_objects: int = 0
    retention_cuts: int = 0
    expired_topics: int = 0
    delayed_records: int = 0
    delayed_delivered_records: int = 0
    delayed_cancelled_records: int = 0
    committed_transactions: int = 0
    aborted_transactions: int = 0
    expired_transactions: int = 0
    transaction_checks: int = 0
    queue_enqueued_items: int = 0
    queue_leased_items: int = 0
    queue_redelivered_items: int = 0
    queue_acked_items: int = 0
    queue_nacked_items: int = 0
    queue_expired_items: int = 0
    queue_dead_items: int = 0
    queue_cancelled_items: int = 0
    queue_processing_seconds: Histogram = field(default_factory=lambda: Histogram(PROCESSING_BOUNDS_S))
    delayed_late_seconds: Histogram = field(default_factory=Histogram)
    store_seconds: Histogram = field(default_factory=Histogram)
    publish_seconds: Histogram = field(default_factory=Histogram)
    ack_seconds: Histogram = field(default_factory=Histogram)


class CounterCollector:
    """Reads the counters at a scrape of Prometheus; the data path does not use Prometheus."""

    def __init__(self, counters: Counters, gauges: Mapping[str, Callable[[], float]]) -> None:
        self._counters = counters
        self._gauges = gauges

    def collect(self) -> Iterable[Metric]:
        """Yield one metric per counter, gauge and histogram."""
        for part in fields(Counters):
            value = getattr(self._counters, part.name)
            if isinstance(value, Histogram):
                metric = METRICS[f"memq_broker_{part.name}"]
                yield HistogramMetricFamily(metric.name, metric.help, value.buckets(), value.sum_s)
            else:
                yield lines_of(f"memq_broker_{part.name}", [((), value)])
        for name, read in self._gauges.items():
            yield lines_of(f"memq_broker_{name}", [((), read())])


class QueueCollector:
    """Yields the items of the queues whose shards are open here, by shard and state."""

    def __init__(self, meters: Callable[[], Iterable[QueueMeter]]) -> None:
        self._meters = meters

    def collect(self) -> Iterable[Metric]:
        """Yield one metric per name, `memq_broker_queue_…`, for shards that have items."""
        meters = [each for each in self._meters() if any(each.sums)]
        states = ("ready", "leased", "delayed", "dead")
        items = [((str(each.shard), state), float(getattr(each.sums, state))) for each in meters for state in states]
        yield lines_of("memq_broker_queue_items", items)
        oldest = [((str(each.shard),), each.oldest_s()) for each in meters]
        yield lines_of("memq_broker_queue_oldest_ready_seconds", oldest)
        events = [
            ((queue, event), float(count))
            for meter in self._meters()
            for queue, found in list(meter.events.items())
            for event, count in found._asdict().items()
        ]
        yield lines_of("memq_broker_queue_item_events", events)


class PermissionCollector:
    """Yields the refused requests by operation."""

    def __init__(self, denied: Callable[[], Mapping[str, int]]) -> None:
        self._denied = denied

    def collect(self) -> Iterable[Metric]:
        """Yield one metric, for operations that were refused."""
        yield lines_of("memq_broker_denied_requests", [((name,), count) for name, count in self._denied().items()])


class StoreCollector:
    """Yields the counts of stores that have some, each metric once, with the store as its label."""

    def __init__(self, stores: Mapping[str, StorageHandler]) -> None:
        self._stores = stores

    def collect(self) -> Iterable[Metric]:
        """Yield one metric per name, `memq_store_…`."""
        found: dict[str, list[tuple[tuple[str], float]]] = {}
        for store, handler in self._stores.items():
            for count in handler.counts() if isinstance(handler, CountingStore) else ():
                found.setdefault(count.name, []).append(((store,), count.value))
        for name, series in found.items():
            yield lines_of(f"memq_store_{name}", series)


class QuotaCollector:
    """Yields one counter, with a line for each topic, client or principal that was over its limit."""

    def __init__(self, book: Quotas, principals: QuotaBook) -> None:
        self._book = book
        self._principals = principals

    def collect(self) -> Iterable[Metric]:
        """Yield `memq_broker_over_limit_total`."""
        over = (
            ((limiter.subject, limiter.name, mode), count)
            for limiter in (*self._book.limiters(), *self._principals.limiters())
            for mode, count in limiter.over.items()
            if count
        )
        yield lines_of("memq_broker_over_limit", over)


@dataclass(slots=True)
class Traffic:
    """The load of partitions from their published totals, as rates between two samples.

    A partition that was not open at both of them has none yet.
    """

    _last: dict[PartitionKey, int] = field(default_factory=dict)
    _last_s: float = 0.0

    def sample(self, stored_bytes: Mapping[PartitionKey, int], now_s: float) -> list[Load]:
        """Return the rates since the last call, rounded so that a steady rate is reported once.

        Idle partitions are left out. `stored_bytes` are the bytes that each partition committed since its creation.
        """
        last, span_s = self._last, now_s - self._last_s
        self._last, self._last_s = dict(stored_bytes), now_s
        if span_s <= 0:
            return []
        rates = {key: (count - last[key]) / span_s for key, count in stored_bytes.items() if key in last}
        busy = sorted(((-_rounded(rate), key) for key, rate in rates.items() if rate >= 1))[:LOADS_MAX]
        return [Load(topic_id=key[0], partition=key[1], bytes_s=-rate) for rate, key in sorted(busy, key=_key)]


def _key(entry: tuple[int, PartitionKey]) -> PartitionKey:
    return entry[1]


def _rounded(rate: float) -> int:
    """Return a rate with two significant digits: 123456 is 120000."""
    return int(float(f"{rate:.{_LOAD_DIGITS}g}"))
