"""`memq lag --serve` as Prometheus reads it: records, bytes, seconds of a real group; none in an outage."""

from __future__ import annotations

import memq
from memq.cli.exporter import RoundCollector, lag_metrics
from memq.testing import Cluster
from tests.integration.exporters import TIMEOUT_S, exporter, scraped


def test_records_that_a_group_has_not_read_are_its_lag() -> None:
    with Cluster() as cluster:
        with memq.Producer(cluster.address) as producer:
            for value in (b"one", b"two", b"three"):
                producer.send("clicks", value).result(TIMEOUT_S)
        with memq.Consumer(
            cluster.address, ["clicks"], group="report", start="beginning", auto_commit=False
        ) as consumer:
            batch = consumer.poll(TIMEOUT_S)
            assert batch is not None
            consumer.commit(batch)
        left = 3 - len(list(batch.values()))
        with exporter("lag", "-b", cluster.address) as address:
            found = scraped(address)
    labels = '{group="report",namespace="",topic="clicks"}'
    assert found[f"memq_group_lag_records{labels}"] == left
    assert (found[f"memq_group_lag_bytes{labels}"] > 0) == (left > 0)
    assert found[f"memq_group_lag_seconds{labels}"] >= 0
    assert found['memq_group_members{group="report"}'] == 0
    assert found["memq_lag_rounds_total"] >= 1


def test_after_a_round_that_failed_no_lag_is_exported() -> None:
    collector = RoundCollector("lag")
    collector.found(lag_metrics([], {}))
    assert "memq_group_lag_records" in {metric.name for metric in collector.collect()}
    collector.failed()
    assert not collector.known
    assert {metric.name for metric in collector.collect()} == {"memq_lag_rounds", "memq_lag_failed_rounds"}
