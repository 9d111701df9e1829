"""The sync consumer against a real broker on memory: batches, places, groups, commits, damage, lag."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any

import pytest

import memq
from memq.client.consumer.batch import Damage, TopicPartition
from memq.client.consumer.dead_letters import DeadLetters
from memq.client.consumer.fetch import fetch_scheduler
from memq.client.consumer.fetch.fetch_scheduler import FetchScheduler
from memq.client.consumer.settings import Point
from memq.errors import (
    ClosedError,
    CorruptDataError,
    ForkedError,
    GenerationFencedError,
    InvalidNameError,
    InvalidRequestError,
    NotFoundError,
)
from memq.runtime.clock import SystemClock
from memq.testing import Cluster
from memq.topic import Position
from tests.time_after_acks import time_after_acks

CLICKS = TopicPartition("clicks", 0)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


def send(cluster: Cluster, *values: bytes, topic: str = "clicks", partition: int | None = None) -> None:
    """Send values, each of them as a batch of its own."""
    with memq.Producer(cluster.address) as producer:
        for value in values:
            producer.send(topic, value, partition=partition).result(10)


def take(consumer: memq.Consumer) -> memq.Batch:
    batch = consumer.poll(20)
    assert batch is not None
    return batch


def read_all(cluster: Cluster, start: Point = "beginning", end: Point = "end") -> list[bytes | None]:
    with memq.Consumer(cluster.address, "clicks", start=start, end=end) as consumer:
        return [value for batch in consumer for value in batch.values()]


def test_a_record_comes_back_with_all_that_it_had(cluster: Cluster) -> None:
    with memq.Producer(cluster.address) as producer:
        producer.send("clicks", b"v", key=b"k", headers=[("a", b"1"), ("a", None)], timestamp_ms=17, tag="web")
        producer.send("clicks", None)
    record, null = cluster.records("clicks")
    assert (record.value, record.key, record.timestamp_ms, record.tag) == (b"v", b"k", 17, "web")
    assert record.headers == (("a", b"1"), ("a", None))
    assert (null.value, null.key, null.headers, null.tag) == (None, None, (), None)
    assert null.offset == record.offset + 1
    assert null.position == Position(0, record.position.pointer_offset, 1)


def test_places_mean_what_they_say(cluster: Cluster) -> None:
    send(cluster, b"0", b"1")
    middle = time_after_acks()
    after_first = cluster.records("clicks")[1].position
    send(cluster, b"2")
    assert read_all(cluster) == [b"0", b"1", b"2"]
    assert read_all(cluster, start=after_first) == [b"1", b"2"]
    assert read_all(cluster, start={CLICKS: after_first}) == [b"1", b"2"]
    assert read_all(cluster, end=after_first) == [b"0"]
    assert read_all(cluster, start="end") == []
    assert read_all(cluster, start=middle) == [b"2"]
    assert read_all(cluster, end=middle) == [b"0", b"1"]
    assert read_all(cluster, start=middle + timedelta(days=1)) == []


def test_a_reader_at_the_end_gets_what_comes(cluster: Cluster) -> None:
    send(cluster, b"0")
    with memq.Consumer(cluster.address, "clicks", start="end") as consumer:
        assert consumer.poll(0) is None
        while not consumer.position():
            consumer.poll(0.01)
        send(cluster, b"1")
        batch = consumer.poll(10)
        assert batch is not None
        assert batch.values() == [b"1"]


def test_several_topics_and_partitions_are_read_together(cluster: Cluster) -> None:
    cluster.create_topic("clicks", partitions=3)
    for number in range(3):
        send(cluster, b"c%d" % number, partition=number)
    send(cluster, b"v", topic="views")
    with memq.Consumer(cluster.address, ["clicks", "views"], end="end") as consumer:
        found = {(batch.topic, batch.partition): batch.values() for batch in consumer}
    assert found == {("clicks", n): [b"c%d" % n] for n in range(3)} | {("views", 0): [b"v"]}


def test_seek_pause_and_resume(cluster: Cluster) -> None:
    send(cluster, b"0", b"1")
    with memq.Consumer(cluster.address, "clicks") as consumer:
        first = consumer.poll(10)
        assert first is not None
        assert first.values() == [b"0"]
        consumer.pause("clicks", 0)
        assert consumer.poll(0.05) is None
        consumer.resume("clicks", 0)
        second = consumer.poll(10)
        assert second is not None
        assert second.values() == [b"1"]
        consumer.seek("clicks", 0, first.first)
        again = consumer.poll(10)
        assert again is not None
        assert again.values() == [b"0"]
        assert consumer.position() == {CLICKS: again.next}
        with pytest.raises(InvalidRequestError, match="partition 7"):
            consumer.seek("clicks", 7, "beginning")


def test_lag_is_exact(cluster: Cluster) -> None:
    send(cluster, b"0", b"1", b"2")
    with memq.Consumer(cluster.address, "clicks") as consumer:
        batch = consumer.poll(10)
        assert batch is not None
        lag = consumer.lag()[CLICKS]
        assert lag.records == 2
        assert lag.bytes > 0
        consumer.poll(10)
        consumer.poll(10)
        assert consumer.lag()[CLICKS].records == 0


def test_wakeup_ends_the_poll_and_the_iteration_that_wait(cluster: Cluster) -> None:
    send(cluster, b"0")
    with memq.Consumer(cluster.address, "clicks") as consumer:
        assert consumer.poll(10) is not None
        waker = threading.Thread(target=consumer.wakeup)
        waker.start()
        assert list(consumer) == []
        waker.join()
        consumer.wakeup()
        assert consumer.poll() is None


# ---- groups ---------------------------------------------------------------------------------------


def test_a_group_continues_where_it_committed(cluster: Cluster) -> None:
    send(cluster, b"0", b"1", b"2")
    with memq.Consumer(cluster.address, "clicks", group="g", auto_commit=False) as consumer:
        batch = consumer.poll(10)
        assert batch is not None
        consumer.commit(batch)
        assert consumer.committed() == {CLICKS: batch.next}
        assert consumer.poll(10) is not None  # not committed
    with memq.Consumer(cluster.address, "clicks", group="g", end="end") as consumer:
        assert [value for batch in consumer for value in batch.values()] == [b"1", b"2"]


def test_auto_commit_stores_what_is_done_and_not_what_was_broken_out_of(cluster: Cluster) -> None:
    send(cluster, b"0", b"1", b"2")
    with memq.Consumer(cluster.address, "clicks", group="g") as consumer:
        for batch in consumer:
            if batch.values() == [b"1"]:
                break
    with memq.Consumer(cluster.address, "clicks", group="g", end="end") as consumer:
        assert [value for batch in consumer for value in batch.values()] == [b"1", b"2"]
    with memq.Consumer(cluster.address, "clicks", group="g", end="end") as consumer:
        assert [value for batch in consumer for value in batch.values()] == []


def test_commit_without_a_batch_takes_what_was_iterated_whole(cluster: Cluster) -> None:
    send(cluster, b"0", b"1")
    with memq.Consumer(cluster.address, "clicks", group="g", auto_commit=False) as consumer:
        batch = consumer.poll(10)
        assert batch is not None
        consumer.commit()
        assert consumer.committed().get(CLICKS, batch.first) == batch.first
        assert len(list(batch)) == 1
        consumer.commit()
        assert consumer.committed() == {CLICKS: batch.next}


def test_an_exception_is_not_hidden_and_leaves_the_batch_uncommitted(cluster: Cluster) -> None:
    send(cluster, b"0")
    with pytest.raises(ZeroDivisionError):
        _fail_inside(cluster)
    with memq.Consumer(cluster.address, "clicks", group="g", end="end") as consumer:
        assert [value for batch in consumer for value in batch.values()] == [b"0"]


def _fail_inside(cluster: Cluster) -> None:
    with memq.Consumer(cluster.address, "clicks", group="g") as consumer:
        for batch in consumer:
            for _ in batch:
                raise ZeroDivisionError


def test_a_second_member_takes_its_share_cooperatively(cluster: Cluster) -> None:
    cluster.create_topic("clicks", partitions=2)
    calls: list[tuple[str, list[TopicPartition]]] = []
    first = memq.Consumer(
        cluster.address,
        "clicks",
        group="g",
        session_timeout_ms=6_000,
        on_assigned=lambda places: calls.append(("first assigned", places)),
        on_revoked=lambda places: calls.append(("first revoked", places)),
    )
    second = memq.Consumer(
        cluster.address,
        "clicks",
        group="g",
        session_timeout_ms=6_000,
        on_assigned=lambda places: calls.append(("second assigned", places)),
    )
    with first:
        while len(first.position()) < 2:
            first.poll(0.05)
        send(cluster, b"0", partition=0)
        send(cluster, b"1", partition=1)
        values = sorted([*take(first).values(), *take(first).values()], key=repr)
        assert values == [b"0", b"1"]
        with second:
            while not any(who == "second assigned" and places for who, places in calls):
                first.poll(0.05)
                second.poll(0.05)
            assert len(first.position()) == len(second.position()) == 1
            assert {*first.position(), *second.position()} == {CLICKS, TopicPartition("clicks", 1)}
            taken = next(iter(second.position()))
            assert ("first revoked", [taken]) in calls
            assert ("second assigned", [taken]) in calls
            for number in (0, 1):
                send(cluster, b"2", partition=number)
            assert take(first).partition != taken.partition
            batch = second.poll(10)
            assert batch is not None
            assert (batch.partition, batch.values()) == (taken.partition, [b"2"])  # nothing old: it was committed


def test_a_batch_of_a_lost_partition_is_refused(cluster: Cluster) -> None:
    cluster.create_topic("clicks", partitions=1)
    send(cluster, b"0")
    lost: list[TopicPartition] = []

    def note(partitions: list[TopicPartition]) -> None:
        lost.extend(partitions)
        consumer.wakeup()  # so that this poll ends before the record is handed out again, to the new membership

    with memq.Consumer(
        cluster.address, "clicks", group="g", auto_commit=False, session_timeout_ms=300, on_lost=note
    ) as consumer:
        batch = consumer.poll(10)
        assert batch is not None
        cluster.fail("groups.heartbeat", 50, GenerationFencedError("the session has expired"))
        while not lost:
            consumer.poll(0.05)
        with pytest.raises(GenerationFencedError):
            consumer.commit(batch)


def test_revoked_partitions_can_be_committed_in_the_callback(cluster: Cluster) -> None:
    cluster.create_topic("clicks", partitions=2)
    for number in (0, 1):
        send(cluster, b"0", partition=number)
    revoked: list[TopicPartition] = []

    def give_back(places: list[TopicPartition]) -> None:
        first.commit()
        revoked.extend(places)

    first = memq.Consumer(
        cluster.address, "clicks", group="g", auto_commit=False, session_timeout_ms=6_000, on_revoked=give_back
    )
    with first:
        assert len([*take(first), *take(first)]) == 2
        with memq.Consumer(cluster.address, "clicks", group="g", auto_commit=False) as second:
            while not revoked:
                first.poll(0.05)
                second.poll(0.05)
            assert revoked[0] in first.committed()


def test_a_member_with_a_long_session_hears_soon_of_one_that_came(cluster: Cluster) -> None:
    cluster.create_topic("clicks", partitions=2)
    first, second = (
        memq.Consumer(cluster.address, "clicks", group="g", session_timeout_ms=3_600_000) for _ in range(2)
    )
    clock = SystemClock()
    with first:
        while len(first.position()) < 2:
            first.poll(0.05)
        with second:
            until_s = clock.monotonic() + 90  # a third of the session would be 20 minutes
            while not second.position() and clock.monotonic() < until_s:
                first.poll(0.05)
                second.poll(0.05)
            assert len(first.position()) == len(second.position()) == 1


def test_nothing_is_committed_without_a_group(cluster: Cluster) -> None:
    send(cluster, b"0")
    with memq.Consumer(cluster.address, "clicks") as consumer:
        with pytest.raises(InvalidRequestError, match="without a group"):
            consumer.commit()
        with pytest.raises(InvalidRequestError, match="without a group"):
            consumer.committed()


# ---- damage ---------------------------------------------------------------------------------------


def test_fail_raises_with_object_and_block_and_stays(cluster: Cluster) -> None:
    send(cluster, b"0", b"1", b"2")
    where = cluster.records("clicks")[1].position
    cluster.damage(where)
    with memq.Consumer(cluster.address, "clicks", end="end") as consumer:
        assert take(consumer).values() == [b"0"]
        for _ in range(2):
            with pytest.raises(CorruptDataError, match="block 0 of object 'test/topics/clicks"):
                consumer.poll(10)
            assert consumer.position() == {CLICKS: where}
        consumer.seek("clicks", 0, Position(0, where.pointer_offset + 1))
        assert take(consumer).values() == [b"2"]


def test_skip_counts_and_continues(cluster: Cluster) -> None:
    send(cluster, b"0", b"1", b"2")
    cluster.damage(cluster.records("clicks")[1].position)
    with memq.Consumer(cluster.address, "clicks", end="end", on_damaged="skip") as consumer:
        batches = list(consumer)
        assert [value for batch in batches for value in batch.values()] == [b"0", b"2"]
        assert [damage.records for batch in batches for damage in batch.damaged] == [1]
        assert consumer.stats().counts.damaged_records == 1


def test_dead_letters_hold_the_raw_block_with_its_origin(cluster: Cluster) -> None:
    send(cluster, b"0", b"1")
    where = cluster.records("clicks")[0].position
    cluster.damage(where)
    with memq.Consumer(cluster.address, "clicks", end="end", on_damaged="dead-letter") as consumer:
        assert [value for batch in consumer for value in batch.values()] == [b"1"]
    (letter,) = cluster.records("clicks.dlq")
    headers = dict(letter.headers)
    assert headers["memq-topic"] == b"clicks"
    assert headers["memq-position"] == str(where).encode()
    assert letter.value is not None
    assert letter.value.startswith(b"mqB1")


def test_a_seek_lets_go_of_a_batch_that_waits_for_its_dead_letters(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(cluster, b"0", b"1")
    damaged, sound = (record.position for record in cluster.records("clicks"))
    cluster.damage(damaged)
    tried: list[Position] = []

    async def stuck(self: DeadLetters, place: TopicPartition, damages: Sequence[Damage]) -> None:
        tried.extend(damage.position for damage in damages)
        await asyncio.Event().wait()

    monkeypatch.setattr(DeadLetters, "send", stuck)
    with memq.Consumer(cluster.address, "clicks", on_damaged="dead-letter") as consumer:
        while not tried:
            assert consumer.poll(timeout=0.1) is None
        before = len(tried)
        consumer.seek("clicks", 0, sound)
        batch = consumer.poll(timeout=20)
        assert batch is not None
        assert batch.values() == [b"1"]
        assert tried == [damaged] * before


def test_a_missing_object_is_damage(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_scheduler, "MISSING_S", 0.1)
    send(cluster, b"0", b"1")
    cluster.remove_object(cluster.records("clicks")[0].position)
    with pytest.raises(CorruptDataError, match="missing"):
        read_all(cluster)
    with memq.Consumer(cluster.address, "clicks", end="end", on_damaged="skip") as consumer:
        assert [value for batch in consumer for value in batch.values()] == [b"1"]


# ---- failures -------------------------------------------------------------------------------------


def test_failures_that_pass_are_waited_out(cluster: Cluster) -> None:
    send(cluster, b"0")
    cluster.fail("queue.read", 2)
    cluster.fail("store.get", 2)
    assert read_all(cluster) == [b"0"]
    assert cluster.faults.left("queue.read") == 0


def test_a_commit_waits_until_the_queue_is_back(cluster: Cluster) -> None:
    send(cluster, b"0")
    with memq.Consumer(cluster.address, "clicks", group="report", start="beginning", auto_commit=False) as consumer:
        batch = take(consumer)
        cluster.fail("groups.commit", 3)
        consumer.commit(batch)
        assert cluster.faults.left("groups.commit") == 0
        assert consumer.committed()[CLICKS] == batch.next


def test_the_commit_of_a_consumer_that_closes_waits_as_well(cluster: Cluster) -> None:
    send(cluster, b"0")
    with memq.Consumer(cluster.address, "clicks", group="report", end="end") as consumer:
        assert [value for batch in consumer for value in batch.values()] == [b"0"]
        cluster.fail("groups.commit", 3)
    send(cluster, b"1")
    with memq.Consumer(cluster.address, "clicks", group="report", end="end") as consumer:
        assert [value for batch in consumer for value in batch.values()] == [b"1"]


def test_a_broker_that_comes_back_is_found_again(cluster: Cluster) -> None:
    send(cluster, b"0")
    with memq.Consumer(cluster.address, "clicks") as consumer:
        assert take(consumer).values() == [b"0"]
        cluster.stop_broker()
        assert consumer.poll(0.05) is None
        cluster.start_broker()
        send(cluster, b"1")
        assert take(consumer).values() == [b"1"]


def test_a_topic_that_is_gone_is_reported_and_the_others_continue(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memq.client.consumer.core.REFRESH_S", 0.2)
    send(cluster, b"0")
    send(cluster, b"v", topic="views")
    with memq.Admin(cluster.address) as admin, memq.Consumer(cluster.address, ["clicks", "views"]) as consumer:
        assert {take(consumer).topic, take(consumer).topic} == {"clicks", "views"}
        admin.delete_topic("clicks")
        with pytest.raises(NotFoundError, match="clicks"):
            consumer.poll(20)
        send(cluster, b"w", topic="views")
        assert _next_values(consumer) == [b"w"]
        admin.create_topic("clicks")
        send(cluster, b"1")
        assert _next_values(consumer) == [b"1"]


class RecordingScheduler(FetchScheduler):
    """The readers of a consumer; the last one that was made is noted."""

    last: FetchScheduler

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        RecordingScheduler.last = self


@pytest.mark.parametrize("group", [None, "g"])
def test_batches_of_a_recreated_topic_do_not_follow_the_error(
    cluster: Cluster, group: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memq.client.consumer.core.FetchScheduler", RecordingScheduler)

    async def scenario() -> list[bytes | None]:
        async with memq.aio.Consumer(cluster.address, "clicks", group=group) as consumer:
            first = await consumer.poll(20)
            assert first is not None
            await asyncio.to_thread(_make_again, cluster)
            while RecordingScheduler.last.failure is None:  # noqa: ASYNC110 - the poll that meets it has no event
                await asyncio.sleep(0)
            with pytest.raises(NotFoundError, match="clicks"):
                await consumer.poll(20)
            while True:
                with suppress(NotFoundError):
                    batch = await consumer.poll(20)
                    assert batch is not None
                    return list(batch.values())

    for number in range(6):
        send(cluster, b"old %d" % number)
    assert asyncio.run(scenario()) == [b"new"]


def _make_again(cluster: Cluster) -> None:
    with memq.Admin(cluster.address) as admin:
        admin.delete_topic("clicks")
        admin.create_topic("clicks")
    send(cluster, b"new")


def _next_values(consumer: memq.Consumer) -> list[bytes | None]:
    """Return the next batch's values; the topic that is gone may be reported more than once."""
    while True:
        with suppress(NotFoundError):
            return take(consumer).values()


def test_mistakes_get_their_own_errors(cluster: Cluster) -> None:
    with pytest.raises(NotFoundError, match="'nowhere'"), memq.Consumer(cluster.address, "nowhere"):
        pass
    with pytest.raises(InvalidNameError):
        memq.Consumer(cluster.address, "no/where/else")
    with pytest.raises(InvalidRequestError, match="time zone"):
        memq.Consumer(cluster.address, "clicks", start=datetime(2026, 1, 1))  # noqa: DTZ001
    with pytest.raises(InvalidRequestError, match="not a position"):
        memq.Consumer(cluster.address, "clicks", start="middle")
    with pytest.raises(InvalidRequestError, match="on_damaged"):
        memq.Consumer(cluster.address, "clicks", on_damaged="ignore")  # type: ignore[arg-type]
    consumer = memq.Consumer(cluster.address, "clicks")
    consumer.close()
    consumer.close()
    with pytest.raises(ClosedError):
        consumer.poll(0)


def test_consumer_faults_are_logged_with_their_event(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    send(cluster, b"0", b"1")
    cluster.damage(cluster.records("clicks")[0].position)
    cluster.fail("queue.read", 1)
    with memq.Consumer(cluster.address, "clicks", end="end", on_damaged="skip") as consumer:
        assert [value for batch in consumer for value in batch.values()] == [b"1"]
    events = [vars(record)["event"] for record in caplog.records if record.name == "memq" and "event" in vars(record)]
    assert "consumer.damage" in events


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_consumer_is_refused_in_a_child_of_its_process(cluster: Cluster) -> None:
    send(cluster, b"0")
    with memq.Consumer(cluster.address, "clicks") as consumer:
        take(consumer)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                consumer.poll(0)
            except ForkedError:
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert consumer.poll(0.05) is None
