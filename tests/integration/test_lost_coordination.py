"""The governor killed, ZooKeeper away, sessions expired, under load: clients continue; one governs then."""

from __future__ import annotations

import pytest

import memq
from memq.errors import RetryableError
from memq_localstack.servers import Server
from tests.load import GroupReader, Sender, check_read, create
from tests.owners import settled
from tests.processes import BrokerProcess, path_of
from tests.soak import repetitions, report, seconds
from tests.zookeeper_nodes import count_nodes, expire, owner_of


def governors(brokers: list[BrokerProcess]) -> dict[str, list[str]]:
    """Return for each broker of a whole cluster who governs, as it knows; nothing while one is missing."""
    found = {}
    for broker in brokers:
        try:
            with memq.Admin(broker.address) as admin:
                listed = admin.brokers()
        except RetryableError:  # it has not found its coordinator again
            return {}
        if len(listed) != len(brokers):
            return {}
        found[broker.name] = [each.broker for each in listed if each.governs]
    return found


def one_governs(brokers: list[BrokerProcess]) -> bool:
    """Whether all brokers are there, and agree on one governor."""
    found = list(governors(brokers).values())
    return bool(found) and len(found[0]) == 1 and found.count(found[0]) == len(found)


def governor_of(brokers: list[BrokerProcess]) -> BrokerProcess:
    ((name,),) = {tuple(names) for names in governors(brokers).values()}
    return next(broker for broker in brokers if broker.name == name)


def entered_again(broker: BrokerProcess) -> int:
    """Return how often it came back after a lost session."""
    return broker.log.read_text().count(" broker-entered-again: ")


@pytest.mark.soak
def test_without_governor_zookeeper_and_sessions_clients_go_on(brokers: list[BrokerProcess], zookeeper: Server) -> None:
    create(brokers)
    path = path_of(brokers[0].log.parent)
    with Sender(brokers) as sender, GroupReader(brokers) as reader:
        sender.wait_for_all(5)
        nodes = count_nodes(zookeeper, path)
        for number in range(repetitions(few=1, many=5)):
            governor = governor_of(brokers)
            governor.kill()
            sender.wait_for_all(5)
            governor.start()
            sender.wait_until(lambda: one_governs(brokers))
            report(f"{number + 1}: '{governor.name}' was killed, '{governor_of(brokers).name}' governs")
            governor = governor_of(brokers)
            times = entered_again(governor)
            expire(zookeeper, owner_of(zookeeper, f"{path}/brokers/{governor.name}"))
            sender.wait_until(lambda: entered_again(governor) > times)  # noqa: B023 - called here alone
            sender.wait_until(lambda: one_governs(brokers))
            report(f"{number + 1}: the session of '{governor.name}' expired, '{governor_of(brokers).name}' governs")
        settled(sender, *brokers)  # what is being moved waits for ZooKeeper
        before = sender.sent
        zookeeper.kill()
        sender.go_on_for(seconds(few=3, many=180))
        sender.wait_for_all(5)
        reader.wait_for(before)
        zookeeper.restart()
        sender.wait_until(lambda: one_governs(brokers))
        report(f"ZooKeeper was away for {sender.sent - before} records, '{governor_of(brokers).name}' governs")
        assert count_nodes(zookeeper, path) <= nodes  # none for what was sent; loads went with their sessions
        sender.stop()
        reader.wait_for(sender.sent)
    assert reader.errors == []
    reader.tally.check_complete(sender)
    check_read(brokers, sender)
