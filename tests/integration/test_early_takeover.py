"""Owners and the governor killed under load: others take over while ZooKeeper still has the victims' sessions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from memq_localstack.servers import S3Server, Server
from tests.load import Sender, check_read, create
from tests.owners import governor_of, owned_by, settled, wait_for_takeover
from tests.processes import BrokerProcess, broker_processes, path_of
from tests.soak import report
from tests.zookeeper_nodes import outsider

SESSION_TIMEOUT_MS = 60_000  # a takeover that waits for it finds no node of the victim


@pytest.fixture
def slow_sessions(
    tmp_path: Path, zookeeper: Server, kafka: Server, reads_s3: S3Server
) -> Iterator[list[BrokerProcess]]:
    """Three brokers whose sessions outlive them for long."""
    with broker_processes(tmp_path, zookeeper, kafka, reads_s3, session_timeout_ms=SESSION_TIMEOUT_MS) as processes:
        yield processes


def has_session(zookeeper: Server, broker: BrokerProcess) -> bool:
    """Whether ZooKeeper still has the session of a broker."""
    with outsider(zookeeper) as client:
        return client.exists(f"{path_of(broker.log.parent)}/brokers/{broker.name}") is not None


@pytest.mark.soak
def test_killed_owners_and_governors_are_replaced_before_their_sessions_end(
    slow_sessions: list[BrokerProcess], zookeeper: Server
) -> None:
    """An owner is killed first, then the governor."""
    brokers = slow_sessions
    create(brokers)
    with Sender(brokers) as one, Sender(brokers) as two:
        first = governor_of(brokers, one)
        for victim in (next(each for each in brokers if each is not first), first):
            witness = next(each for each in brokers if each is not victim)
            before = settled(one, *brokers)
            lost = owned_by(victim, before)
            victim.kill()
            one.wait_for_all(5)
            two.wait_for_all(5)
            assert has_session(zookeeper, victim), "the takeover did not wait for it"
            after = wait_for_takeover(one, witness, before, lost)
            epochs = {each: after[each][1] - before[each][1] for each in before}
            assert epochs == {each: int(after[each][0] != before[each][0]) for each in before}
            victim.start()
            governor = governor_of(brokers, one)
            assert governor is not victim
            report(f"'{victim.name}' was killed with {lost}, '{governor.name}' governs")
    check_read(brokers, one, two)
