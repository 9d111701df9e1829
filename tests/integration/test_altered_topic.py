"""An altered topic: running owners take each setting from the next batch on, in `memq dev` and in a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

import memq
from memq.errors import TimedOutError
from tests.load import addresses_of
from tests.processes import BrokerProcess
from tests.servers import dev_server

ACK_S = 60.0
# Of a batch with one record nothing but an altered setting seals it within ten minutes.
SLOW: dict[str, int | bool] = {"seal_when_idle": False, "batch_age_ms_max": 600_000}
ALTERED: list[dict[str, int | bool]] = [
    {"batch_age_ms_max": 50},
    {"seal_when_idle": True},
    {"batch_blocks_max": 1},
    {"batch_bytes_max": 4_096},
    {"ring_slots": 2, "uploads_in_flight_max": 1, "seal_when_idle": True},
]


def send_and_alter(brokers: str, at: str, topic: str, altered: dict[str, int | bool], partitions: int) -> None:
    """Send a record to each partition, have one broker alter the topic, and take all acks; then send once more."""
    with memq.Admin(at) as admin, memq.Producer(brokers, codec="none") as producer:
        admin.create_topic(topic, partitions=partitions, settings=SLOW)
        waiting = [producer.send(topic, b"x" * 5_000, partition=number) for number in range(partitions)]
        with pytest.raises(TimedOutError):
            producer.flush(0.5)  # they lie in open batches
        admin.alter_topic(topic, settings=altered)
        for delivery in waiting:
            delivery.result(ACK_S)
        for number in range(partitions):
            producer.send(topic, b"x" * 5_000, partition=number).result(ACK_S)


@pytest.mark.parametrize("altered", ALTERED, ids=lambda altered: next(iter(altered)))
def test_a_running_broker_takes_altered_settings_from_the_next_batch(
    altered: dict[str, int | bool], tmp_path: Path
) -> None:
    with dev_server(tmp_path / "data") as server:
        send_and_alter(server.address, server.address, "clicks", altered, 1)


def test_all_owners_of_a_cluster_take_what_one_broker_altered(brokers: list[BrokerProcess]) -> None:
    for number, altered in enumerate(ALTERED[:2]):
        send_and_alter(addresses_of(brokers), brokers[number].address, f"clicks-{number}", altered, 6)
