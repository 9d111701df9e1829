"""Transactions with staged parts on real servers: the broker is killed between the decision and the mark."""

from __future__ import annotations

import json
from pathlib import Path

from confluent_kafka.admin import AdminClient

import memq
from memq_localstack.servers import S3Server, Server
from tests.memq_process import run_command
from tests.processes import BrokerProcess, broker_processes

LARGE, SMALL = "large", "small"
PARTITIONS = 2
RECORDS = 60  # of 100,000 bytes: over 4 MiB for one partition
_DIES = """
import asyncio, os, sys
from memq.broker.holds import releasing
from memq.cli import main
async def dies(services, manifest):
    print("the mark is missing", file=sys.stderr, flush=True)
    await asyncio.sleep(3_600)
releasing.mark_committed = dies
from memq.state_log import state_log
state_log.SNAPSHOT_S = 1.0
sys.exit(main())
"""


class Unmarked(BrokerProcess):
    """A broker that decides, and puts no mark: the test kills it there."""

    dying = True

    def command(self) -> list[str]:
        """Return what Python is given to start it."""
        command = super().command()
        return ["-c", _DIES, *command[2:]] if self.dying else command


def values(name: str) -> list[bytes]:
    return [f"{name} {number} ".encode().ljust(100_000, b"x") for number in range(RECORDS)]


def send(address: str, name: str, *, transactional_id: str) -> None:
    with (
        memq.Producer(address, transactional_id=transactional_id, codec="none") as producer,
        producer.transaction() as transaction,
    ):
        for value in values(name):
            transaction.send(LARGE, value, partition=1)
        transaction.send(SMALL, name.encode())


def read(address: str, topic: str) -> list[bytes]:
    with memq.Consumer(address, [topic], end="end") as consumer:
        return sorted(value for batch in consumer for value in batch.values() if value is not None)


def until_read(address: str, topic: str, expected: list[bytes]) -> None:
    """Wait for records: a commit returns at the decision. The time limit of the test ends this."""
    while (found := read(address, topic)) != sorted(expected):
        assert set(found) <= set(expected), "a part of a transaction, or a record twice"


def lose_queue(kafka: Server, prefix: str) -> None:
    """Delete all logs of the cluster in Kafka."""
    admin = AdminClient({"bootstrap.servers": kafka.address})
    mine = [name for name in admin.list_topics(timeout=30).topics if name.startswith(prefix)]
    for answer in admin.delete_topics(mine).values():
        answer.result()
    while not admin.list_topics(timeout=30).topics.keys().isdisjoint(mine):
        pass


def test_a_part_on_s3_comes_after_a_kill_between_decision_and_mark_and_after_a_restore(
    tmp_path: Path, zookeeper: Server, kafka: Server, reads_s3: S3Server
) -> None:
    with broker_processes(tmp_path, zookeeper, kafka, reads_s3, count=1) as (first,):
        with memq.Admin(first.address) as admin:
            for topic in (LARGE, SMALL):
                admin.create_topic(topic, partitions=PARTITIONS)
        send(first.address, "whole", transactional_id="a")
        until_read(first.address, LARGE, values("whole"))
        assert first.stop() == 0, first.log.read_text()
        broker = Unmarked(first.config, first.name)
        try:
            broker.start()
            send(broker.address, "late", transactional_id="b")  # decided
            while "the mark is missing" not in broker.log.read_text():
                pass
            broker.kill()
            broker.dying = False
            broker.start()
            expected = values("whole") + values("late")
            until_read(broker.address, LARGE, expected)
            until_read(broker.address, SMALL, [b"late", b"whole"])
            with memq.Admin(broker.address) as admin:
                assert admin.transactions() == []
            assert broker.stop() == 0
            lose_queue(kafka, f"{tmp_path.name}.")
            found = run_command("restore", "--config", str(broker.config), "--json")
            assert found.returncode == 0, found.stderr
            assert all(each["findings"] == [] for each in json.loads(found.stdout))
            broker.start()
            until_read(broker.address, LARGE, expected)
            until_read(broker.address, SMALL, [b"late", b"whole"])
            audited = run_command("audit", LARGE, "-b", broker.address)
            assert audited.returncode == 0, audited.stdout + audited.stderr
            assert broker.stop() == 0
        finally:
            broker.close()
