"""What stores count, in the broker's one registry: read when Prometheus asks, by the name of the store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from memq.storage_handlers import Counted, StorageHandler


class StoreCollector:
    """Yields the counts of those stores that count, each metric once, with the store as its label."""

    def __init__(self, stores: Mapping[str, StorageHandler]) -> None:
        self._stores = stores

    def collect(self) -> Iterable[Metric]:
        """Yield one metric per name, `memq_store_…`."""
        metrics: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for store, handler in self._stores.items():
            if not isinstance(handler, Counted):
                continue
            for count in handler.counts():
                kind = CounterMetricFamily if count.only_grows else GaugeMetricFamily
                metric = metrics.setdefault(count.name, kind(f"memq_store_{count.name}", count.doc, labels=["store"]))
                metric.add_metric([store], count.value)
        yield from metrics.values()
