"""Operators seal topics: no more records, all acked ones are in the logs, and readers come to an end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgspec
import pytest

import memq
from memq.broker.broker import Broker
from memq.broker.partition.batch import Origin, control_pointer
from memq.broker.upkeep import sealing
from memq.cli import main
from memq.client.admin import AsyncAdmin
from memq.client.consumer import core
from memq.client.consumer.consumer import AsyncConsumer
from memq.client.consumer.fetch.polling import POLL_WAIT_MS
from memq.client.producer.producer import AsyncProducer
from memq.errors import (
    InvalidRequestError,
    NotFoundError,
    TimedOutError,
    TopicSealedError,
)
from memq.format.pointer import encode_pointer
from memq.governor import Load
from memq.governor.planning import ClusterView, reshapes
from memq.notification import Publication
from memq.testing import Cluster
from memq.topic import Topic, TopicSettings, Totals, equal_slots, read_partitions
from tests.brokers import run, running_broker

WIDENING = TopicSettings(write_partitions_max=4, partition_bytes_s_max=1)


async def read_all(address: str, topic: str = "clicks") -> list[bytes]:
    """Read a topic without an `end`, until the consumer ends by itself."""
    async with asyncio.timeout(20), AsyncConsumer(address, topic) as consumer:
        values = [record.value or b"" async for batch in consumer for record in batch]
        assert consumer.ended
        assert await consumer.poll() is None, "it stays at its end"
        return values


def test_a_sealed_topic_takes_no_records_and_readers_end() -> None:
    async def work() -> None:
        async with running_broker() as broker, AsyncAdmin(broker.address) as admin:
            await admin.create_topic("clicks", partitions=3)
            async with AsyncProducer(broker.address) as producer:
                for number in range(30):
                    await producer.send("clicks", b"%d" % number, key=b"%d" % number)
                await producer.flush()
                sealed = await admin.seal_topic("clicks")
                assert (sealed.ended, sealed.sealed_ms > 0) == (True, True)
                with pytest.raises(TopicSealedError, match="takes no more records") as caught:
                    await (await producer.send("clicks", b"late"))
                assert "unseal" in caught.value.hint
                assert sorted(await read_all(broker.address)) == sorted(b"%d" % number for number in range(30))
                assert (await admin.seal_topic("clicks")).version == sealed.version, "a second seal changes nothing"

                assert not (await admin.unseal_topic("clicks")).sealed_ms
                await (await producer.send("clicks", b"after"))
                await admin.seal_topic("clicks")
                assert len(await read_all(broker.address)) == 31

    run(work())


def test_a_running_consumer_ends_when_its_topic_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "REFRESH_S", 0.05)

    async def work() -> None:
        async with running_broker() as broker, AsyncAdmin(broker.address) as admin:
            await admin.create_topic("clicks", partitions=2)
            reading = asyncio.create_task(read_all(broker.address))
            async with AsyncProducer(broker.address) as producer:
                await (await producer.send("clicks", b"one"))
            assert not reading.done()
            await admin.seal_topic("clicks")
            assert await reading == [b"one"]

    run(work())


def test_a_running_consumer_learns_of_the_end_with_its_next_answer() -> None:
    """It does not wait for its next metadata, for up to 30 s."""

    async def work() -> None:
        async with running_broker() as broker, AsyncAdmin(broker.address) as admin:
            await admin.create_topic("clicks", partitions=2)
            async with AsyncProducer(broker.address) as producer:
                await (await producer.send("clicks", b"one"))
            async with AsyncConsumer(broker.address, "clicks") as consumer:
                batch = await consumer.poll()
                assert batch is not None
                assert batch.values() == [b"one"]
                await admin.seal_topic("clicks")
                async with asyncio.timeout(POLL_WAIT_MS / 1_000 + 1):
                    assert await consumer.poll() is None
                assert consumer.ended

    run(work())


def test_a_member_of_a_group_ends_and_its_positions_are_stored() -> None:
    async def work() -> None:
        async with running_broker() as broker, AsyncAdmin(broker.address) as admin:
            async with AsyncProducer(broker.address) as producer:
                await (await producer.send("clicks", b"one"))
            await admin.seal_topic("clicks")
            for expected in ([b"one"], []):
                async with asyncio.timeout(20), AsyncConsumer(broker.address, "clicks", group="g") as consumer:
                    assert [record.value async for batch in consumer for record in batch] == expected
            assert (await admin.group("g")).partitions[0].lag.records == 0

    run(work())


def test_a_topic_does_not_end_before_its_held_blocks_are_in_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with running_broker() as broker, AsyncAdmin(broker.address) as admin:
            gate, queue = asyncio.Event(), broker.services.queue
            publish = queue.publish

            async def slow(publication: object) -> int:
                await gate.wait()
                return await publish(publication)  # type: ignore[arg-type]

            async with AsyncProducer(broker.address, acks=1) as producer:
                await (await producer.send("clicks", b"one"))
                await producer.flush()
                monkeypatch.setattr(queue, "publish", slow)
                await (await producer.send("clicks", b"held"))
                with pytest.raises(TimedOutError, match="has not ended"):
                    await admin.seal_topic("clicks", timeout_s=1.5)
                assert not (await admin.topic("clicks")).topic.ended
                gate.set()
                assert (await admin.seal_topic("clicks")).ended
                assert await read_all(broker.address) == [b"one", b"held"]

    run(work())


def test_an_owner_that_opens_with_an_old_view_of_the_topic_knows_the_seal(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with running_broker() as broker, AsyncAdmin(broker.address) as admin:
            topic = await admin.create_topic("clicks")
            seal = msgspec.structs.replace(topic, sealed_ms=1)
            await broker.services.coordinator.alter_topic(seal)
            processor = broker.partitions.processor(topic, 0)
            processor.topic = topic  # as one that was read before the seal
            await processor.ready()
            assert processor.topic.sealed_ms == 1
            processor.follow(topic)
            assert processor.topic.sealed_ms == 1, "an older version changes nothing"

    run(work())


def test_an_end_is_not_stored_for_a_topic_that_was_altered_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with running_broker() as broker, AsyncAdmin(broker.address) as admin:
            topic = await admin.create_topic("clicks")
            coordinator = broker.services.coordinator
            stored = await coordinator.alter_topic(msgspec.structs.replace(topic, sealed_ms=1))
            ask = sealing.settle

            async def altered(*parts: object) -> sealing.SettledParts:
                current = await coordinator.current_topic("clicks")
                assert current is not None
                await coordinator.alter_topic(msgspec.structs.replace(current, sealed_ms=0))
                return await ask(*parts)  # type: ignore[arg-type]

            monkeypatch.setattr(sealing, "settle", altered)
            assert not await broker.sealing.end(stored)
            found = await coordinator.current_topic("clicks")
            assert found is not None
            assert (found.sealed_ms, found.ended) == (0, False)

    run(work())


async def publish_former(broker: Broker, topic: Topic, kind: str, epoch: int, name: str) -> None:
    """Publish a control pointer of an earlier owner."""
    origin = Origin(broker.services.settings.cluster, name, "main", topic, 0, epoch)
    now_ms = broker.services.runtime.clock.wall_ms()
    pointer = encode_pointer(control_pointer(kind, origin, Totals(), (), now_ms))
    await broker.services.queue.publish(Publication(read_partitions(topic)[0], 0, epoch, now_ms, pointer))


def test_an_end_waits_for_an_owner_that_is_away_for_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="memq")

    async def work() -> None:
        async with running_broker() as broker, AsyncAdmin(broker.address) as admin:
            topic = await admin.create_topic("clicks")
            await publish_former(broker, topic, "opened", 1, "closed-broker")
            await publish_former(broker, topic, "closed", 1, "closed-broker")
            await publish_former(broker, topic, "opened", 2, "gone-broker")
            await publish_former(broker, topic, "opened", 3, broker.services.settings.broker_id)
            with pytest.raises(TimedOutError, match="has not ended"):
                await admin.seal_topic("clicks", timeout_s=3)
            monkeypatch.setattr(sealing, "AWAY_S", 3.0)
            assert (await admin.seal_topic("clicks")).ended

    run(work())
    assert "brokers ['gone-broker'] are away, and may hold records" in caplog.text
    assert "all of its records are in the queue that live brokers have acked; brokers ['gone-broker']" in caplog.text
    assert "closed-broker" not in caplog.text


def test_the_governor_splits_no_sealed_topic() -> None:
    topic = Topic(name="clicks", id="0" * 32, created_ms=0, settings=WIDENING, partitions=equal_slots(1))
    loads = [Load(topic_id=topic.id, partition=0, bytes_s=1000)]
    for sealed_ms, count in ((0, 1), (1, 0)):
        view = ClusterView(
            topics=[msgspec.structs.replace(topic, sealed_ms=sealed_ms)],
            brokers=(),
            assignments=(),
            loads=loads,
            now_ms=10**9,
        )
        assert len(reshapes(view)) == count


def test_a_wrong_seal_is_refused() -> None:
    async def work() -> None:
        async with running_broker() as broker, AsyncAdmin(broker.address) as admin:
            with pytest.raises(NotFoundError, match="'views'"):
                await admin.seal_topic("views")
            await admin.create_topic("clicks")
            with pytest.raises(InvalidRequestError, match="timeout_s"):
                await admin.seal_topic("clicks", timeout_s=-1)

    run(work())


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


def test_the_command_line_seals_a_topic_and_consume_ends(
    cluster: Cluster, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    with memq.Producer(cluster.address) as producer:
        producer.send("clicks", b"one").result(10)
    assert main(["topic", "seal", "clicks", "--yes", "-b", cluster.address]) == 0
    assert main(["consume", "clicks", "-b", cluster.address]) == 0
    assert capsysbinary.readouterr().out.endswith(b"one\n")
    assert main(["topic", "describe", "clicks", "-b", cluster.address]) == 0
    assert b"sealed" in capsysbinary.readouterr().out
    assert main(["topic", "unseal", "clicks", "-b", cluster.address]) == 0
    with memq.Admin(cluster.address) as admin:
        assert not admin.topic("clicks").topic.sealed_ms
        assert admin.seal_topic("clicks").ended
        assert not admin.unseal_topic("clicks").ended
    assert main(["topic", "seal", "views", "--yes", "-b", cluster.address]) == 3
