"""`memq audit` while a broker with ack=1 blocks on disk is down, replays, and after: never lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import memq
from memq.cli import main
from tests.load import HOLDING, addresses_of
from tests.memq_process import BrokerServer
from tests.owners import owner_of, owners_of
from tests.processes import BrokerProcess
from tests.servers import dev_server

TIMEOUT_S = 60.0
RECORDS = 3_000
# The replay begins when no pointer of the earlier run can land: until then the records lie on disk alone.
SLOW: dict[str, int | bool | str] = {**HOLDING, "stale_publish_ms": 10_000}
MISSING = ("lost", "held", "unproven hole")


class Audits:
    """Runs `memq audit` through a broker, and reads what it prints."""

    def __init__(self, broker: BrokerServer, capsys: pytest.CaptureFixture[str]) -> None:
        self._broker = broker
        self._capsys = capsys
        self.verdict: dict[str, Any] = {}

    def missing(self) -> dict[str, int]:
        """Return how many records have no pointer, by what that means."""
        self._capsys.readouterr()
        code = main(["audit", "clicks", "-b", self._broker.address, "--json"])
        self.verdict = json.loads(self._capsys.readouterr().out)
        found = {each["kind"]: each["count"] for each in self.verdict["findings"]}
        assert code == (1 if found.get("lost") else 0), self.verdict
        return {kind: found[kind] for kind in MISSING if kind in found}

    def until_replayed(self, owner: BrokerServer) -> list[dict[str, int]]:
        """Audit again and again until a broker has brought its spool; return what was missing each time."""
        seen: list[dict[str, int]] = []
        while "spool-replayed: " not in owner.log.read_text():
            seen.append(self.missing())
        return seen


def acked(producer: memq.Producer) -> None:
    for number in range(RECORDS):
        producer.send("clicks", b"%d" % number)
    producer.flush(timeout=TIMEOUT_S)


def test_memq_dev_that_was_killed_holds_what_it_acked_on_its_disk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with dev_server(tmp_path / "data") as server:
        with memq.Admin(server.address) as admin:
            admin.create_topic("clicks", settings=SLOW)
        with memq.Producer(server.address, acks=1, linger_ms=1, block_bytes=2048) as producer:
            acked(producer)
            audits = Audits(server, capsys)
            assert sum(audits.missing().values()) == 0, "its producer has not ended"
            server.kill()
            capsys.readouterr()
            assert main(["audit", "clicks", "-b", server.address, "--json"]) != 0
            assert capsys.readouterr().out == "", "nobody answers, and no verdict is printed"
            server.start()
        assert audits.missing() == {"held": RECORDS}
        seen = audits.until_replayed(server)
        assert all(set(each) <= {"held"} for each in seen), seen
        assert audits.missing() == {}
        assert audits.verdict["coverage"]["records"] == RECORDS


def test_an_owner_that_was_killed_leaves_in_doubt_what_it_acked_and_holds_it_when_it_is_back(
    brokers: list[BrokerProcess], capsys: pytest.CaptureFixture[str]
) -> None:
    """On S3, Kafka and ZooKeeper: another broker has taken the partition over, and the end of the producer."""
    with memq.Admin(addresses_of(brokers)) as admin:
        admin.create_topic("clicks", settings=SLOW)
    with memq.Producer(addresses_of(brokers), acks=1, linger_ms=1, block_bytes=2048) as producer:
        acked(producer)
        victim, witness = owner_of(0, owners_of(brokers[0]), brokers)
        audits = Audits(witness, capsys)
        victim.kill()
        producer.close(timeout=TIMEOUT_S)  # it reports its end to the next owner
    assert audits.missing() == {"unproven hole": RECORDS}, json.dumps(audits.verdict)
    (hole,) = (each for each in audits.verdict["findings"] if each["kind"] == "unproven hole")
    assert hole["places"][0]["cause"].startswith(f"broker '{victim.name}' may hold them"), hole
    victim.start()
    seen = audits.until_replayed(victim)
    assert all(set(each) <= {"held", "unproven hole"} and sum(each.values()) <= RECORDS for each in seen), seen
    assert {"held": RECORDS} in seen
    assert audits.missing() == {}
    assert audits.verdict["coverage"]["records"] == RECORDS
