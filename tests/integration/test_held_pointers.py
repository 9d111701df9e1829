"""An owner is paused while Kafka's client holds its pointer: the late pointer doubles nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from memq_localstack.servers import S3Server, Server
from tests.integration.delayed_kafka import Door, delayed_kafka
from tests.load import Sender, check_read, create
from tests.owners import owned_by, settled, wait_for_takeover
from tests.processes import BrokerProcess, broker_processes
from tests.soak import SOAKING, repetitions, report

STALE_PUBLISH_MS = [30_000, 2_000] if SOAKING else [30_000]
Rig = tuple[list[BrokerProcess], Door]


@pytest.fixture
def rig(tmp_path: Path, zookeeper: Server, reads_s3: S3Server) -> Iterator[Rig]:
    """Run two brokers: the second one reaches Kafka through the door."""
    with (
        delayed_kafka(tmp_path / "kafka") as kafka,
        broker_processes(tmp_path, zookeeper, kafka.server, reads_s3, count=1) as brokers,
    ):
        config = tmp_path / "held.toml"
        settings = (tmp_path / "memq.toml").read_text()
        config.write_text(settings.replace(f"kafka://{kafka.server.address}", f"kafka://{kafka.door.address}"))
        held = BrokerProcess(config, "b2")
        try:
            held.start()
            yield [*brokers, held], kafka.door
        finally:
            held.close()


@pytest.mark.soak
@pytest.mark.parametrize("stale_publish_ms", STALE_PUBLISH_MS)
def test_pointers_that_are_sent_when_another_owner_is_at_work(rig: Rig, stale_publish_ms: int) -> None:
    """They land as late (within S), or are refused by the queue (S is over)."""
    brokers, door = rig
    witness, victim = brokers
    create(brokers, stale_publish_ms=stale_publish_ms)
    with Sender(brokers) as one, Sender(brokers) as two:
        for number in range(repetitions(few=1, many=5)):
            if not owned_by(victim, settled(one, *brokers)):  # it gets everything when the other one goes
                assert witness.stop() == 0, witness.log.read_text()
                witness.start()
            before = settled(one, *brokers)
            lost = owned_by(victim, before)
            assert lost, "the broker behind the door owns nothing"
            door.hold()
            victim.pause()
            wait_for_takeover(one, witness, before, lost)
            for sender in (one, two):
                sender.wait_for_records(500, lost)
            door.release()
            victim.resume()
            one.wait_for_all(10)
            report(f"hold {number + 1}: '{victim.name}' owned {lost}, S {stale_publish_ms} ms, {one.sent} sent")
    check_read(brokers, one, two)
