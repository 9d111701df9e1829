"""Three brokers as processes on one store, one queue and a real ZooKeeper: takeover, drain, rolling restart."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Literal, Self

import pytest

import memq
from localstack.servers import Server
from memq.errors import InvalidRequestError, NotFoundError
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


def said(brokers: list[BrokerProcess], *arguments: str) -> str:
    """Return what a command prints."""
    command = [sys.executable, "-m", "memq.cli", *arguments, "-b", brokers[-1].address]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=90)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_drained_broker_owns_nothing_and_nobody_notices(tmp_path: Path, zookeeper: Server) -> None:
    with broker_processes(tmp_path, zookeeper.address) as brokers:
        create(brokers[0])
        with Sender(brokers) as careful, Sender(brokers, acks="1") as quick:
            careful.wait_for(30)
            quick.wait_for(30)
            said(brokers, "broker", "drain", "b1")
            listed = {entry["broker"]: entry for entry in json.loads(said(brokers, "broker", "list", "--json"))}
            assert [listed[name]["partitions"] for name in ("b1", "b2", "b3")] == [0, 3, 3]
            assert [listed[name]["draining"] for name in ("b1", "b2", "b3")] == [True, False, False]
            assert [name for name, entry in listed.items() if entry["governs"]] == ["b1"]
            assert json.loads(said(brokers, "governor", "plan", "--json")) == {"changes": [], "notes": []}
            careful.wait_for(30)
            quick.wait_for(30)
        assert careful.errors == []
        assert quick.errors == []
        assert owners_of(brokers[0]) == {"b2": 3, "b3": 3}
        assert read_all(brokers) == Counter(range(careful.sent)) + Counter(range(quick.sent))
        for broker in brokers[:2]:
            assert broker.stop() == 0, broker.log.read_text()
        with memq.Admin(brokers[2].address) as admin:
            with pytest.raises(InvalidRequestError, match="no other broker takes the 6 partitions"):
                admin.drain_broker("b3")
            with pytest.raises(NotFoundError, match="no live broker is called 'b1'"):
                admin.drain_broker("b1")


def test_an_owner_that_was_paused_finds_itself_replaced_and_acks_nothing_falsely(
    tmp_path: Path, zookeeper: Server, kafka: Server
) -> None:
    with broker_processes(tmp_path, zookeeper.address, kafka=kafka.address) as brokers:
        create(brokers[0])
        with Sender(brokers) as sender:
            sender.wait_for(50)
            brokers[1].pause()  # with open batches and pointers on their way
            sender.wait_for(200)  # its partitions have new owners by then: two of them are its own
            brokers[1].resume()
            sender.wait_for(200)
        assert sender.errors == []
        assert read_all(brokers) == Counter(range(sender.sent))
        found = audit(brokers[0])
        assert found.returncode == 0, found.stdout + found.stderr


def test_without_zookeeper_owners_and_their_clients_go_on(tmp_path: Path, zookeeper: Server) -> None:
    with broker_processes(tmp_path, zookeeper.address) as brokers:
        create(brokers[0])
        with Sender(brokers) as sender:
            sender.wait_for(50)
            zookeeper.kill()
            sender.wait_for(600)  # 1.2 s and more beyond the session timeout, at 500 records a second
            zookeeper.restart()
            sender.wait_for(100)
        assert sender.errors == []
        assert read_all(brokers) == Counter(range(sender.sent))
        brokers[0].kill()
        with Sender(brokers) as sender:  # and there is one governor, who sees that
            sender.wait_for(50)
        assert sender.errors == []


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
