"""`memq import kafka` on real servers: every record once and unchanged, also after kills."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

import memq
from memq_localstack.servers import Server
from tests.servers import DevServer, dev_server
from tests.soak import repetitions

PARTITIONS = 3
KEPT = {"retention.ms": "-1"}  # the records are years old
RECORDS = 90_000
Row = tuple[bytes | None, bytes | None, tuple[tuple[str, bytes | None], ...], int]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[DevServer]:
    with dev_server(tmp_path / "data") as running:
        yield running


def make_topic(kafka: Server, name: str) -> None:
    admin = AdminClient({"bootstrap.servers": kafka.address})
    for answer in admin.create_topics([NewTopic(name, PARTITIONS, 1, config=KEPT)]).values():
        answer.result()


def row_of(number: int) -> Row:
    """A record with all that a Kafka record has; some cells empty, some null."""
    key = None if number % 5 == 0 else b"" if number % 5 == 1 else b"key %d" % number
    value = None if number % 7 == 0 else b"" if number % 7 == 1 else b"value %d " % number + b"x" * (number % 300)
    headers: tuple[tuple[str, bytes | None], ...] = ()
    if number % 3 == 0:
        headers = (("trace", b"%d" % number), ("empty", b""), ("none", None), ("trace", b"again"))
    return value, key, headers, 1_700_000_000_000 + number * 7


def fill(kafka: Server, topic: str, start: int, end: int, **settings: Any) -> None:
    producer = Producer({"bootstrap.servers": kafka.address, "linger.ms": 5, **settings})
    if "transactional.id" in settings:
        producer.init_transactions()
        for number in range(start, end, 10):
            producer.begin_transaction()
            send(producer, topic, number, min(end, number + 10))
            if number % 100 == 50:
                producer.abort_transaction()
            else:
                producer.commit_transaction()
        return
    send(producer, topic, start, end)


def send(producer: Producer, topic: str, start: int, end: int) -> None:
    for number in range(start, end):
        value, key, headers, time_ms = row_of(number)
        producer.produce(topic, value, key, number % PARTITIONS, timestamp=time_ms, headers=list(headers))
        producer.poll(0)
    assert producer.flush(60) == 0


def source_rows(kafka: Server, topic: str) -> list[list[Row]]:
    """Read what Kafka itself shows of a topic."""
    settings = {"bootstrap.servers": kafka.address, "group.id": "reads", "enable.partition.eof": True}
    consumer = Consumer({**settings, "auto.offset.reset": "earliest", "enable.auto.commit": False})
    consumer.assign([TopicPartition(topic, number, 0) for number in range(PARTITIONS)])
    rows: list[list[Row]] = [[] for _ in range(PARTITIONS)]
    ended: set[int | None] = set()
    while len(ended) < PARTITIONS:
        message = consumer.poll(1.0)
        if message is None:
            continue
        error = message.error()
        if error is not None:
            if error.code() == KafkaError._PARTITION_EOF:
                ended.add(message.partition())
            continue
        headers: Any = tuple(message.headers() or ())
        value: Any = message.value()
        key: Any = message.key()
        rows[message.partition() or 0].append((value, key, headers, message.timestamp()[1]))
    consumer.close()
    return rows


def target_rows(address: str, topic: str, **options: Any) -> list[list[Row]]:
    rows: list[list[Row]] = [[] for _ in range(PARTITIONS)]
    with memq.Consumer(address, [topic], end="end", **options) as consumer:
        for batch in consumer:
            rows[batch.partition] += [
                (record.value, record.key, tuple(record.headers), record.timestamp_ms) for record in batch
            ]
    return rows


def command(kafka: Server, server: DevServer, *topics: str, into: str) -> list[str]:
    line = [sys.executable, "-m", "memq", "import", "kafka", *topics, "--into", into]
    return [*line, "--from", kafka.address, "-b", server.address, "--json"]


def copy(kafka: Server, server: DevServer, *topics: str, into: str, more: tuple[str, ...] = ()) -> Any:
    line = [*command(kafka, server, *topics, into=into), *more]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_all_of_a_topic_comes_over_and_later_what_came_since(kafka: Server, server: DevServer) -> None:
    make_topic(kafka, "orders")
    fill(kafka, "orders", 0, 2_000)
    done = copy(kafka, server, "orders", into="copied")
    assert sum(each["records"] for each in done["partitions"]) == 2_000
    rows = source_rows(kafka, "orders")
    assert target_rows(server.address, "copied") == rows
    assert rows[0][0] == row_of(0)
    assert copy(kafka, server, "orders", into="copied")["partitions"][0]["records"] == 0
    fill(kafka, "orders", 2_000, 2_500)
    done = copy(kafka, server, "orders", into="copied")
    assert sum(each["records"] for each in done["partitions"]) == 500
    assert target_rows(server.address, "copied") == source_rows(kafka, "orders")


def test_transactions_leave_gaps_and_no_aborted_record(kafka: Server, server: DevServer) -> None:
    make_topic(kafka, "paid")
    fill(kafka, "paid", 0, 400, **{"transactional.id": "paid"})
    copy(kafka, server, "paid", into="paid")
    rows = source_rows(kafka, "paid")
    assert sum(map(len, rows)) == 360
    assert target_rows(server.address, "paid") == rows
    audited = subprocess.run(
        [sys.executable, "-m", "memq", "audit", "paid", "-b", server.address],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert audited.returncode == 0, audited.stdout


@pytest.mark.soak
def test_a_killed_import_continues_and_copies_nothing_twice(kafka: Server, server: DevServer) -> None:
    for round_number in range(repetitions(few=1, many=10)):
        source, into = f"big{round_number}", f"killed{round_number}"
        make_topic(kafka, source)
        fill(kafka, source, 0, RECORDS)
        with memq.Admin(server.address) as admin:
            admin.create_topic(into, partitions=PARTITIONS)
        kills = 0
        for number, records in enumerate((1, RECORDS // 3)):
            kills += killed_after(kafka, server, source, into, records)
            fill(kafka, source, RECORDS + 50 * number, RECORDS + 50 * number + 50)  # the end is another one now
        assert kills, "the import was never killed in the middle"
        copy(kafka, server, source, into=into)
        assert target_rows(server.address, into) == source_rows(kafka, source)


def killed_after(kafka: Server, server: DevServer, source: str, into: str, records: int) -> bool:
    """Start an import and kill it as soon as the target holds so many records; return False when it was done first."""
    with memq.Consumer(server.address, [into]) as consumer:
        line = command(kafka, server, source, into=into)
        process = subprocess.Popen(line, stdout=subprocess.DEVNULL)
        try:
            read = 0
            while read < records and process.poll() is None:
                batch = consumer.poll(timeout=0.5)
                read += len(batch.values()) if batch is not None else 0
        finally:
            process.kill()
        code = process.wait(60)
        assert code in (0, -signal.SIGKILL)
        return code != 0


def test_groups_keep_their_positions(kafka: Server, server: DevServer) -> None:
    make_topic(kafka, "read")
    fill(kafka, "read", 0, 900)
    admin = AdminClient({"bootstrap.servers": kafka.address})
    offsets = {0: 17, 1: 0, 2: 300}
    parts = [TopicPartition("read", number, offset) for number, offset in offsets.items()]
    request = [ConsumerGroupTopicPartitions("billing", parts)]
    for answer in admin.alter_consumer_group_offsets(request).values():
        answer.result()
    done = copy(kafka, server, "read", into="read", more=("--groups",))
    assert done["groups"] == {"billing": PARTITIONS}
    rows = source_rows(kafka, "read")
    left = [rows[number][offsets[number] :] for number in range(PARTITIONS)]
    assert target_rows(server.address, "read", group="billing") == left


def test_mistakes_are_named(kafka: Server, server: DevServer) -> None:
    wrong = {
        ("nowhere",): "Kafka topic 'nowhere'",
    }
    for topics, said in wrong.items():
        line = command(kafka, server, *topics, into="x")
        done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
        assert (done.returncode, said in done.stderr) == (3, True), done.stderr
    make_topic(kafka, "wide")
    with memq.Admin(server.address) as admin:
        admin.create_topic("narrow", partitions=1)
    done = subprocess.run(
        command(kafka, server, "wide", into="narrow"), capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, "has 1 partitions, the source has 3" in done.stderr) == (1, True), done.stderr
