"""Three brokers as processes on S3, Kafka and ZooKeeper: drain of one, rolling restart of all."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from functools import partial

import pytest

import memq
from memq.errors import InvalidRequestError, NotFoundError
from tests.load import TOPIC, Sender, addresses_of, check_read, create
from tests.processes import BrokerProcess
from tests.soak import repetitions, report

UNREACHABLE = 5  # exit code


def said(brokers: list[BrokerProcess], *arguments: str) -> str:
    """Return what a command prints. On a busy machine the brokers may lose ZooKeeper for a moment: then ask again."""
    command = [sys.executable, "-m", "memq", *arguments, "-b", addresses_of(brokers)]
    ask = partial(subprocess.run, command, capture_output=True, text=True, check=False, timeout=90)
    done = ask()
    for _ in range(2):
        done = ask() if done.returncode == UNREACHABLE else done
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def owners_of(broker: BrokerProcess) -> Counter[str]:
    with memq.Admin(broker.address) as admin:
        return Counter(owner.broker for owner in admin.topic(TOPIC).owners)


def test_a_drained_broker_owns_nothing_and_nobody_notices(brokers: list[BrokerProcess]) -> None:
    create(brokers)
    with Sender(brokers) as careful, Sender(brokers, acks="1") as quick:
        careful.wait_for(30)
        quick.wait_for(30)
        said(brokers, "broker", "drain", "b1", "--yes")
        listed = {entry["broker"]: entry for entry in json.loads(said(brokers, "broker", "list", "--json"))}
        assert [listed[name]["partitions"] for name in ("b1", "b2", "b3")] == [0, 5, 5]  # four are of the reports
        assert [listed[name]["draining"] for name in ("b1", "b2", "b3")] == [True, False, False]
        assert [entry["governs"] for entry in listed.values()].count(True) == 1
        assert json.loads(said(brokers, "governor", "plan", "--json")) == {"changes": [], "notes": []}
        careful.wait_for(30)
        quick.wait_for(30)
    owners = owners_of(brokers[0])
    assert (sorted(owners), sum(owners.values())) == (["b2", "b3"], 6)
    check_read(brokers, careful, quick)
    for broker in brokers[:2]:
        assert broker.stop() == 0, broker.log.read_text()
    with memq.Admin(brokers[2].address) as admin:
        with pytest.raises(InvalidRequestError, match="no other broker has taken the 10 partitions"):
            admin.drain_broker("b3")
        with pytest.raises(NotFoundError, match="broker 'b1' is not running"):
            admin.drain_broker("b1")


def test_a_broker_that_lives_is_not_pushed_out_by_one_that_starts_under_its_id(brokers: list[BrokerProcess]) -> None:
    create(brokers)
    first = brokers[0]
    second = BrokerProcess(first.config, first.name, log="b1-again.log")
    try:
        second.launch()
        assert second.wait() == 2
        assert f"a broker at {first.address} runs under the id 'b1' already (give each" in second.log.read_text()
        assert [entry["address"] for entry in json.loads(said(brokers, "broker", "list", "--json"))] == [
            broker.address for broker in brokers
        ]
        first.kill()
        second.start()  # it does not wait for the end of the dead one's session
        assert second.stop() == 0
    finally:
        second.close()


@pytest.mark.soak
def test_a_rolling_restart_costs_no_producer_anything(brokers: list[BrokerProcess]) -> None:
    create(brokers)
    with Sender(brokers) as careful, Sender(brokers, acks="1") as quick:
        careful.wait_for_all()
        quick.wait_for_all()
        for number in range(repetitions(few=1, many=10)):
            for broker in brokers:
                assert broker.stop() == 0, broker.log.read_text()
                broker.start()
                careful.wait_for_all(5)
                quick.wait_for_all(5)
            report(f"rolling restart {number + 1}: {careful.sent} and {quick.sent} records, no error")
    check_read(brokers, careful, quick)
    said(brokers, "audit", TOPIC)
