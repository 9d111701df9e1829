"""Dead letters of a consumer that polls for short times."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import memq
from memq.testing import Cluster


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


def send_damaged(cluster: Cluster) -> None:
    """Send three records in batches of their own; the first one is damaged."""
    with memq.Producer(cluster.address, audit=False) as producer:
        for value in (b"0", b"1", b"2"):
            producer.send("clicks", value).result(10)
    cluster.damage(cluster.records("clicks")[0].position)


def test_a_letter_is_sent_once_by_polls_that_are_shorter_than_its_ack(cluster: Cluster) -> None:
    send_damaged(cluster)
    cluster.create_topic("clicks.dlq")
    cluster.fail("store.put", 3)  # the ack comes after some retries of the broker
    values: list[bytes | None] = []
    polls = 0
    with memq.Consumer(cluster.address, "clicks", on_damaged="dead-letter", audit=False) as consumer:
        while len(values) < 2:
            batch = consumer.poll(0.02)
            polls += 1
            values += batch.values() if batch is not None else []
        assert consumer.stats().dead_letters == 1
    assert polls > 5, "the first polls ended before the ack"
    assert values == [b"1", b"2"]
    assert len(cluster.records("clicks.dlq")) == 1
