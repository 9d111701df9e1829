"""Delayed records, undecided transactions and positions on S3, Kafka and ZooKeeper: over kills, and a lost Kafka."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import boto3
from confluent_kafka.admin import AdminClient

import memq
from memq.broker.service_partitions.hosts import STATE_PARTITIONS
from memq.runtime.clock import SystemClock
from memq.topic import STATE_TOPIC
from memq_localstack.s3 import BUCKET
from memq_localstack.servers import S3Server, Server
from tests.component.order_program import MOMENTS
from tests.integration.test_topic_history import owner_of, values, wait_until
from tests.load import HANG_S, addresses_of
from tests.memq_process import run_command
from tests.processes import BrokerProcess, broker_processes

SOON_S, LATE_S, FAR_S = 10, 60, 7_200
PARTITIONS = 2
COUNT = 40  # delayed records of each kind; those in a run must be more than SPILL_HOLDS
READ = 10  # records that a group has read
_QUICK = """
import sys
from memq.holds import run_keeper
from memq.state_log import state_log
run_keeper.NEAR_S, run_keeper.SPILL_HOLDS, state_log.SNAPSHOT_S = 5.0, 16, 1.0
from memq.cli import main
sys.exit(main())
"""


class QuickBroker(BrokerProcess):
    """A broker with a snapshot each second, and runs of a few records."""

    def command(self) -> list[str]:
        """Return what Python is given to start it."""
        return ["-c", _QUICK, *super().command()[2:]]


@contextmanager
def quick_brokers(folder: Path, zookeeper: Server, kafka: Server, s3: S3Server) -> Iterator[list[BrokerProcess]]:
    """Run two brokers that ask soon about undecided transactions."""
    with broker_processes(folder, zookeeper, kafka, s3, count=0, top='transaction_check_interval_ms = "300ms"\n'):
        brokers: list[BrokerProcess] = [QuickBroker(folder / "memq.toml", f"b{number}") for number in (1, 2)]
        try:
            for broker in brokers:
                broker.start()
            yield brokers
        finally:
            for broker in brokers:
                broker.close()


class Delayed:
    """Delayed records of one kind: when they are due, and their deliveries."""

    def __init__(self, producer: memq.Producer, first: int, delay_s: float) -> None:
        clock = SystemClock()
        self.due_ms = clock.wall_ms() + int(delay_s * 1_000)
        self.numbers = range(first, first + COUNT)
        self.deliveries = [
            producer.send("clicks", b"%d" % number, partition=number % PARTITIONS, deliver_after=delay_s)
            for number in self.numbers
        ]
        for delivery in self.deliveries:
            delivery.result(HANG_S)


def delivered(brokers: list[BrokerProcess], *kinds: Delayed) -> set[int]:
    """Return the delayed records that readers see: each once, and none before it is due."""
    found, now_ms = values(brokers, "clicks"), SystemClock().wall_ms()
    assert len({*found}) == len(found), "a record came twice"
    for kind in kinds:
        assert now_ms >= kind.due_ms or {*kind.numbers}.isdisjoint(found), "early"
    return {*found}


def restored(config: Path) -> None:
    """Run `memq restore`, again while the session of a killed broker lasts."""
    while True:
        found = run_command("restore", "--config", str(config), "--json")
        if found.returncode == 0:
            return
        assert "brokers run" in found.stderr, found.stdout + found.stderr


def test_brokers_bring_what_they_held_over_kills_and_a_lost_kafka(
    tmp_path: Path, zookeeper: Server, kafka: Server, reads_s3: S3Server
) -> None:
    with quick_brokers(tmp_path, zookeeper, kafka, reads_s3) as brokers:
        with memq.Admin(addresses_of(brokers)) as admin:
            for topic in ("clicks", "out"):
                admin.create_topic(topic, partitions=PARTITIONS)
            for topic in ("other", "read"):
                admin.create_topic(topic)
        read_a_part(brokers)
        with memq.Producer(addresses_of(brokers)) as producer:
            far, late, soon = (
                Delayed(producer, number * COUNT, after_s) for number, after_s in enumerate((FAR_S, LATE_S, SOON_S))
            )
        check_back_over_a_kill(brokers, tmp_path / "orders.sqlite")
        for broker in brokers:
            broker.kill()
        for broker in brokers:
            broker.start()
        wait_until(lambda: {*soon.numbers} <= delivered(brokers, far, late, soon), "records that are due")
        assert waiting(brokers) >= COUNT
        assert any("/runs/" in key for key in keys(reads_s3, tmp_path.name)), "delayed records are in runs"

        for broker in brokers:
            broker.kill()
        lose_kafka(kafka, f"{tmp_path.name}.")
        restored(tmp_path / "memq.toml")
        for broker in brokers:
            broker.start()
        assert delivered(brokers, far, late, soon) >= {*soon.numbers}
        assert values(brokers, "read", group="report") == list(range(READ, 2 * READ))
        with memq.Producer(addresses_of(brokers)) as producer:
            assert producer.cancel(far.deliveries[0].result(HANG_S)) is memq.CancelOutcome.CANCELLED
        wait_until(lambda: {*late.numbers} <= delivered(brokers, far, late, soon), "records that were held")
        assert delivered(brokers, far, late, soon) == {*late.numbers, *soon.numbers}
        assert waiting(brokers) == COUNT - 1
        assert sorted(values_of_orders(brokers)) == ["2.0", "2.1", "2.2"]


def keys(s3: S3Server, folder: str) -> list[str]:
    """Return the keys of a cluster's state logs in the store."""
    client = boto3.client("s3", endpoint_url=s3.endpoint, region_name=s3.region)
    listed: list[Any] = client.list_objects_v2(Bucket=BUCKET, Prefix=f"{folder}/memq/state/").get("Contents", [])
    client.close()
    return [str(entry["Key"]) for entry in listed]


def waiting(brokers: list[BrokerProcess]) -> int:
    with memq.Admin(addresses_of(brokers)) as admin:
        return sum(each.records for each in admin.delayed("clicks").values())


def read_a_part(brokers: list[BrokerProcess]) -> None:
    """Let a group read the first half of a topic."""
    with memq.Producer(addresses_of(brokers)) as producer:
        for number in range(2 * READ):
            producer.send("read", b"%d" % number).result(HANG_S)
    with memq.Consumer(addresses_of(brokers), "read", group="report", auto_commit=False) as consumer:
        for _ in range(READ):
            batch = consumer.poll(HANG_S)
            assert batch is not None
            consumer.commit(batch)


def check_back_over_a_kill(brokers: list[BrokerProcess], file: Path) -> None:
    """Kill a program after each of two `prepare`, and the coordinator; another member of its group decides."""
    command = [sys.executable, "-m", "tests.component.order_program", addresses_of(brokers), str(file), "2", "1"]
    assert [MOMENTS[1], MOMENTS[2]] == ["prepared", "decided"], "the database has the second order alone"
    for _ in range(2):
        assert subprocess.run(command, stdin=subprocess.DEVNULL, check=False, timeout=HANG_S).returncode == 9
    coordinator = owner_of(STATE_TOPIC, zlib.crc32(b"orders") % STATE_PARTITIONS, brokers)
    coordinator.kill()
    asked: list[memq.UndecidedTransaction] = []

    def check(found: memq.UndecidedTransaction) -> memq.CheckAnswer:
        asked.append(found)
        with closing(sqlite3.connect(file)) as database:
            row = database.execute("SELECT 1 FROM orders WHERE id = ?", (int(found.note),)).fetchone()
        return memq.CheckAnswer.COMMIT if row else memq.CheckAnswer.ABORT

    with memq.Producer(
        addresses_of(brokers), transactional_id="deputy", producer_group="shop", transaction_checker=check
    ):
        wait_until(lambda: len(values_of_orders(brokers)) == 3, "the second order")
        with memq.Admin(addresses_of(brokers)) as admin:
            wait_until(lambda: admin.transactions() == [], "the end of all transactions")
    assert {(each.transactional_id, each.note) for each in asked} >= {("orders", b"2")}
    assert sorted(values_of_orders(brokers)) == ["2.0", "2.1", "2.2"]
    coordinator.start()


def values_of_orders(brokers: list[BrokerProcess]) -> list[str]:
    with memq.Consumer(addresses_of(brokers), ["out", "other"], end="end") as consumer:
        return [(value or b"").decode() for batch in consumer for value in batch.values()]


def lose_kafka(kafka: Server, prefix: str) -> None:
    """Delete all that Kafka has of a cluster, and wait until it is gone."""
    admin = AdminClient({"bootstrap.servers": kafka.address})
    mine = [name for name in admin.list_topics(timeout=30).topics if name.startswith(prefix)]
    assert len(mine) >= 5
    for answer in admin.delete_topics(mine).values():
        answer.result()
    while not admin.list_topics(timeout=30).topics.keys().isdisjoint(mine):
        pass
