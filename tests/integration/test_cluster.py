"""Three brokers as processes on one store, one queue and a real ZooKeeper: takeover, drain, rolling restart."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Literal, Self

import memq
from localstack.servers import Server
from tests.processes import BrokerProcess, broker_processes

TOPIC = "clicks"
PARTITIONS = 6


class Sender:
    """A producer on a thread of its own that sends numbered records, over all partitions, until it is told to end."""

    def __init__(self, brokers: list[BrokerProcess], acks: Literal["1", "all"] = "all") -> None:
        self.sent = 0
        self.errors: list[BaseException] = []
        self.acked = threading.Semaphore(0)
        self._addresses = ",".join(broker.address for broker in brokers)
        self._acks = acks
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sender")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End, and wait until everything is acked."""
        self._end.set()
        self._thread.join()

    def wait_for(self, blocks: int) -> None:
        """Wait until so many more blocks are acked."""
        for _ in range(blocks):
            assert self.acked.acquire(timeout=60), f"no ack within 60 s; {self.errors[:3]}"

    def _run(self) -> None:
        def on_ack(outcome: object) -> None:
            if isinstance(outcome, BaseException):
                self.errors.append(outcome)
            else:
                self.acked.release()

        try:
            with memq.Producer(self._addresses, acks=self._acks, linger_ms=5, on_ack=on_ack) as producer:
                while not self._end.wait(0.002):
                    producer.send(TOPIC, b"%d" % self.sent, partition=self.sent % PARTITIONS)
                    self.sent += 1
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.errors.append(error)


def read_all(brokers: list[BrokerProcess]) -> Counter[int]:
    with memq.Consumer(brokers[0].address, [TOPIC], end="end") as consumer:
        return Counter(int(record.value or b"-1") for batch in consumer for record in batch)


def audit(broker: BrokerProcess) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "memq.cli", "audit", TOPIC, "-b", broker.address]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def owners_of(broker: BrokerProcess) -> Counter[str]:
    with memq.Admin(broker.address) as admin:
        return Counter(owner.broker for owner in admin.topic(TOPIC).owners)


def create(broker: BrokerProcess) -> None:
    with memq.Admin(broker.address) as admin:
        admin.create_topic(TOPIC, partitions=PARTITIONS)


def test_owners_that_are_killed_lose_and_double_nothing(tmp_path: Path, zookeeper: Server) -> None:
    with broker_processes(tmp_path, zookeeper.address) as brokers:
        create(brokers[0])
        with Sender(brokers) as sender:
            sender.wait_for(50)
            for victim in brokers[:2]:  # the first one governs: then the second does
                victim.kill()
                sender.wait_for(100)
                victim.start()
                sender.wait_for(20)
        assert sender.errors == []
        assert read_all(brokers) == Counter(range(sender.sent))
        found = audit(brokers[2])
        assert found.returncode == 0, found.stdout + found.stderr


def test_a_rolling_restart_costs_no_producer_anything(tmp_path: Path, zookeeper: Server) -> None:
    with broker_processes(tmp_path, zookeeper.address) as brokers:
        create(brokers[0])
        with Sender(brokers) as careful, Sender(brokers, acks="1") as quick:
            careful.wait_for(50)
            quick.wait_for(50)
            for broker in brokers:
                assert broker.stop() == 0, broker.log.read_text()
                broker.start()
                careful.wait_for(50)
                quick.wait_for(50)
        assert careful.errors == []
        assert quick.errors == []
        assert read_all(brokers) == Counter(range(careful.sent)) + Counter(range(quick.sent))
        found = audit(brokers[0])
        assert found.returncode == 0, found.stdout + found.stderr
