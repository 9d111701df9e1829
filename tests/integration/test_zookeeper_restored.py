"""A ZooKeeper restored from an old backup under load: no record is lost."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from memq_localstack.servers import S3Server, Server, start_zookeeper
from tests.load import Sender, check_read, create
from tests.owners import governor_of, owned_by, owner_of, owners_of, settled, wait_for_takeover
from tests.processes import broker_processes
from tests.soak import SOAKING, report


@pytest.fixture
def own_zookeeper(tmp_path: Path) -> Iterator[Server]:
    with start_zookeeper(tmp_path / "zookeeper") as server:
        yield server


@pytest.mark.soak
@pytest.mark.skipif(not SOAKING, reason="it takes minutes: make soak")
def test_a_zookeeper_from_an_old_backup_costs_no_record(
    tmp_path: Path, own_zookeeper: Server, kafka: Server, reads_s3: S3Server
) -> None:
    data, backup = own_zookeeper.folder / "data", tmp_path / "backup"
    with broker_processes(tmp_path, own_zookeeper, kafka, reads_s3) as brokers:
        create(brokers)
        with Sender(brokers) as sender:
            settled(sender, *brokers)
            own_zookeeper.stop()
            shutil.copytree(data, backup)
            own_zookeeper.start()
            governor_of(brokers, sender)
            for partition in range(2):
                before = settled(sender, *brokers)
                victim, witness = owner_of(partition, before, brokers)
                victim.kill()
                wait_for_takeover(sender, witness, before, owned_by(victim, before))
                victim.start()
            now = settled(sender, *brokers)
            own_zookeeper.stop()
            shutil.rmtree(data)
            shutil.copytree(backup, data)
            own_zookeeper.start()
            governor_of(brokers, sender)
            after = settled(sender, *brokers)
            sender.wait_for_all(10)
            report(f"epochs before: {now}, after ZooKeeper went back: {after}, {owners_of(brokers[0])}")
        check_read(brokers, sender)
