"""The governor killed, ZooKeeper down, sessions expired, under load: clients continue; one governs then."""

from __future__ import annotations

import pytest

from memq_localstack.servers import Server
from tests.load import GroupReader, Sender, check_read, create
from tests.owners import governor_of, settled
from tests.processes import BrokerProcess, path_of
from tests.soak import repetitions, report, seconds
from tests.zookeeper_nodes import count_nodes, expire


def entered_again(broker: BrokerProcess) -> int:
    """Return how often it came back after a lost session."""
    return broker.log.read_text().count(" broker-entered-again: ")


@pytest.mark.soak
def test_without_governor_zookeeper_and_sessions_clients_continue(
    brokers: list[BrokerProcess], zookeeper: Server
) -> None:
    create(brokers)
    path = path_of(brokers[0].log.parent)
    with Sender(brokers) as sender, GroupReader(brokers) as reader:
        sender.wait_for_all(5)
        nodes = count_nodes(zookeeper, path)
        for number in range(repetitions(few=1, many=5)):
            killed = governor_of(brokers, sender)
            killed.kill()
            sender.wait_for_all(5)
            killed.start()
            governor = governor_of(brokers, sender)
            report(f"{number + 1}: '{killed.name}' was killed, '{governor.name}' governs")
            times = entered_again(governor)
            expire(zookeeper, f"{path}/brokers/{governor.name}")
            sender.wait_until(lambda: entered_again(governor) > times)  # noqa: B023 - called here alone
            after = governor_of(brokers, sender)
            report(f"{number + 1}: the session of '{governor.name}' expired, '{after.name}' governs")
        settled(sender, *brokers)  # what is being moved waits for ZooKeeper
        before = sender.sent
        zookeeper.kill()
        sender.go_on_for(seconds(few=3, many=180))
        sender.wait_for_all(5)
        reader.wait_for(before)
        zookeeper.restart()
        after = governor_of(brokers, sender)
        report(f"ZooKeeper was away for {sender.sent - before} records, '{after.name}' governs")
        assert count_nodes(zookeeper, path) <= nodes  # none for what was sent; loads went with their sessions
        sender.stop()
        reader.wait_for(sender.sent)
    assert reader.errors == []
    reader.tally.check_complete(sender)
    check_read(brokers, sender)
