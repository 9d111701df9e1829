"""Counters of producers, consumers and listeners for Prometheus: one collector for all clients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Protocol

from prometheus_client.core import Metric

from memq.client.consumer.core import ConsumerStats
from memq.client.consumer.fetch.cursor_outcomes import Counts
from memq.client.listener.core import ListenerStats
from memq.client.producer.core import ProducerStats
from memq.observe.metrics import lines_of

# Fields of `ProducerStats` and `ListenerStats` that are named otherwise: in Prometheus the unit comes last.
_NAMES = {
    "records_acked": "acked_records",
    "records_failed": "failed_records",
    "blocks_acked": "acked_blocks",
    "blocks_failed": "failed_blocks",
    "bytes_acked": "acked_bytes",
    "done": "done_records",
    "retried": "retried_records",
    "parked": "parked_records",
    "working": "working_records",
    "handler_s": "handler_seconds",
}


class Counting(Protocol):
    """A producer, a consumer or a listener, for threads or asyncio."""

    def stats(self) -> ProducerStats | ConsumerStats | ListenerStats:
        """Return its counters."""
        ...


class ClientCollector:
    """Yields the counts of clients, each by the name that it is given here as the label `client`.

    `prometheus_client.REGISTRY.register(memq.ClientCollector({"loader": producer, "report": consumer}))`. A closed
    client still shows its last counts.
    """

    def __init__(self, clients: Mapping[str, Counting]) -> None:
        if not isinstance(clients, Mapping):
            raise TypeError(f"clients must be a mapping of names to clients, not {type(clients).__name__}")
        for name, client in clients.items():
            if not isinstance(name, str):
                raise TypeError(f"the name of a client must be str, not {type(name).__name__}")
            if not callable(getattr(client, "stats", None)):
                raise TypeError(
                    f"client '{name}' must be a producer, consumer or listener, not {type(client).__name__}"
                )
        self._clients = dict(clients)

    def collect(self) -> Iterable[Metric]:
        """Yield one metric per name, `memq_producer_…`, `memq_consumer_…` and `memq_listener_…`."""
        found: dict[str, list[tuple[tuple[str], float]]] = {}
        for client, counting in self._clients.items():
            for name, value in _counts(counting.stats()):
                found.setdefault(name, []).append(((client,), value))
        for name, series in found.items():
            yield lines_of(name, series)


def _counts(stats: ProducerStats | ConsumerStats | ListenerStats) -> Iterable[tuple[str, float]]:
    if isinstance(stats, (ProducerStats, ListenerStats)):
        kind = "producer" if isinstance(stats, ProducerStats) else "listener"
        for part in fields(stats):
            yield f"memq_{kind}_{_NAMES.get(part.name, part.name)}", getattr(stats, part.name)
    else:
        rest = {
            "retries": stats.retries,
            "commits": stats.commits,
            "dead_letters": stats.dead_letters,
            "transit_errors": stats.transit_errors,
        }
        for name, value in {**{part.name: getattr(stats.counts, part.name) for part in fields(Counts)}, **rest}.items():
            yield f"memq_consumer_{name}", value
