"""Operators truncate topics: whole batches before a point go, with the next retention, and nothing else."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import msgspec
import pytest

import memq
from memq.broker.broker import Broker
from memq.broker.upkeep.retention import expired, retire
from memq.broker.upkeep.truncation import without_lost_orders
from memq.cli import main
from memq.client.admin import AsyncAdmin
from memq.client.consumer.batch import TopicPartition
from memq.client.consumer.consumer import AsyncConsumer
from memq.client.topic_admin import Truncated
from memq.errors import InvalidRequestError, NotFoundError, PositionExpiredError
from memq.notification import Entry
from memq.runtime.clock import SystemClock
from memq.testing import Cluster
from memq.topic import CLOCK_ERROR_MS, Position, TopicSettings, Truncation, read_partitions
from tests.brokers import run, running_broker, until
from tests.component.retention_rig import HOUR_MS, Rig
from tests.component.test_broker_retention import NOW_MS, entries

YOUNG_MS = TopicSettings().dedup_window_ms + CLOCK_ERROR_MS
FOR_EVER = TopicSettings(retention_ms=0)


def order(before: int, age_ms: int = 0) -> Truncation:
    return Truncation(partition=0, before=before, time_ms=NOW_MS - age_ms)


# ---- what is decided ---------------------------------------------------------------------------------


def test_retention_removes_what_is_ordered_and_nothing_behind_it() -> None:
    known = entries(*[HOUR_MS] * 5, 0)
    found = expired(known, FOR_EVER, NOW_MS, order=order(13))
    assert (found.before, found.keys) == (13, ("k0", "k1", "k2"))


def test_retention_keeps_ordered_entries_that_the_dedup_window_needs() -> None:
    known = entries(YOUNG_MS + 1, YOUNG_MS, 0, 0)
    assert expired(known, FOR_EVER, NOW_MS, order=order(14)).before == 11


def test_retention_keeps_entries_whose_time_contradicts_the_order() -> None:
    """The log was lost and restored: the same offsets have other entries, of a later time."""
    known = entries(3 * HOUR_MS, 2 * HOUR_MS, HOUR_MS, HOUR_MS)
    assert expired(known, FOR_EVER, NOW_MS, order=order(14, age_ms=2 * HOUR_MS)).before == 12


# ---- what is done ------------------------------------------------------------------------------------


@asynccontextmanager
async def aged(broker: Broker, batches: int) -> AsyncIterator[tuple[Rig, AsyncAdmin]]:
    """Yield a topic with some old batches and a young one, and an admin."""
    rig = await Rig.make(broker)
    for _ in range(batches):
        await rig.batch()
    await rig.age(HOUR_MS)
    await rig.batch()
    async with AsyncAdmin(broker.address) as admin:
        yield rig, admin
    await rig.client.close()


async def orders(broker: Broker) -> tuple[Truncation, ...]:
    """Return the orders that the coordinator has of the topic."""
    topic = await broker.services.coordinator.current_topic("clicks")
    assert topic is not None
    return topic.truncations


def test_a_truncation_takes_old_batches_before_a_position_and_their_objects() -> None:
    async def work() -> None:
        async with running_broker() as broker, aged(broker, 5) as (rig, admin):
            (partition,) = read_partitions(rig.topic)
            objects = list(rig.store.objects)
            ends = await admin.end_totals(rig.topic)
            (dry,) = await admin.truncate_topic("clicks", Position(0, 3, 7), dry_run=True)
            assert (dry.begin, dry.before, dry.records) == (Position(0, 0), Position(0, 3), 2)
            await retire(broker.services, broker.partitions)
            assert (await broker.services.queue.span(partition)).begin == 0, "a dry run orders nothing"

            assert await admin.truncate_topic("clicks", Position(0, 3, 7)) == [dry]
            await retire(broker.services, broker.partitions)
            assert (await broker.services.queue.span(partition)).begin == 3
            assert list(rig.store.objects) == objects[2:]
            assert await admin.end_totals(rig.topic) == ends, "totals count what was removed, too"
            with pytest.raises(PositionExpiredError):
                await admin.count("clicks", Position(0, 1), Position(0, 4))
            assert await admin.truncate_topic("clicks", Position(0, 2)) == [nothing_goes(Position(0, 3))], (
                "an order never goes back"
            )

    run(work())


def nothing_goes(at: Position) -> Truncated:
    return Truncated(TopicPartition("clicks", 0), at, at, 0, 0)


def test_a_truncation_to_the_end_takes_all_once_it_is_old_and_keeps_lag_right() -> None:
    async def work() -> None:
        async with running_broker() as broker, aged(broker, 4) as (rig, admin):
            await admin.reset_group("slow", "clicks", "beginning", new_ok=True)
            (goes,) = await admin.truncate_topic("clicks", "end")
            assert goes.records == 5
            await rig.age(HOUR_MS)
            await retire(broker.services, broker.partitions)  # publishes `opened` again: the last pointer was to stay
            (partition,) = read_partitions(rig.topic)
            log = broker.services.queue.log(partition)  # type: ignore[attr-defined]  # the memory queue
            await until(lambda: log.end == 7)
            await rig.age(HOUR_MS)
            await retire(broker.services, broker.partitions)
            assert not [each for each in await rig.pointers() if each.kind == "data"]
            assert (await admin.group("slow")).partitions[0].lag.records == 5, "what it missed was lag, and stays lag"
            await rig.batch()
            await admin.reset_group("slow", "clicks", "beginning")
            assert (await admin.group("slow")).partitions[0].lag.records == 1

    run(work())


def test_a_reader_in_the_truncated_range_learns_that_its_records_are_gone() -> None:
    async def work() -> None:
        async with running_broker() as broker, aged(broker, 4) as (rig, admin):
            await admin.truncate_topic("clicks", datetime.fromtimestamp(SystemClock().wall_ms() / 1000 - 1800, UTC))
            await retire(broker.services, broker.partitions)
            async with AsyncConsumer(broker.address, "clicks", start=Position(0, 1), end="end") as consumer:
                with pytest.raises(PositionExpiredError):
                    await consumer.poll(5)
            async with AsyncConsumer(broker.address, "clicks", end="end") as consumer:
                assert [record.value async for batch in consumer for record in batch] == [b"4"]
            assert rig.sequence == 5

    run(work())


def test_an_order_is_kept_with_the_topic() -> None:
    async def work() -> None:
        async with running_broker() as broker, aged(broker, 3) as (rig, admin):
            await admin.truncate_topic("clicks", Position(0, 2))
            stored = await orders(broker)
            assert [(each.partition, each.before) for each in stored] == [(0, 2)]
            altered = await admin.alter_topic("clicks", settings={"retention_ms": 0})
            assert altered.truncations == stored
            await retire(broker.services, broker.partitions)
            assert len(await rig.pointers()) == 3

    run(work())


def test_an_order_for_a_log_that_the_queue_lost_is_withdrawn() -> None:
    """Its offsets would be those of other entries in a restored log."""

    async def work() -> None:
        async with running_broker() as broker, aged(broker, 3) as (rig, _admin):
            topic = msgspec.structs.replace(rig.topic, truncations=(order(3), order(9)))
            assert (await without_lost_orders(broker.services.queue, topic)).truncations == (order(3),)
            await broker.services.queue.drop(read_partitions(topic))
            assert (await without_lost_orders(broker.services.queue, topic)).truncations == ()

    run(work())


def test_an_order_names_the_greatest_time_of_what_it_removes() -> None:
    async def work() -> None:
        async with running_broker() as broker, aged(broker, 4) as (rig, admin):
            (partition,) = read_partitions(rig.topic)
            log = broker.services.queue.log(partition)  # type: ignore[attr-defined]  # the memory queue
            early = log.entries[3]
            log.entries[3] = Entry(early.offset, early.time_ms - 20_000, early.body)  # of another owner
            await admin.truncate_topic("clicks", Position(0, 4))
            (stored,) = await orders(broker)
            assert stored.time_ms == max(entry.time_ms for entry in log.entries[:4])

    run(work())


def test_a_wrong_truncation_is_refused() -> None:
    async def work() -> None:
        async with running_broker() as broker, aged(broker, 1) as (_rig, admin):
            for wrong, error in (
                (Position(0, 99), InvalidRequestError),
                (Position(3, 0), NotFoundError),
                ("yesterday", InvalidRequestError),
                (datetime(2026, 1, 1), InvalidRequestError),  # noqa: DTZ001 - that is the mistake
            ):
                with pytest.raises(error):
                    await admin.truncate_topic("clicks", wrong)
            with pytest.raises(NotFoundError, match="'views'"):
                await admin.truncate_topic("views", "end")
            with pytest.raises(TypeError):
                await admin.truncate_topic("clicks", 7)  # type: ignore[arg-type]

    run(work())


# ---- the command line --------------------------------------------------------------------------------


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


def test_the_command_line_truncates_a_topic(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    with memq.Producer(cluster.address) as producer:
        for number in range(4):
            producer.send("clicks", f"{number}")
            producer.flush()

    def shown(*arguments: str) -> tuple[int, str]:
        code = main(["topic", "truncate", *arguments, "-b", cluster.address])
        return code, capsys.readouterr().out

    code, dry = shown("clicks", "--before", "0:3:0", "--dry-run", "--json")
    with memq.Admin(cluster.address) as admin:
        assert (code, admin.topic("clicks").topic.truncations) == (0, ())
    code, out = shown("clicks", "--before", "0:3:0", "--json", "--yes")
    (row,) = json.loads(out)
    assert (code, row["before"], row["records"], json.loads(dry)) == (0, "0:3:0", 2, [row])
    assert shown("clicks", "--before", "soon", "--yes")[0] == 2
    assert shown("views", "--before", "end", "--yes")[0] == 3
    with memq.Admin(cluster.address) as admin:
        assert [each.before for each in admin.topic("clicks").topic.truncations] == [3]
