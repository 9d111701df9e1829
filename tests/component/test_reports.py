"""Clients report their work to the audit topic of a real broker, and continue when they can't."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import memq
from memq.broker.start_steps import audit_topic_settings
from memq.client.admin import Admin
from memq.client.consumer.batch import TopicPartition
from memq.client.consumer.consumer import Consumer
from memq.client.consumer.settings import OnDamaged
from memq.client.producer.producer import Producer
from memq.errors import CorruptDataError, InvalidNameError, InvalidSettingError, MemqError, NotFoundError
from memq.format.ranges import RangeSet
from memq.format.report import AUDIT_TOPIC, Kind
from memq.testing import Cluster
from memq.topic import Position, TopicSettings
from tests.brokers import run, running_broker
from tests.component.live_reports import ReceivedReports

WAIT_S = 60.0


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(audit=True, audit_interval_ms=100) as running:
        with Admin(running.address) as admin:
            while not admin.topics(internal=True):  # it is made once the broker serves
                pass
        yield running


def send(cluster: Cluster, count: int, first: int = 0) -> None:
    with Producer(cluster.address) as producer:
        producer.send_many("clicks", [b"%d" % number for number in range(first, first + count)])


def test_a_producer_and_a_group_say_what_they_did(cluster: Cluster) -> None:
    everything, audit_topic = RangeSet([(0, 1_000)]), ReceivedReports(cluster)
    with Producer(cluster.address) as producer:
        producer.send_many("clicks", [b"%d" % number for number in range(1_000)])
        producer.flush(WAIT_S)
        with Consumer(cluster.address, "clicks", group="g", end="end") as consumer:
            assert sum(len(batch) for batch in consumer) == 1_000
            consumer.commit()
            position = consumer.committed()[TopicPartition("clicks", 0)]
            audit_topic.until(lambda: audit_topic.stages("consumer").get("processed") == everything)
        audit_topic.until(lambda: audit_topic.stages("producer").get("acked") == everything)
    assert audit_topic.stages("producer") == {"sent": everything, "acked": everything}
    assert audit_topic.stages("consumer") == {"fetched": everything, "processed": everything}
    kinds: tuple[Kind, ...] = ("producer", "consumer")
    spans = [span for kind in kinds for part in audit_topic.parts(kind) for span in part.spans]
    assert len({span.producer for span in spans}) == 1
    latency = [count for span in spans for _, count in span.latency]
    assert sum(latency) == 4_000
    [begin] = [begin for part in audit_topic.parts("consumer") for begin in part.begins]
    assert (begin.at, begin.reason) == ("0:0:0", "start")
    assert {report.name for report in audit_topic.reports if report.kind == "consumer"} == {"g"}
    assert [part.committed for part in audit_topic.parts("consumer") if part.committed][-1] == str(position)


def test_the_audit_topic_takes_many_small_reports_that_nobody_waits_for() -> None:
    hour_ms = 3_600_000
    with (
        Cluster(audit=True, audit_partitions=3, audit_retention_ms=hour_ms) as running,
        Admin(running.address) as admin,
    ):
        while not (found := admin.topics(internal=True)):
            pass
        (topic,) = found
        assert (topic.name, len(topic.partitions)) == (AUDIT_TOPIC, 3)
        assert topic.settings == TopicSettings(retention_ms=hour_ms, shared_objects=True, seal_when_idle=False)


def test_while_it_runs_a_client_reports_and_promises(cluster: Cluster) -> None:
    audit_topic = ReceivedReports(cluster)
    with Producer(cluster.address) as producer:
        producer.send("clicks", b"1").result(WAIT_S)
        audit_topic.until(lambda: len(audit_topic.reports) >= 3)
        assert not any(report.last for report in audit_topic.reports)
    assert audit_topic.reports[-1].parts == ()
    assert [report.since_ms for report in audit_topic.reports[1:]] == [
        report.until_ms for report in audit_topic.reports[:-1]
    ]


def test_clients_report_their_end(cluster: Cluster) -> None:
    for _ in range(20):  # a close does not wait for its report for longer than a second
        send(cluster, 1)
    with Consumer(cluster.address, "clicks", end="end") as consumer:
        list(consumer)
    audit_topic = ReceivedReports(cluster)
    audit_topic.until(lambda: any(report.last for report in audit_topic.reports))


def test_clients_send_no_reports_when_the_audit_is_off(cluster: Cluster) -> None:
    with Cluster(audit=False) as quiet:
        send(quiet, 10)
        with Admin(quiet.address) as admin, pytest.raises(NotFoundError):
            admin.topic(AUDIT_TOPIC)
    with Producer(cluster.address, audit=False) as producer:
        producer.send("clicks", b"1")
    with Consumer(cluster.address, "clicks", end="end", audit=False) as consumer:
        assert sum(len(batch) for batch in consumer) == 1
    audit_topic = ReceivedReports(cluster)
    with Producer(cluster.address) as producer, Consumer(cluster.address, AUDIT_TOPIC, group="auditor") as consumer:
        producer.send("clicks", b"2")
        assert consumer.poll(timeout=WAIT_S)  # a reader of reports reports nothing
        consumer.commit()
        audit_topic.until(lambda: len(audit_topic.reports) >= 5)
    assert len({report.client for report in audit_topic.reports}) == 1


def test_the_topic_is_hidden_unless_it_is_asked_for(cluster: Cluster) -> None:
    with Admin(cluster.address) as admin:
        assert admin.topics() == []
        [topic] = admin.topics(internal=True)
    assert (topic.name, len(topic.partitions), topic.settings.shared_objects) == (AUDIT_TOPIC, 4, True)


def test_producer_reports_the_records_that_it_gives_up(cluster: Cluster) -> None:
    with Producer(cluster.address, delivery_timeout_ms=2_000) as producer:
        first = producer.send("clicks", b"1").result(WAIT_S).first_sequence
        cluster.stop_broker()
        with pytest.raises(MemqError):
            producer.send("clicks", b"2").result(WAIT_S)
        cluster.start_broker()
        audit_topic = ReceivedReports(cluster)
        audit_topic.until(lambda: "gave-up" in audit_topic.stages("producer"))
    assert audit_topic.stages("producer")["gave-up"] == RangeSet([(first + 1, first + 2)])


@pytest.mark.parametrize("policy", ["skip", "fail"])
def test_damage_is_reported_with_its_place(cluster: Cluster, policy: OnDamaged) -> None:
    send(cluster, 3)
    cluster.damage(Position(0, 1), "clicks")
    audit_topic = ReceivedReports(cluster)
    with Consumer(cluster.address, "clicks", group="g", on_damaged=policy) as consumer:
        if policy == "fail":
            with pytest.raises(CorruptDataError):
                consumer.poll(timeout=WAIT_S)
        else:
            batch = consumer.poll(timeout=WAIT_S)
            assert batch is not None
            assert len(batch.damaged) == 1
        audit_topic.until(lambda: any(part.damages for part in audit_topic.parts("consumer")))
    [damage] = {damage for part in audit_topic.parts("consumer") for damage in part.damages}
    assert (damage.block, damage.offset, damage.records) == (0, 1, 3)
    assert damage.object in cluster.store.objects
    assert "processed" not in audit_topic.stages("consumer")


def test_a_rewind_is_reported(cluster: Cluster) -> None:
    send(cluster, 10)
    audit_topic = ReceivedReports(cluster)

    def reasons() -> list[str]:
        return [begin.reason for part in audit_topic.parts("consumer") for begin in part.begins]

    with Consumer(cluster.address, "clicks", group="g") as consumer:
        for _ in range(2):
            batch = consumer.poll(timeout=WAIT_S)
            assert batch is not None
            consumer.commit(batch)
            consumer.seek("clicks", 0, "beginning")
        audit_topic.until(lambda: reasons() == ["start", "seek", "seek"])
    with Consumer(cluster.address, "clicks", group="g", end="end") as consumer:
        list(consumer)
        audit_topic.until(lambda: reasons() == ["start", "seek", "seek", "stored"])


def test_reports_outlive_their_broker(cluster: Cluster) -> None:
    audit_topic = ReceivedReports(cluster)
    with Producer(cluster.address) as producer:
        producer.send("clicks", b"1").result(WAIT_S)
        cluster.stop_broker()
        delivery = producer.send("clicks", b"2")
        cluster.start_broker()
        delivery.result(WAIT_S)
        audit_topic.until(lambda: audit_topic.stages("producer").get("acked") == RangeSet([(0, 2)]))


def test_without_the_topic_the_work_continues() -> None:
    async def work() -> None:
        async with running_broker(audit=True, audit_interval_ms=100) as broker:
            await broker.partitions.delete(broker.partitions.topic(AUDIT_TOPIC))
            async with memq.aio.Producer(broker.address, linger_ms=1) as producer:
                for number in range(10):
                    await producer.send("clicks", b"%d" % number)
            async with memq.aio.Consumer(broker.address, "clicks", end="end") as consumer:
                assert sum([len(batch) async for batch in consumer]) == 10

    run(work())


def test_the_topic_is_not_deleted_while_a_broker_audits(cluster: Cluster) -> None:
    with Admin(cluster.address) as admin:
        with pytest.raises(InvalidNameError, match="'_memq_audit' is memq's own, and can't be deleted") as refused:
            admin.delete_topic(AUDIT_TOPIC)
        assert "audit = off" in refused.value.hint
        assert admin.topic(AUDIT_TOPIC).topic.name == AUDIT_TOPIC


def test_the_topic_is_deleted_where_no_broker_audits() -> None:
    async def work() -> None:
        async with running_broker(audit=False) as broker, memq.aio.Admin(broker.address) as admin:
            settings = audit_topic_settings(3_600_000)
            await broker.partitions.create(AUDIT_TOPIC, 1, settings, exist_ok=False, internal=True)
            await admin.delete_topic(AUDIT_TOPIC)
            assert await admin.topics(internal=True) == []

    run(work())


def test_only_the_retention_of_the_topic_is_altered(cluster: Cluster) -> None:
    with Admin(cluster.address) as admin:
        assert admin.alter_topic(AUDIT_TOPIC, settings={"retention_ms": 7_200_000}).settings.retention_ms == 7_200_000
        for settings in ({"write_partitions_max": 9}, {"retention_ms": 3_600_000, "ring_slots": 2}):
            with pytest.raises(InvalidSettingError, match="retention_ms is its only setting"):
                admin.alter_topic(AUDIT_TOPIC, settings=settings)
        assert admin.topic(AUDIT_TOPIC).topic.settings.retention_ms == 7_200_000
