"""Old batches on real servers, and a broker whose retention runs often."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import memq
from memq_localstack.servers import S3Server, Server
from tests.processes import BrokerProcess, broker_processes

BATCHES = 6
BEHIND_MS = 50 * 60_000
SLOW = {"stale_publish_ms": 3_600_000, "dedup_window_ms": 7_400_000, "retention_ms": 0}  # so that the queue takes them
QUICK = {"stale_publish_ms": 30_000, "dedup_window_ms": 300_000}
HANG_S = 120


def send(broker: BrokerProcess, topic: str, count: int) -> None:
    """Send batches of one record of 1 KB each."""
    with memq.Producer(broker.address, codec="none") as producer:
        for _ in range(count):
            producer.send(topic, b"v" * 1_000).result(timeout=HANG_S)


@contextmanager
def old_batches(folder: Path, zookeeper: Server, kafka: Server, s3: S3Server) -> Iterator[BrokerProcess]:
    """Run a broker on two topics that hold batches of the last hour: its clock was behind when it took them."""
    with broker_processes(folder, zookeeper, kafka, s3, count=0):
        config = folder / "memq.toml"
        config.write_text('retention_interval_ms = "200ms"\n' + config.read_text())
        broker = BrokerProcess(config, "b1", behind_ms=BEHIND_MS)
        try:
            broker.start()
            with memq.Admin(broker.address) as admin:
                for topic in ("aged", "sized"):
                    admin.create_topic(topic, settings=SLOW)
                    send(broker, topic, BATCHES)
            assert broker.stop() == 0, broker.log.read_text()
            broker.behind_ms = 0
            broker.start()
            yield broker
        finally:
            broker.close()
