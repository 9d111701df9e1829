"""Blocks acked with 1 that only a paused owner holds reach the broker that replaces it, on real servers."""

from __future__ import annotations

from collections import Counter

import pytest

import memq
from tests.load import PARTITIONS, TOPIC, Sender, addresses_of
from tests.owners import owned_by, owner_of, owners_of, settled, wait_for_takeover
from tests.processes import BrokerProcess
from tests.soak import SOAKING

# Batches stay open for long: what is acked with 1 lies in its owner's memory, and nowhere else.
HOLDING = {"seal_when_idle": False, "batch_age_ms_max": 10_000, "stale_publish_ms": 2_000}


def forwarded(broker: BrokerProcess) -> int:
    """Return how many partitions' blocks a broker brought to others, as its log tells."""
    return broker.log.read_text().count(" forwarded: ")


@pytest.mark.soak
@pytest.mark.skipif(not SOAKING, reason="it takes minutes: make soak")
def test_blocks_of_a_paused_owner_reach_the_next_one_and_every_broker_may_leave(brokers: list[BrokerProcess]) -> None:
    with memq.Admin(addresses_of(brokers)) as admin:
        admin.create_topic(TOPIC, partitions=PARTITIONS, settings=dict(HOLDING))
    with Sender(brokers, acks="1") as sender:
        before = settled(sender, *brokers)
        victim, witness = owner_of(0, before, brokers)
        lost = owned_by(victim, before)
        victim.pause()
        wait_for_takeover(sender, witness, before, lost)
        sender.wait_for_all(5)
        victim.resume()
        sender.wait_until(lambda: forwarded(victim) >= 1)
    assert sender.errors == []
    for broker in brokers:  # the last one has nobody to hand its partitions to
        assert broker.stop() == 0, broker.log.read_text()
    witness.start()
    with memq.Consumer(witness.address, [TOPIC], end="end") as consumer:
        got = Counter(int((record.value or b"").split()[1]) for batch in consumer for record in batch)
    assert got == Counter(range(sender.sent)), (len(got), sender.sent)
    assert owners_of(witness).keys() == before.keys()
