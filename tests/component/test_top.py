"""`memq top`: rates, lags, and numbers that are not known."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

import memq
from memq.cli import main
from memq.cli.top import Sight, rates_of
from memq.client.topic_extents import TopicExtent
from memq.errors import QueueError
from memq.testing import Cluster


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    with Cluster() as cluster:
        monkeypatch.setenv("MEMQ_BROKERS", cluster.address)
        with memq.Producer(cluster.address) as producer:
            producer.send_many("clicks", [str(number) for number in range(30)])
            producer.send("views", "a")
        with memq.Consumer(cluster.address, "clicks", group="report", end="end") as consumer:
            assert sum(len(batch) for batch in consumer) == 30
        with memq.Producer(cluster.address) as producer:
            producer.send_many("clicks", ["b"] * 5)
        yield cluster


def test_states_as_json(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "-n", "2", "--interval", "0.2", "--json"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert [each["records_per_second"] for each in first["topics"]] == [None, None], "a rate needs two states"
    assert {each["topic"]: each["records"] for each in second["topics"]} == {"clicks": 35, "views": 1}
    assert [each["records_per_second"] for each in second["topics"]] == [0, 0]
    (lag,) = second["groups"]
    assert (lag["group"], lag["topic"], lag["lag_records"]) == ("report", "clicks", 5)
    assert [each["governs"] for each in second["brokers"]] == [True]


def test_a_state_as_tables(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "-n", "1"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out, "only a terminal is cleared"
    rows = [line.split() for line in out.splitlines()]
    assert ["report", "clicks", "0", "5"] in [row[:4] for row in rows]
    assert ["clicks", "-", "35"] in [row[:3] for row in rows]


def test_rates_count_what_was_written() -> None:
    before = Sight(1_000, [], {"a": TopicExtent(records=10, written=100), "b": TopicExtent(written=5)})
    silent = TopicExtent(written=5, unknown=((0, QueueError("no answer")),))
    now = Sight(3_000, [], {"a": TopicExtent(records=4, written=150), "b": silent, "c": TopicExtent(written=9)})
    assert rates_of(before, now) == {"a": 25, "b": None, "c": None}
    assert rates_of(None, before) == {"a": None, "b": None}
