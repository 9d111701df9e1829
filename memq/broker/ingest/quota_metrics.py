"""Counts of exceeded limits in the broker's registry, by topic or client and by mode."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import Metric

from memq.broker.ingest.quotas import Quotas
from memq.observe.metrics import lines_of


class QuotaCollector:
    """Yields one counter, with a line for each topic or client that was over its limit."""

    def __init__(self, book: Quotas) -> None:
        self._book = book

    def collect(self) -> Iterable[Metric]:
        """Yield `memq_broker_over_limit_total`."""
        over = (
            ((limiter.subject, limiter.name, mode), count)
            for limiter in self._book.limiters()
            for mode, count in limiter.over.items()
            if count
        )
        yield lines_of("memq_broker_over_limit", over)
