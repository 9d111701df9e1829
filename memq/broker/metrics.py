"""The broker's counters as plain integers, and how Prometheus reads them: one registry for the process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

LATENCY_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Histogram:
    """Counts of seconds by bucket; `observe` costs a scan of a short tuple, once per batch."""

    def __init__(self) -> None:
        self.counts = [0] * (len(LATENCY_BOUNDS_S) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        self.sum_s += seconds
        for number, bound in enumerate(LATENCY_BOUNDS_S):
            if seconds <= bound:
                self.counts[number] += 1
                return
        self.counts[-1] += 1

    def buckets(self) -> list[tuple[str, float]]:
        """Return cumulative counts by upper bound, as Prometheus wants them."""
        total, found = 0, []
        for bound, count in zip((*map(str, LATENCY_BOUNDS_S), "+Inf"), self.counts, strict=True):
            total += count
            found.append((bound, float(total)))
        return found


def _counter(doc: str) -> int:
    return field(default=0, metadata={"doc": doc})


@dataclass(slots=True)
class Counters:
    """What a broker counts. Every field is a counter of the same name in /metrics, after `memq_broker_`."""

    received_bytes: int = _counter("bytes received on the memq port")
    received_blocks: int = _counter("blocks taken from producers")
    received_records: int = _counter("records taken from producers")
    duplicate_blocks: int = _counter("blocks dropped because the queue or the ring held them")
    refused_blocks: int = _counter("blocks that were refused: damaged, too old, out of sequence")
    throttled_blocks: int = _counter("blocks that were not taken because the ring was full")
    sealed_batches: int = _counter("batches sealed")
    stored_objects: int = _counter("objects written to the store")
    stored_bytes: int = _counter("bytes written to the store")
    store_retries: int = _counter("puts that were tried again")
    published_pointers: int = _counter("pointers published in the queue")
    publish_retries: int = _counter("publishes that were tried again")
    skipped_blocks: int = _counter("blocks that a pointer tells readers to pass over")
    late_pointers: int = _counter("pointers of earlier owners met after the opening")
    openings: int = _counter("epochs opened")
    fenced: int = _counter("epochs lost to another owner")
    forwarded_blocks: int = _counter("blocks of lost epochs, acked with 1, that their new owner has published")
    forward_retries: int = _counter("times that no owner took blocks of a lost epoch")
    given_up_blocks: int = _counter("blocks acked with 1 that were given up: no owner took them in time")
    spooled_blocks: int = _counter("blocks written to the spool")
    spooled_bytes: int = _counter("bytes written to the spool")
    spool_syncs: int = _counter("writes of the spool, each with one fsync")
    spool_refused_blocks: int = _counter("blocks not acked with 1 since the spool could not take them")
    replayed_blocks: int = _counter("blocks that an earlier run left in the spool, looked for in the queue")
    spool_damages: int = _counter("places in the spool that could not be read")
    spool_undecided_blocks: int = _counter("blocks in the spool of which nobody can tell whether the queue held them")
    acks: int = _counter("ack frames sent")
    read_requests: int = _counter("READ requests")
    read_hot_requests: int = _counter("READ requests served from memory")
    read_bytes: int = _counter("bytes sent in answer to READ")
    connections: int = _counter("connections accepted")
    rejected_connections: int = _counter("connections closed for what they sent, or did not send")
    swept_objects: int = _counter("objects deleted that no pointer named")
    swept_bytes: int = _counter("bytes of objects deleted that no pointer named")
    retired_pointers: int = _counter("pointers deleted by retention")
    retired_objects: int = _counter("objects deleted by retention")
    store_seconds: Histogram = field(default_factory=Histogram)
    publish_seconds: Histogram = field(default_factory=Histogram)
    ack_seconds: Histogram = field(default_factory=Histogram)


class CounterCollector:
    """Reads the counters when Prometheus asks; nothing on the data path knows of Prometheus."""

    def __init__(self, counters: Counters, gauges: dict[str, tuple[str, Callable[[], float]]]) -> None:
        self._counters = counters
        self._gauges = gauges

    def collect(self) -> Iterable[Metric]:
        """Yield one metric per counter, gauge and histogram."""
        for part in fields(Counters):
            value = getattr(self._counters, part.name)
            if isinstance(value, Histogram):
                doc = f"seconds of a {part.name.removesuffix('_seconds')}"
                yield HistogramMetricFamily(f"memq_broker_{part.name}", doc, value.buckets(), value.sum_s)
            else:
                yield CounterMetricFamily(f"memq_broker_{part.name}", part.metadata["doc"], value)
        for name, (doc, read) in self._gauges.items():
            yield GaugeMetricFamily(f"memq_broker_{name}", doc, read())
