"""`memq restore` on real servers: a cluster's lost pointers in Kafka are rebuilt from the objects."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient

import memq
from memq.format.report import AUDIT_TOPIC
from memq.runtime.clock import SystemClock
from memq_localstack.servers import S3Server, Server
from tests.memq_process import run_command
from tests.processes import BrokerProcess, broker_processes
from tests.soak import SOAKING

TOPIC = "clicks"
PARTITIONS = 2
ROUND = 1_000


def fill(address: str, start: int) -> None:
    """Send a round of numbered records, in several batches."""
    with memq.Producer(address) as producer:
        for number in range(start, start + ROUND):
            producer.send(TOPIC, b"%d" % number, partition=number % PARTITIONS)
            if number % 100 == 0:
                producer.flush(timeout=60)
        producer.flush(timeout=60)


def read(address: str, start: Any = "beginning") -> dict[int, list[int]]:
    found: dict[int, list[int]] = {number: [] for number in range(PARTITIONS)}
    with memq.Consumer(address, [TOPIC], start=start, end="end") as consumer:
        for batch in consumer:
            found[batch.partition] += [int(value) for value in batch.values() if value is not None]
    return found


def expected(start: int, end: int) -> dict[int, list[int]]:
    return {number: [value for value in range(start, end) if value % PARTITIONS == number] for number in (0, 1)}


def lose_pointers(kafka: Server, prefix: str) -> None:
    """Delete what Kafka holds of the topic, and wait until it is gone; what it holds of the audit's stays."""
    admin = AdminClient({"bootstrap.servers": kafka.address})
    mine = [name for name in admin.list_topics(timeout=30).topics if name.startswith(f"{prefix}{TOPIC}.")]
    assert len(mine) == 1
    for answer in admin.delete_topics(mine).values():
        answer.result()
    while not admin.list_topics(timeout=30).topics.keys().isdisjoint(mine):
        pass


def of_topic(said: str, topic: str = TOPIC) -> dict[str, Any]:
    """Return what was said of a topic."""
    return next(each for each in json.loads(said) if each["topic"] == topic)


def fill_over_two_epochs(brokers: list[BrokerProcess]) -> int:
    """Send two rounds, the second after the owner of something was killed; return the time between them, Unix ms."""
    first, second = brokers
    with memq.Admin(first.address) as admin:
        admin.create_topic(TOPIC, partitions=PARTITIONS)
    fill(first.address, 0)
    between_ms = SystemClock().wall_ms()
    first.kill()
    fill(second.address, ROUND)
    assert second.stop() == 0, second.log.read_text()
    return between_ms


def test_lost_pointers_in_kafka_are_restored_and_the_cluster_continues(
    tmp_path: Path, zookeeper: Server, kafka: Server, reads_s3: S3Server
) -> None:
    with broker_processes(tmp_path, zookeeper, kafka, reads_s3, count=2) as brokers:
        config = str(tmp_path / "memq.toml")
        with_brokers = run_command("restore", "--config", config, "--dry-run")
        assert "brokers run: b1, b2" in with_brokers.stderr
        between_ms = fill_over_two_epochs(brokers)
        lose_pointers(kafka, f"{tmp_path.name}.")
        started = run_command("broker", "--config", config, "--broker-id", "b1", "--port", "0", "--http-port", "-1")
        assert "rebuild the queue with memq restore" in started.stderr

        dry = run_command("restore", "--config", config, "--dry-run", "--json")
        assert dry.returncode == 0, dry.stderr
        found = run_command("restore", "--config", config, "--json")
        assert (found.returncode, found.stdout) == (0, dry.stdout), found.stderr
        outcome = of_topic(found.stdout)
        assert (outcome["records"], outcome["held"], outcome["intact"], outcome["findings"]) == (2 * ROUND, 0, 0, [])
        reports = of_topic(found.stdout, AUDIT_TOPIC)
        assert (reports["pointers"], reports["intact"] > 0, reports["findings"]) == (0, True, []), "it was not lost"
        again = of_topic(run_command("restore", "--config", config, "--json").stdout)
        assert (again["pointers"], again["held"]) == (0, outcome["pointers"]), "a run that is repeated goes on"

        brokers[0].start()
        assert read(brokers[0].address) == expected(0, 2 * ROUND)
        later = read(brokers[0].address, start=datetime.fromtimestamp(between_ms / 1000, UTC))
        assert later == expected(ROUND, 2 * ROUND), "pointers keep their times"
        fill(brokers[0].address, 2 * ROUND)
        assert read(brokers[0].address) == expected(0, 3 * ROUND)
        audited = run_command("audit", TOPIC, "-b", brokers[0].address)
        assert audited.returncode == 0, audited.stdout + audited.stderr
        assert brokers[0].stop() == 0
        whole = run_command("restore", "--config", config, "--json")
        assert (whole.returncode, of_topic(whole.stdout)["intact"]) == (0, PARTITIONS), whole.stderr
        assert of_topic(whole.stdout)["pointers"] == 0


@pytest.mark.skipif(not SOAKING, reason="takes three minutes: make soak")
def test_a_broker_that_was_paused_while_its_log_was_replaced_says_so_and_drains(
    tmp_path: Path, zookeeper: Server, kafka: Server, reads_s3: S3Server
) -> None:
    with broker_processes(tmp_path, zookeeper, kafka, reads_s3, count=1) as (broker,):
        with memq.Admin(broker.address) as admin:
            admin.create_topic(TOPIC, partitions=PARTITIONS)
        fill(broker.address, 0)
        broker.pause()
        config, paused_ms = str(tmp_path / "memq.toml"), SystemClock().wall_ms()
        while (found := run_command("restore", "--config", config, "--dry-run")).returncode:
            assert "brokers run" in found.stderr
        while SystemClock().wall_ms() < paused_ms + 12_000:  # its last proof is too old then
            assert run_command("restore", "--config", config, "--dry-run").returncode == 0
        lose_pointers(kafka, f"{tmp_path.name}.")
        assert run_command("restore", "--config", config).returncode == 0
        broker.resume()
        with memq.Producer(broker.address, delivery_timeout_ms=20_000) as producer:
            ack = producer.send(TOPIC, b"late", partition=0)
            while "log-lost" not in (log := broker.log.read_text()):
                with pytest.raises(memq.MemqError):
                    ack.result(1)
            assert broker.stop() == 0
        text = rf"log-lost: topic '{TOPIC}' partition 0: .*the end is \d+, after it was \d+; restart the broker"
        assert re.search(text, log), log
        broker.start()
        assert read(broker.address) == expected(0, ROUND)
