"""docs/metrics.md has all metrics and alerts: `python -m tests.component.test_docs_metrics` writes it, tests compare.

What is exported must be in the table `memq.observe.metrics`, and all of the table exported by somebody.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

import memq
from memq.audit.live.view import TopicSummary
from memq.audit.minutes import MinuteRow
from memq.broker.ingest.quotas import ClientLimits, RatePerSecond
from memq.broker.process import metrics_of
from memq.cli.exporter import RoundCollector, audit_metrics, lag_metrics
from memq.client.consumer.batch import TopicPartition
from memq.client.consumer.core import ConsumerStats
from memq.client.consumer.fetch.cursor_outcomes import Counts
from memq.client.consumer.offset_resolver import Lag
from memq.client.group_admin import GroupDescription, PartitionProgress
from memq.client.listener.core import ListenerStats
from memq.client.producer.core import ProducerStats
from memq.observe.metrics import METRICS, lines_of
from memq.runtime.runtime import Runtime
from memq.settings import Section
from memq.storage_handlers.s3 import open_store
from memq.testing import Cluster
from tests.brokers import running_broker
from tests.promtool import check_with_promtool

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "metrics.md"
ALERTS = ROOT / "deploy" / "prometheus" / "memq-alerts.yaml"
HEAD = """# Metrics

| exporter | metrics |
|---|---|
| brokers and `memq dev`, `/metrics` of their HTTP port (9877) | `memq_broker_…` and `memq_store_…` |
| `memq lag --serve HOST:PORT`, once for a cluster | lag of consumer groups |
| `memq auditor metrics --serve HOST:PORT` | findings of the auditors |

The name of a counter ends in `_total`; a histogram has lines with `_bucket`, `_sum` and `_count`. *Series* is the
maximum number of series of one process: no label has a value that comes from a record.

```sh
curl -s http://127.0.0.1:9877/metrics
memq lag --serve 127.0.0.1:9878
memq auditor metrics --serve 127.0.0.1:9880
```

A program exports the counts of its producers, consumers and listeners with its own metrics:

```python
prometheus_client.REGISTRY.register(memq.ClientCollector({"loader": producer, "report": consumer, "billing": listener}))
```

Boards for Grafana lie in [deploy/grafana](../deploy/grafana), rules for Prometheus with their tests in
[deploy/prometheus](../deploy/prometheus). This page, the boards and the rules are checked against the one table in
`memq/observe/metrics.py`.
"""
TITLES = {
    "memq_broker_": "Brokers",
    "memq_store_": "Stores",
    "memq_producer_": "Producers: `memq.ClientCollector`",
    "memq_consumer_": "Consumers: `memq.ClientCollector`",
    "memq_listener_": "Listeners: `memq.ClientCollector`",
    "memq_audit_": "The audit: `memq auditor metrics`",
    "memq_": "Consumer groups: `memq lag --serve`",
}


NO_STATS = ConsumerStats(Counts(), retries=0, commits=0, dead_letters=0, transit_errors=0)


def a_topic() -> TopicSummary:
    """A topic of which something is known."""
    row = MinuteRow()
    row.side("").time("acked", [(3, 10)])
    return TopicSummary("clicks", "id", {}, row, 0)


class Counted:
    """A client that has counted this much."""

    def __init__(self, stats: ProducerStats | ConsumerStats | ListenerStats) -> None:
        self._stats = stats

    def stats(self) -> ProducerStats | ConsumerStats | ListenerStats:
        return self._stats


def page() -> str:
    """Return what the page has to say."""
    parts = [HEAD]
    left = dict(METRICS)
    for prefix, title in TITLES.items():
        here = [left.pop(name) for name in list(left) if name.startswith(prefix)]
        parts.append(f"\n## {title}\n\n| metric | kind | unit | labels | series | means |\n|---|---|---|---|---|---|\n")
        parts += [
            f"| `{one.name}` | {one.kind} | {one.unit} | {', '.join(one.labels)} | {one.series_max:,} | {one.help} |\n"
            for one in here
        ]
    parts.append("\n## Alerts\n\n| alert | severity | when | what to do |\n|---|---|---|---|\n")
    for rule in alert_rules():
        notes = rule["annotations"]
        parts.append(f"| `{rule['alert']}` | {rule['labels']['severity']} | {notes['summary']} | {notes['action']} |\n")
    return "".join(parts)


def alert_rules() -> Iterator[dict[str, dict[str, str]]]:
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        yield from group["rules"]


def exported() -> str:
    """Return what a broker with a store in S3 and an exporter of lag show: every metric that memq exports."""

    async def of_broker() -> str:
        async with running_broker(ClientLimits(default=RatePerSecond("observe", 1, 1))) as broker:
            keys: Section = {"access_key_id": ("key", "test"), "secret_access_key": ("secret", "test")}
            s3 = broker.services.stores["s3"] = open_store("s3://bucket/prefix?region=eu-1", Runtime(), keys)
            broker.services.limits.connect("loader")[0].over["observe"] += 1
            try:
                return generate_latest(metrics_of(broker)).decode()
            finally:
                await s3.close()

    lag, audit = RoundCollector("lag"), RoundCollector("audit")
    place = TopicPartition("clicks", 0)
    progress = PartitionProgress(place, None, "m", Lag(7, 700, 1.5))
    lag.found(lag_metrics([GroupDescription("g", 1, ("m",), (progress,))], {"g": 3}))
    audit.found(audit_metrics([a_topic()], [], [], 1))
    registry = CollectorRegistry()
    registry.register(lag)
    registry.register(audit)
    counted = {"loader": Counted(ProducerStats()), "report": Counted(NO_STATS), "billing": Counted(ListenerStats())}
    registry.register(memq.ClientCollector(counted))
    return asyncio.run(of_broker()) + generate_latest(registry).decode()


def test_the_page_has_every_metric_and_alert() -> None:
    assert PAGE.read_text() == page(), "write it again: python -m tests.component.test_docs_metrics"


def test_exported_metrics_equal_the_table() -> None:
    found = {family.name: family for family in text_string_to_metric_families(exported())}
    assert set(found) == set(METRICS)
    for name, metric in METRICS.items():
        assert (found[name].type, found[name].documentation) == (metric.kind, metric.help)
        for sample in found[name].samples:
            assert sample.name in metric.exported
            assert set(sample.labels) - {"le"} == set(metric.labels)


def test_names_end_in_their_units_and_no_label_is_without_a_bound() -> None:
    for metric in METRICS.values():
        if metric.unit in ("bytes", "seconds"):
            assert metric.name.endswith(f"_{metric.unit}"), metric
        assert (metric.series_max > 1) == bool(metric.labels), metric


def test_more_series_than_the_bound_are_not_exported() -> None:
    bound = METRICS["memq_store_requests"].series_max
    family = lines_of("memq_store_requests", (((f"store-{number}",), 1.0) for number in range(2 * bound)))
    assert len(family.samples) == bound


def test_clients_show_what_they_count_until_after_their_end() -> None:
    registry = CollectorRegistry()
    with Cluster() as cluster:
        producer = memq.Producer(cluster.address)
        producer.send("clicks", b"value").result(60)
        consumer = memq.Consumer(cluster.address, "clicks", end="end")
        with producer, consumer:
            registry.register(memq.ClientCollector({"loader": producer, "report": consumer}))
            assert [len(batch) for batch in consumer] == [1]
            assert registry.get_sample_value("memq_producer_acked_records_total", {"client": "loader"}) == 1
            assert registry.get_sample_value("memq_consumer_records_total", {"client": "report"}) == 1
        assert registry.get_sample_value("memq_producer_acked_records_total", {"client": "loader"}) == 1
        assert registry.get_sample_value("memq_consumer_records_total", {"client": "report"}) == 1


def test_promtool_finds_no_fault_in_what_is_exported() -> None:
    check_with_promtool(["check", "metrics"], stdin=exported())


if __name__ == "__main__":
    sys.exit(PAGE.write_text(page()) == 0)
