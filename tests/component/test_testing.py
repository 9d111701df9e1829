"""`memq.testing` as its users see it: the plugin's fixture, failures and damage on demand."""

from __future__ import annotations

import gc

import pytest

import memq
from memq.errors import (
    ClosedError,
    CorruptDataError,
    InvalidRequestError,
    NotFoundError,
    UnknownSettingError,
)
from memq.testing import Cluster
from memq.topic import Position

pytest_plugins = ["memq.testing.plugin"]


def send(cluster: Cluster, *values: bytes) -> None:
    with memq.Producer(cluster.address) as producer:
        for value in values:
            producer.send("clicks", value).result(10)


def test_the_fixture_is_a_cluster_of_its_own(memq_cluster: Cluster) -> None:
    send(memq_cluster, b"0")
    assert [record.value for record in memq_cluster.records("clicks")] == [b"0"]


def test_planned_failures_are_met_once_each_and_ridden_out(memq_cluster: Cluster) -> None:
    memq_cluster.fail("store.put", times=2)
    memq_cluster.fail("queue.publish")
    send(memq_cluster, b"0")
    assert memq_cluster.faults.left("store.put") == memq_cluster.faults.left("queue.publish") == 0
    assert [record.value for record in memq_cluster.records("clicks")] == [b"0"]
    with pytest.raises(InvalidRequestError, match=r"store\.jump"):
        memq_cluster.fail("store.jump")
    with pytest.raises(TypeError, match="error must be a MemqError, as a failed call raises it, not str"):
        memq_cluster.fail("store.put", error="late")  # type: ignore[arg-type]  # as a newcomer would


def test_damage_hits_the_block_that_was_named(memq_cluster: Cluster) -> None:
    send(memq_cluster, b"0", b"1")
    second = memq_cluster.records("clicks")[1].position
    memq_cluster.damage(second)
    with pytest.raises(CorruptDataError, match=str(second)):
        memq_cluster.records("clicks")
    with pytest.raises(NotFoundError):
        memq_cluster.damage(Position(0, 99))
    with pytest.raises(TypeError, match=r"position must be a memq\.Position, as records have it, not str"):
        memq_cluster.damage("0:0:0")  # type: ignore[arg-type]  # as a newcomer would


def test_a_restarted_broker_has_what_was_stored(memq_cluster: Cluster) -> None:
    send(memq_cluster, b"0")
    address = memq_cluster.address
    memq_cluster.stop_broker()
    memq_cluster.start_broker()
    assert memq_cluster.address == address
    send(memq_cluster, b"1")
    assert [record.value for record in memq_cluster.records("clicks")] == [b"0", b"1"]


def test_two_clusters_share_nothing(memq_cluster: Cluster) -> None:
    with Cluster(partitions=3) as other:
        send(other, b"0")
        with memq.Admin(other.address) as admin:
            assert len(admin.topic("clicks").topic.partitions) == 3
        with memq.Admin(memq_cluster.address) as admin:
            assert admin.topics() == []


def test_records_acked_on_disk_survive_their_broker(memq_cluster: Cluster) -> None:
    holding = {"seal_when_idle": False, "batch_age_ms_max": 600_000, "stale_publish_ms": 1_000}
    memq_cluster.create_topic("clicks", settings={"ack1": "disk", **holding})
    with memq.Producer(memq_cluster.address, acks=1) as producer:
        producer.send("clicks", b"0").result(60)
    memq_cluster.stop_broker()
    assert memq_cluster.store.objects == {}
    memq_cluster.start_broker()
    with memq.Consumer(memq_cluster.address, "clicks", start="beginning") as consumer:
        batch = consumer.poll(timeout=60)
        assert batch is not None
        assert batch.values() == [b"0"]


def test_a_cluster_that_is_closed_says_so() -> None:
    cluster = Cluster()
    cluster.create_topic("t")
    cluster.close()
    cluster.close()
    for ask in (lambda: cluster.create_topic("u"), lambda: cluster.records("t"), cluster.stop_broker):
        with pytest.raises(ClosedError, match="the test cluster is closed"):
            ask()


def test_a_broker_that_runs_is_not_started_again(memq_cluster: Cluster) -> None:
    send(memq_cluster, b"0")
    address = memq_cluster.address
    with pytest.raises(InvalidRequestError, match="the broker runs"):
        memq_cluster.start_broker()
    assert memq_cluster.address == address
    memq_cluster.stop_broker()
    memq_cluster.start_broker()
    assert (memq_cluster.address, [record.value for record in memq_cluster.records("clicks")]) == (address, [b"0"])


def test_a_broker_that_can_not_start_leaves_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    gc.collect()  # of what earlier tests left
    caplog.clear()
    with Cluster() as cluster, pytest.raises(InvalidRequestError, match="another process listens there"):
        Cluster(port=int(cluster.address.rpartition(":")[2]))
    gc.collect()
    assert [record.getMessage() for record in caplog.records] == []  # asyncio names each task that was left


def test_damage_of_a_missing_record_is_refused(memq_cluster: Cluster) -> None:
    send(memq_cluster, b"0")
    position = memq_cluster.records("clicks")[0].position
    with pytest.raises(NotFoundError, match="topic 'click' does not exist"):
        memq_cluster.damage(position, "click")
    memq_cluster.remove_object(position)
    with pytest.raises(NotFoundError, match=f"the object at {position} is removed"):
        memq_cluster.damage(position)


@pytest.mark.parametrize("name", ["acks", "store", "prot"])
def test_only_settings_of_a_broker_are_settings_of_a_cluster(name: str) -> None:
    with pytest.raises(UnknownSettingError, match=f"a broker has no setting '{name}'"):
        Cluster(**{name: "all"})
