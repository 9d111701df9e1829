"""Counters of stores in the broker's registry, by the name of the store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.core import Metric

from memq.observe.metrics import lines_of
from memq.storage_handlers import CountingStore, StorageHandler


class StoreCollector:
    """Yields the counts of those stores that count, each metric once, with the store as its label."""

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
