"""Behaviour of a real Kafka that an own queue would not have; one test for each."""

from __future__ import annotations

import asyncio
import logging
import logging.handlers
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, TopicCollection, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

from memq.errors import (
    InvalidNameError,
    InvalidRequestError,
    InvalidSettingError,
    QueueError,
    QueueRefusedError,
)
from memq.notification import Publication, Span
from memq.notification.kafka.queue import KafkaQueue
from memq.notification.kafka.reading.offsets import Offsets
from memq.notification.kafka.settings import Names
from memq.notification.kafka.topic_metadata_cache import TopicMetadataCache
from memq.runtime.clock import SystemClock
from memq.topic import ReadPartition
from memq_localstack.servers import Server
from tests.contract.queues import HANG_S, STALE_MS, committed, part
from tests.integration.kafka import kafka_queue

ALL = 1 << 30
PREFIX = "traps."


def over_kafka(kafka: Server, work: Callable[[KafkaQueue], Awaitable[None]], **section: Any) -> None:
    async def run() -> None:
        queue = kafka_queue(kafka.address, **section)
        try:
            async with asyncio.timeout(HANG_S):
                await work(queue)
        finally:
            await queue.close()

    asyncio.run(run())


def aged(age_ms: int = 0, body: bytes = b"pointer", *, write: int = 0, number: int = 0) -> Publication:
    return Publication(part(number), write, 1, SystemClock().wall_ms() - age_ms, body)


async def bodies(queue: KafkaQueue, number: int = 0) -> list[bytes]:
    """Read to the end, as owners do: what one read returns may end before it."""
    found: list[bytes] = []
    while entries := await queue.read(part(number), len(found), ALL):
        found += [entry.body for entry in entries]
    return found


def test_pointer_that_is_too_old_or_ahead_is_refused_alone(kafka: Server) -> None:
    """Others of the same request, and all that come later, are delivered."""

    async def work(queue: KafkaQueue) -> None:
        await queue.create([part()], STALE_MS)
        ages = [0, STALE_MS + 5_000, 0, -15_000, STALE_MS - 10_000]
        results = await asyncio.gather(
            *(queue.publish(aged(age, b"%d" % write, write=write)) for write, age in enumerate(ages)),
            return_exceptions=True,
        )
        assert [isinstance(result, QueueRefusedError) for result in results] == [False, True, False, True, False]
        assert sorted(await bodies(queue)) == [b"0", b"2", b"4"]
        await queue.create([part()], 2 * STALE_MS)
        while True:  # Kafka applies a changed setting some moments after its answer
            try:
                await queue.publish(aged(STALE_MS + 5_000, b"later"))
            except QueueRefusedError:
                continue
            break

    over_kafka(kafka, work)


def test_a_queue_time_of_zero_is_not_taken_for_now(kafka: Server) -> None:
    async def work(queue: KafkaQueue) -> None:
        await queue.create([part()], STALE_MS)
        with pytest.raises(QueueRefusedError, match="queue time 0"):
            await queue.publish(Publication(part(), 0, 1, 0, b"old"))
        assert await bodies(queue) == []

    over_kafka(kafka, work)


def test_a_publish_that_was_given_up_is_followed_by_one_that_must_read_first(kafka: Server) -> None:
    """While Kafka is paused the pointer waits in the library; it lands behind the back of who gave it up."""

    async def work(queue: KafkaQueue) -> None:
        await queue.create([part()], STALE_MS)
        await queue.publish(aged(body=b"first"))
        kafka.pause()
        try:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await queue.publish(aged(body=b"second"))
            again = asyncio.create_task(queue.publish(aged(body=b"second again")))
            await queue.wait({}, 0.05)
            assert not again.done(), "two of a write partition are under way"
        finally:
            kafka.resume()
        with pytest.raises(QueueError, match="may have landed"):
            await again
        assert await bodies(queue) == [b"first", b"second"]
        await queue.publish(aged(body=b"third"))
        assert await bodies(queue) == [b"first", b"second", b"third"]

    over_kafka(kafka, work)


def test_a_topic_that_was_widened_elsewhere_is_used_as_it_is(kafka: Server) -> None:
    async def work(queue: KafkaQueue) -> None:
        await queue.create([part(0)], STALE_MS)
        await queue.publish(aged())
        assert await bodies(queue) == [b"pointer"]
        other = kafka_queue(kafka.address, prefix=PREFIX)
        try:
            await other.create([part(0), part(1)], STALE_MS)
        finally:
            await other.close()
        assert (await queue.span(part(1))).end == 0
        with pytest.raises(QueueError, match="before it was widened"):
            await queue.publish(aged(body=b"new", number=1))
        assert await queue.publish(aged(body=b"new", number=1)) == 0
        assert await bodies(queue, 1) == [b"new"]
        await queue.drop([part(0), part(1)])

    over_kafka(kafka, work, prefix=PREFIX)


def test_settings_of_another_hand_are_named_with_the_command_that_mends_them(kafka: Server) -> None:
    name = Names("wrong.").kafka_topic(part())
    admin = AdminClient({"bootstrap.servers": kafka.address})
    wrong = {"retention.ms": "60000", "message.timestamp.type": "LogAppendTime"}
    wrong |= {"max.message.bytes": "2000", "min.insync.replicas": "2"}
    admin.create_topics([NewTopic(name, 1, 1, config=wrong)])[name].result()

    async def work(queue: KafkaQueue) -> None:
        with pytest.raises(InvalidSettingError, match=r"retention\.ms = 60000") as caught:
            await queue.create([part()], STALE_MS)
        command = caught.value.hint.split()
        assert command[:2] == ["kafka-configs.sh", "--bootstrap-server"]
        assert command[command.index("--entity-name") + 1] == name
        assert "min.insync.replicas=1" in command[-1]
        assert "max.message.bytes=" in command[-1]
        settings = [pair.split("=") for pair in command[command.index("--add-config") + 1].split(",")]
        entries = [ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET) for key, value in settings]
        resource = ConfigResource(ResourceType.TOPIC, name, incremental_configs=entries)
        for answer in admin.incremental_alter_configs([resource]).values():
            answer.result()
        while not is_set(admin, name, dict(settings)):  # Kafka shows it a moment after it took it
            await queue.wait({}, 0.05)
        await queue.create([part()], STALE_MS)
        await queue.publish(aged())

    over_kafka(kafka, work, prefix="wrong.", min_insync_replicas=1)


def is_set(admin: AdminClient, topic: str, wanted: dict[str, str]) -> bool:
    """Whether Kafka shows the settings of a topic so."""
    (answer,) = admin.describe_configs([ConfigResource(ResourceType.TOPIC, topic)]).values()
    shown = answer.result()
    return all(shown[key].value == value for key, value in wanted.items())


def test_more_copies_than_there_are_brokers_are_named_with_the_setting(kafka: Server) -> None:
    async def work(queue: KafkaQueue) -> None:
        with pytest.raises(InvalidRequestError, match="replication factor") as caught:
            await queue.create([part()], STALE_MS)
        assert caught.value.hint.startswith("set replication_factor in [kafka]")

    over_kafka(kafka, work, prefix="copies.", replication_factor=3)


def test_a_topic_that_kafka_shows_late_is_looked_at_before_it_is_used(kafka: Server, monkeypatch: Any) -> None:
    """Kafka's controller knows of a topic before its brokers do: another hand may just have made it."""
    name = Names("late.").kafka_topic(part())
    admin = AdminClient({"bootstrap.servers": kafka.address})
    admin.create_topics([NewTopic(name, 1, 1, config={"retention.ms": "60000"})])[name].result()
    count, asked = TopicMetadataCache.count, 0

    async def late(self: TopicMetadataCache, topic: str) -> int:
        nonlocal asked
        asked += 1
        return 0 if asked < 3 else await count(self, topic)

    async def work(queue: KafkaQueue) -> None:
        with pytest.raises(InvalidSettingError, match=r"retention\.ms = 60000"):
            await queue.create([part()], STALE_MS)

    monkeypatch.setattr(TopicMetadataCache, "count", late)
    over_kafka(kafka, work, prefix="late.")


def test_publish_of_another_process_wakes_a_waiter_and_is_read(kafka: Server) -> None:
    async def work(queue: KafkaQueue) -> None:
        await queue.create([part()], STALE_MS)
        waiting = asyncio.create_task(queue.wait({part(): 0}, 3_600))
        await queue.span(part())
        other = kafka_queue(kafka.address, prefix="wakes.")
        try:
            await other.publish(aged(body=b"theirs"))
        finally:
            await other.close()
        await waiting
        assert await bodies(queue) == [b"theirs"]

    over_kafka(kafka, work, prefix="wakes.")


def test_threads_do_not_grow_with_partitions(kafka: Server) -> None:
    async def work(queue: KafkaQueue) -> None:
        parts = [part(number) for number in range(200)]
        await queue.create(parts, STALE_MS)
        await queue.publish(aged())
        await asyncio.gather(*(queue.read(each, 0, ALL) for each in parts))
        await queue.wait(dict.fromkeys(parts[:1], 1), 0.01)
        before = threading.active_count()
        waits = [asyncio.create_task(queue.wait({each: 1}, 3_600)) for each in parts]
        await queue.wait(dict.fromkeys(parts, 1), 0.2)
        await asyncio.gather(*(queue.publish(aged(number=number, write=number)) for number in range(200)))
        await queue.publish(aged())
        await waits[0]
        assert threading.active_count() == before
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)

    over_kafka(kafka, work)


def test_a_commit_by_another_tool_is_at_the_first_record_of_its_pointer(kafka: Server) -> None:
    """A commit without metadata erases the record index."""

    async def work(queue: KafkaQueue) -> None:
        await queue.create([part()], STALE_MS)
        await queue.former.store("report", {part(): committed(5, index=7, records=9, size=9)})
        names = Names("reset.")
        place = TopicPartition(names.kafka_topic(part()), 0, 3)
        admin = AdminClient({"bootstrap.servers": kafka.address})
        request = ConsumerGroupTopicPartitions(names.kafka_group("report"), [place])
        for answer in admin.alter_consumer_group_offsets([request]).values():
            await asyncio.wrap_future(answer)
        assert (await queue.former.read("report")).committed == {part(): committed(3)}

    over_kafka(kafka, work, prefix="reset.")


def test_a_commit_that_succeeds_in_part_says_so_and_can_be_repeated(kafka: Server) -> None:
    async def work(queue: KafkaQueue) -> None:
        absent = part(0, topic_id="ff" * 16)
        await queue.create([part()], STALE_MS)
        positions = {part(): committed(5), absent: committed(6)}
        with pytest.raises(QueueError, match="setting 1 positions of group 'report'"):
            await queue.former.store("report", positions)
        await queue.create([absent], STALE_MS)
        await queue.former.store("report", positions)
        assert (await queue.former.read("report")).committed == positions

    over_kafka(kafka, work)


def test_wrong_connection_to_kafka_is_named(kafka: Server) -> None:
    async def nobody(queue: KafkaQueue) -> None:
        with pytest.raises(QueueError, match=r"127\.0\.0\.1:1"):
            await queue.check()

    over_kafka(kafka, lambda queue: queue.check())
    nowhere = Server(kafka.folder / "none", replace(kafka.launch, address="127.0.0.1:1"))
    over_kafka(nowhere, nobody, request_timeout_ms=500)
    with pytest.raises(InvalidSettingError, match=r"no\.such\.setting"):
        over_kafka(kafka, lambda queue: queue.check(), **{"no.such.setting": "1"})
    with pytest.raises(InvalidNameError, match="210"):
        over_kafka(kafka, lambda queue: queue.create([part(topic="x" * 245)], STALE_MS), prefix="memq1.")


def test_a_partition_that_has_no_leader_for_a_moment_is_asked_again(kafka: Server, monkeypatch: Any) -> None:
    """A broker that starts asks for the ends of topics that another one is just making."""
    begin, asked = Offsets.begin, 0

    async def leaderless(self: Offsets, topic: str, number: int) -> int:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise QueueError("broker: not leader for partition")
        return await begin(self, topic, number)

    async def work(queue: KafkaQueue) -> None:
        await queue.create([part()], STALE_MS)
        await queue.publish(aged())
        monkeypatch.setattr(Offsets, "begin", leaderless)
        assert await queue.span(part()) == Span(0, 1)
        assert asked == 2

    over_kafka(kafka, work, prefix="leaderless.")


def test_the_library_has_a_topic_that_was_looked_at_and_looks_by_itself_for_any_other(kafka: Server) -> None:
    """Offsets are asked for after a look alone: what the library does for others ended the process (`Looks`)."""
    parts = [ReadPartition(f"looked-{number}", f"{number:032x}", 0) for number in range(3)]
    names = [Names(PREFIX).kafka_topic(each) for each in parts]
    said = logging.Logger("library", logging.DEBUG)  # noqa: LOG001 - of this test
    heard = logging.handlers.BufferingHandler(1_000_000)
    said.addHandler(heard)
    admin = AdminClient({"bootstrap.servers": kafka.address, "debug": "metadata"}, logger=said)

    def looks_for(name: str) -> bool:
        """Whether the library asks who leads a partition before it asks for its offset."""
        heard.buffer.clear()
        asked: Any = OffsetSpec
        (answer,) = admin.list_offsets({TopicPartition(name, 0): asked.latest()}).values()
        assert answer.result(HANG_S).offset == 0
        admin.poll(0)
        return any("query partition leaders" in record.getMessage() for record in heard.buffer)

    async def work(queue: KafkaQueue) -> None:
        await queue.create(parts, STALE_MS)  # until they have leaders that answer

    over_kafka(kafka, work, prefix=PREFIX)
    for described in admin.describe_topics(TopicCollection(names[:2])).values():
        assert described.result(HANG_S).partitions[0].leader is not None
    assert [looks_for(name) for name in (*names, names[2])] == [False, False, True, False]
