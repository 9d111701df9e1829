"""Real servers paused and killed under a real broker: /metrics, log and /readyz name the failed part."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from memq_localstack.servers import S3Server, Server
from tests.load import Sender, create
from tests.processes import BrokerProcess, settings_text
from tests.soak import SOAKING, repetitions, report

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(not SOAKING, reason="the same faults on fewer parts: test_faults_show"),
]
TIMEOUT_S = 60.0
LOOKS_MAX = 600

# which server, what grows, what is logged, and whether probes fail
FAULTS = (
    ("kafka", "memq_broker_publish_retries_total", "queue-retry", True),
    ("s3", "memq_store_timeouts_total", "s3-retry", True),
    ("zookeeper", "memq_broker_coordinator_failures_total", "zookeeper-suspended", False),
)


@pytest.fixture
def broker(tmp_path: Path, zookeeper: Server, kafka: Server, reads_s3: S3Server) -> Iterator[BrokerProcess]:
    config = tmp_path / "memq.toml"
    config.write_text('log_format = "json"\n' + settings_text(tmp_path, zookeeper, kafka, reads_s3, {}))
    process = BrokerProcess(config, "b1", http=True)
    try:
        process.start()
        yield process
    finally:
        process.close()


def events(broker: BrokerProcess) -> list[dict[str, str]]:
    """Return the lines of the log: each is one JSON object."""
    return [json.loads(line) for line in broker.log.read_text().splitlines()]


def get(broker: BrokerProcess, path: str) -> tuple[int, str]:
    base = next(line["text"] for line in events(broker) if line["event"] == "http-ready").partition("/healthz")[0]
    try:
        with urllib.request.urlopen(f"{base}{path}", timeout=TIMEOUT_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def value_of(broker: BrokerProcess, name: str) -> float:
    """Return a metric, summed over its labels."""
    lines = [line for line in get(broker, "/metrics")[1].splitlines() if line.split("{")[0].split(" ")[0] == name]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def look_until(sender: Sender, holds: Callable[[], bool], what: str) -> None:
    """Look again after each 20 records that were handed to the producer."""
    for _ in range(LOOKS_MAX):
        if holds():
            return
        sender.wait_for_sent(20)
    raise AssertionError(f"{what}: not after {20 * LOOKS_MAX} records")


@pytest.mark.parametrize(("name", "metric", "event", "red"), FAULTS, ids=[fault[0] for fault in FAULTS])
def test_a_server_that_stops_shows_in_a_metric_an_event_and_the_probe(
    broker: BrokerProcess, request: pytest.FixtureRequest, name: str, metric: str, event: str, red: bool
) -> None:
    server: Server | S3Server = request.getfixturevalue(name)
    create([broker])
    with Sender([broker]) as sender:
        for number in range(repetitions(few=1, many=5)):
            sender.wait_for_all(2)
            look_until(sender, lambda: get(broker, "/readyz")[0] == 200, "ready")
            before, logged = value_of(broker, metric), len(events(broker))
            server.pause()
            try:
                if red:  # a process that is asked to stop may answer for some more milliseconds
                    look_until(sender, lambda: get(broker, "/readyz")[0] == 503, "red")
                look_until(sender, lambda: value_of(broker, metric) > before, metric)  # noqa: B023 - called here alone
                assert get(broker, "/healthz")[0] == 200
            finally:
                server.resume()
            sender.wait_for_all(2)
            new = {line["event"] for line in events(broker)[logged:]}
            assert event in new
            report(f"{number + 1}: {name} paused, {metric} grew, logged: {', '.join(sorted(new))}")
