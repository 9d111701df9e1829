"""Kafka has a topic and lost the log of a partition: it is reported, kept and restored."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec

import memq
from memq.notification.kafka.topics import REQUIRED, STALE
from memq.topic import TopicSettings
from memq_localstack.servers import S3Server, Server
from tests.memq_process import run_command
from tests.processes import broker_processes

TOPIC = "clicks"
PARTITIONS, LOST = 3, 1
ROUNDS = 5


def fill(address: str) -> dict[int, list[bytes]]:
    """Send records, each an object of its own; return them by partition."""
    sent: dict[int, list[bytes]] = {number: [] for number in range(PARTITIONS)}
    with memq.Admin(address) as admin:
        admin.create_topic(TOPIC, partitions=PARTITIONS)
    with memq.Producer(address, audit=False) as producer:
        for number in range(ROUNDS):
            for partition, values in sent.items():
                values.append(b"%d of %d" % (number, partition))
                producer.send(TOPIC, values[-1], partition=partition)
            producer.flush(timeout=60)
    return sent


def read(address: str) -> dict[int, list[bytes]]:
    found: dict[int, list[bytes]] = {number: [] for number in range(PARTITIONS)}
    with memq.Consumer(address, [TOPIC], start="beginning", end="end") as consumer:
        for batch in consumer:
            found[batch.partition] += [value for value in batch.values() if value is not None]
    return found


def lose_log(kafka: Server, prefix: str, *, whole: bool) -> None:
    """Empty the log of one partition, or delete the topic and make it again by hand."""
    admin = AdminClient({"bootstrap.servers": kafka.address})
    (name,) = [name for name in admin.list_topics(timeout=30).topics if name.startswith(f"{prefix}{TOPIC}.")]
    if not whole:
        latest: Any = OffsetSpec
        (end,) = admin.list_offsets({TopicPartition(name, LOST): latest.latest()}).values()
        (done,) = admin.delete_records([TopicPartition(name, LOST, end.result().offset)]).values()
        done.result()
        return
    admin.delete_topics([name])[name].result()
    while name in admin.list_topics(timeout=30).topics:
        pass
    settings = REQUIRED | {STALE: str(TopicSettings().stale_publish_ms)}
    admin.create_topics([NewTopic(name, PARTITIONS, 1, config=settings)])[name].result()
    while len(admin.list_topics(name, timeout=30).topics[name].partitions) < PARTITIONS:
        pass


def sweep_until_kept(config: str, logs: int) -> None:
    """Sweep until objects of so many logs are old enough, and kept."""
    while True:
        done = run_command("sweep", "--config", config, "--sweep-age-ms", "1s")
        assert f"/{TOPIC}/" not in done.stdout, "it was taken"
        kept = re.findall(rf"'{TOPIC}' partition \d: the queue has lost what may have named \d+ objects", done.stderr)
        if len(kept) == logs:
            assert done.returncode == 1
            return


@pytest.mark.parametrize("whole", [False, True], ids=["one partition", "made again"])
def test_a_lost_log_is_reported_kept_and_restored(
    tmp_path: Path, zookeeper: Server, kafka: Server, reads_s3: S3Server, whole: bool
) -> None:
    with broker_processes(tmp_path, zookeeper, kafka, reads_s3, count=1) as (broker,):
        sent = fill(broker.address)
        assert broker.stop() == 0, broker.log.read_text()
        lose_log(kafka, f"{tmp_path.name}.", whole=whole)
        config = str(tmp_path / "memq.toml")
        looked = run_command("doctor", "--config", config, "--json")
        assert looked.returncode == 1, looked.stderr
        (pointers,) = [each for each in json.loads(looked.stdout) if each["what"] == "pointers"]
        assert pointers["state"] == "failed"
        assert f"the queue shows nothing of it, the store has 'memq/topics/{TOPIC}/" in pointers["text"]
        assert "memq restore" in pointers["hint"]

        broker.start()
        assert f"log-lost: topic '{TOPIC}' partition {LOST}: the queue shows nothing of it" in broker.log.read_text()
        if not whole:
            with memq.Producer(broker.address, audit=False) as producer:
                producer.send(TOPIC, b"served", partition=0).result(timeout=60)
            sent[0].append(b"served")
        assert broker.stop() == 0, broker.log.read_text()
        sweep_until_kept(config, PARTITIONS if whole else 1)

        restored = run_command("restore", "--config", config, "--json")
        assert restored.returncode == 0, restored.stderr
        (report,) = [each for each in json.loads(restored.stdout) if each["topic"] == TOPIC]
        assert (report["intact"], report["records"]) == (
            (0, ROUNDS * PARTITIONS) if whole else (PARTITIONS - 1, ROUNDS)
        )
        broker.start()
        assert read(broker.address) == sent
        assert broker.stop() == 0, broker.log.read_text()
        swept = run_command("sweep", "--config", config, "--sweep-age-ms", "1s")
        assert (swept.returncode, f"/{TOPIC}/" in swept.stdout) == (0, False), swept.stderr
