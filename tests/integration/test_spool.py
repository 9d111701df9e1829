"""ack=1 on disk with real processes: blocks acked before a kill are delivered once after the start."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

import memq
from memq.broker.spool.files import sizes_in
from tests.load import HOLDING, PARTITIONS, TOPIC, Sender, addresses_of
from tests.owners import owned_by, owner_of, settled, wait_for_takeover
from tests.processes import BrokerProcess
from tests.servers import DevServer, dev_server
from tests.soak import repetitions

TIMEOUT_S = 60.0


def read_all(server: DevServer) -> Counter[bytes]:
    with memq.Consumer(server.address, ["clicks"], start="beginning", end="end") as consumer:
        return Counter(value or b"" for batch in consumer for value in batch.values())


@pytest.mark.soak
def test_a_broker_that_is_killed_keeps_what_it_acked_with_1(tmp_path: Path) -> None:
    """Killed at any moment, with records acked and not published; the producer continues with the next life."""
    sent = 0
    with dev_server(tmp_path / "data") as server:
        with memq.Admin(server.address) as admin:
            admin.create_topic("clicks", settings=HOLDING)
        for life in range(repetitions(few=2, many=30)):
            with memq.Producer(server.address, acks=1, linger_ms=1, block_bytes=2048) as producer:
                for number in range(sent, sent + 3_000):
                    producer.send("clicks", b"%d" % number)
                producer.flush(timeout=TIMEOUT_S)
                sent += 3_000
                server.kill()
                assert life or sizes_in(server.data / "spool")
                assert life or not server.objects_of("clicks")
                server.start()
        server.signal()
        assert server.wait() == 0, "the drain waits until the spool is empty"
        assert not sizes_in(server.data / "spool")
        server.start()
        assert read_all(server) == Counter(b"%d" % number for number in range(sent))


@pytest.mark.soak
def test_an_owner_that_was_killed_comes_back_and_brings_what_it_had_acked_to_the_next_one(
    brokers: list[BrokerProcess],
) -> None:
    """On S3, Kafka and ZooKeeper: others have taken its partitions over meanwhile."""
    with memq.Admin(addresses_of(brokers)) as admin:
        admin.create_topic(TOPIC, partitions=PARTITIONS, settings=HOLDING)
    with Sender(brokers, acks="1") as sender:
        for _ in range(repetitions(few=1, many=10)):
            before = settled(sender, *brokers)
            victim, witness = owner_of(0, before, brokers)
            lost = owned_by(victim, before)
            victim.kill()
            wait_for_takeover(sender, witness, before, lost)
            assert sizes_in(victim.spool)
            lives = victim.log.read_text().count("spool-replayed: ")
            victim.start()
            sender.wait_until(lambda: victim.log.read_text().count("spool-replayed: ") > lives)  # noqa: B023
    assert sender.errors == []
    for broker in brokers:  # the last one has nobody to hand its partitions to
        assert broker.stop() == 0, broker.log.read_text()
        assert not sizes_in(broker.spool)
    brokers[0].start()
    with memq.Consumer(brokers[0].address, [TOPIC], end="end") as consumer:
        got = Counter(int((record.value or b"").split()[1]) for batch in consumer for record in batch)
    assert got == Counter(range(sender.sent)), (len(got), sender.sent)
