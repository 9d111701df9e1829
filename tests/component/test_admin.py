"""Admin, sync, against a real broker on memory; and read_arrow."""

from __future__ import annotations

import asyncio
import gc
import json
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

import memq
from memq.cli import main
from memq.cli.exporter import lag_metrics
from memq.client.admin import AsyncAdmin
from memq.errors import (
    AlreadyExistsError,
    InvalidNameError,
    InvalidRequestError,
    InvalidSettingError,
    NotFoundError,
    QueueError,
    UnknownSettingError,
    UnreachableError,
)
from memq.groups import GroupState
from memq.groups.coordinator import GroupCoordinator
from memq.notification import Span
from memq.notification.memory import MemoryQueue
from memq.runtime.clock import SystemClock
from memq.testing import Cluster
from memq.topic import Position, ReadPartition
from tests.brokers import run, running_broker


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
def admin(cluster: Cluster) -> Iterator[memq.Admin]:
    with memq.Admin(cluster.address) as admin:
        yield admin


def send(cluster: Cluster, *values: bytes) -> None:
    with memq.Producer(cluster.address) as producer:
        for value in values:
            producer.send("clicks", value).result(10)


def test_topics_are_made_shown_altered_and_deleted(admin: memq.Admin) -> None:
    made = admin.create_topic("clicks", partitions=4, settings={"retention_bytes": 1 << 30})
    assert (made.name, len(made.partitions), made.settings.retention_bytes) == ("clicks", 4, 1 << 30)
    with pytest.raises(AlreadyExistsError):
        admin.create_topic("clicks")
    assert admin.create_topic("clicks", exist_ok=True).id == made.id
    assert [topic.name for topic in admin.topics()] == ["clicks"]
    assert len(admin.topic("clicks").owners) == 4
    assert admin.alter_topic("clicks", settings={"retention_bytes": 1 << 20}).settings.retention_bytes == 1 << 20
    admin.delete_topic("clicks")
    assert admin.topics() == []
    assert admin.create_topic("clicks").id != made.id


def test_topics_end_behind_their_last_pointer(cluster: Cluster, admin: memq.Admin) -> None:
    topics = [admin.create_topic("clicks"), admin.create_topic("views", partitions=3)]
    before = admin.ends(topics)
    send(cluster, b"1", b"2")
    after = admin.ends(topics)
    assert (len(after["clicks"]), after["views"]) == (1, before["views"])
    assert after["clicks"][0] >= before["clicks"][0] + 2
    assert sum(each.records for each in admin.end_totals(topics[0]).values()) == 2
    admin.delete_topic("views")
    with pytest.raises(NotFoundError):
        admin.ends(topics)


def test_mistakes_get_their_own_errors(admin: memq.Admin) -> None:
    with pytest.raises(NotFoundError):
        admin.topic("nowhere")
    with pytest.raises(NotFoundError):
        admin.delete_topic("nowhere")
    with pytest.raises(NotFoundError):
        admin.group("nowhere")
    with pytest.raises(InvalidNameError):
        admin.create_topic("..")
    with pytest.raises(UnknownSettingError) as caught:
        admin.create_topic("clicks", settings={"retention": 1})
    assert "retention" in str(caught.value)
    with pytest.raises(InvalidSettingError):
        admin.create_topic("clicks", settings={"dedup_window_ms": 5_000})
    with pytest.raises(InvalidRequestError):
        admin.create_topic("clicks", partitions=0)


def test_an_admin_that_is_forgotten_is_warned_of(cluster: Cluster) -> None:
    admin = memq.Admin(cluster.address)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        del admin
        gc.collect()
    assert ["memq.Admin" in str(each.message) for each in warned if each.category is ResourceWarning] == [True]


def test_a_consumer_that_is_forgotten_leaves_its_group(cluster: Cluster) -> None:
    """It kept its partitions until the process ended."""
    send(cluster, b"0")
    consumer = memq.Consumer(cluster.address, "clicks", group="g", auto_commit=False)
    assert consumer.poll(10) is not None
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        del consumer
        gc.collect()
    with memq.Consumer(cluster.address, "clicks", group="g", auto_commit=False) as other:
        assert other.poll(10) is not None


def test_groups_are_shown_reset_and_deleted(cluster: Cluster, admin: memq.Admin) -> None:
    send(cluster, b"0", b"1", b"2")
    with memq.Consumer(cluster.address, "clicks", group="g", auto_commit=False) as consumer:
        batch = consumer.poll(10)
        assert batch is not None
        consumer.commit(batch)
        group = admin.group("g")
        assert len(group.members) == 1
        assert (group.partitions[0].member, group.partitions[0].lag.records) == (group.members[0], 2)
        with pytest.raises(InvalidRequestError):
            admin.reset_group("g", "clicks", "beginning")
        with pytest.raises(InvalidRequestError):
            admin.delete_group("g")
    assert admin.groups() == ["g"]
    assert admin.group("g").partitions[0].position == batch.next
    (planned,) = admin.reset_group("g", "clicks", "beginning", dry_run=True)
    assert (planned.before, planned.after) == (batch.next, Position(0, 0))
    assert admin.group("g").partitions[0].position == batch.next
    assert admin.reset_group("g", "clicks", "end")[0].after > batch.next
    assert admin.group("g").partitions[0].lag.records == 0
    admin.reset_group("g", "clicks", batch.first)
    assert admin.group("g").partitions[0].lag.records == 3
    admin.reset_group("g", "clicks", datetime.fromtimestamp(SystemClock().wall_ms() / 1000 + 1, UTC))
    assert admin.group("g").partitions[0].lag.records == 0
    with pytest.raises(InvalidRequestError, match="no partition 3"):
        admin.reset_group("g", "clicks", Position(3, 0))
    with pytest.raises(InvalidRequestError, match=r"0:99:0 .* is after its end, 0:5:0"):
        admin.reset_group("g", "clicks", Position(0, 99))
    with pytest.raises(NotFoundError, match="misspelt") as caught:
        admin.reset_group("misspelt", "clicks", "beginning")
    assert caught.value.hint == "the groups are: g"
    assert admin.groups() == ["g"]
    admin.delete_group("g")
    assert admin.groups() == []
    with pytest.raises(NotFoundError) as caught:
        admin.group("g")
    assert caught.value.hint == "there are no groups"


def test_a_range_becomes_an_arrow_table(cluster: Cluster) -> None:
    send(cluster, b"0", b"1")
    assert memq.read_arrow(cluster.address, "clicks").column("value").to_pylist() == [b"0", b"1"]
    second = cluster.records("clicks")[1].position
    assert memq.read_arrow(cluster.address, "clicks", start=second).column("value").to_pylist() == [b"1"]
    empty = memq.read_arrow(cluster.address, "clicks", start="end")
    names = ["value", "key", "headers", "timestamp", "tag", "partition", "offset"]
    assert (empty.num_rows, empty.column_names) == (0, names)


def test_a_log_that_fails_hides_the_lag_of_its_partition_alone(
    cluster: Cluster, admin: memq.Admin, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    admin.create_topic("clicks", partitions=3)
    with memq.Producer(cluster.address) as producer:
        for number in range(9):
            producer.send("clicks", b"%d" % number, partition=number % 3).result(10)
    with memq.Consumer(cluster.address, "clicks", group="g", auto_commit=False) as consumer:
        batch = consumer.poll(10)
        assert batch is not None
        consumer.commit(batch)
    admin.reset_group("g", "clicks", "beginning")
    span = MemoryQueue.span

    async def failing(queue: MemoryQueue, partition: ReadPartition) -> Span:
        if partition.partition == 1:
            raise QueueError("no leader")
        return await span(queue, partition)

    flags = ["-b", cluster.address]
    assert main(["lag", *flags]) == 0
    monkeypatch.setattr(MemoryQueue, "span", failing)
    found = admin.group("g").partitions
    assert [str(each.error) if each.error else each.lag.records for each in found] == [3, "no leader", 3]
    with pytest.raises(QueueError, match="no leader"):
        _ = found[1].lag
    assert found[1].position == Position(1, 0)
    capsys.readouterr()
    for command in (["lag", "g"], ["group", "describe", "g"]):
        assert main([*command, *flags]) == 1
        shown = capsys.readouterr()
        lines = [line.split() for line in shown.out.splitlines() if line.startswith("g ")]
        assert [line[-3] for line in lines] == ["3", "unknown", "3"]
        assert shown.err == "memq: lag of group 'g' in partition 1 of topic 'clicks' is unknown: no leader\n"
    assert main(["lag", "g", "--json", *flags]) == 1
    parts = json.loads(capsys.readouterr().out)[0]["partitions"]
    assert [(part["lag_records"], part.get("error")) for part in parts] == [(3, None), (None, "no leader"), (3, None)]
    known = {metric.name: metric.samples for metric in lag_metrics([admin.group("g")], {})}
    assert known["memq_group_lag_records"] == [], "a sum without a partition would be too low"
    (sample,) = known["memq_group_lag_unknown_partitions"]
    assert (sample.labels, sample.value) == ({"group": "g", "topic": "clicks", "namespace": ""}, 1)


def test_a_group_that_is_deleted_meanwhile_hides_no_other_lag(
    cluster: Cluster, admin: memq.Admin, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    send(cluster, b"1")
    for name in ("a", "b"):
        with memq.Consumer(cluster.address, "clicks", group=name) as consumer:
            batch = consumer.poll(10)
            assert batch is not None
            consumer.commit(batch)
    groups = GroupCoordinator.groups

    async def outdated(coordinator: GroupCoordinator, *, proven: bool = True) -> list[str]:
        found = await groups(coordinator)
        if "a" in found:
            await coordinator.delete_group("a")
        return found

    monkeypatch.setattr(GroupCoordinator, "groups", outdated)
    assert main(["lag", "-b", cluster.address]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["group", "b"]
    assert main(["lag", "a", "b", "-b", cluster.address]) == 3, "a group that the operator names"


def test_an_admin_belongs_to_the_event_loop_of_its_first_question_also_when_that_failed() -> None:
    admin = AsyncAdmin("127.0.0.1:1", connect_timeout_ms=1)
    with pytest.raises(UnreachableError):
        asyncio.run(admin.brokers())
    with pytest.raises(InvalidRequestError, match="belongs to the event loop of its first use"):
        asyncio.run(admin.brokers())


def test_a_queue_that_does_not_answer_is_no_missing_group(admin: memq.Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(coordinator: GroupCoordinator, group: str, *, proven: bool = True) -> GroupState:
        raise QueueError("no leader")

    monkeypatch.setattr(GroupCoordinator, "describe", fail)
    with pytest.raises(QueueError, match="no leader"):
        admin.group("g")


def test_an_admin_client_is_refused_on_another_event_loop() -> None:
    async def work() -> None:
        async with running_broker() as broker, AsyncAdmin(broker.address) as admin:
            assert len(await admin.brokers()) == 1
            with pytest.raises(InvalidRequestError, match="this AsyncAdmin belongs to the event loop of its first use"):
                await asyncio.to_thread(lambda: asyncio.run(admin.brokers()))

    run(work())


def test_a_name_of_a_topic_is_checked_before_the_first_connection() -> None:
    async def work() -> None:
        async with AsyncAdmin("127.0.0.1:1", connect_timeout_ms=1) as admin:
            with pytest.raises(InvalidNameError):
                await admin.create_topic("no topic")

    run(work())
