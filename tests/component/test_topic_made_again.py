"""Topics deleted and created again under the same name, while brokers and clients learn of it late."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import pytest

from memq.broker.broker import Broker
from memq.broker.partitions import CONFIRM_PAUSE_S
from memq.client.admin import AsyncAdmin
from memq.client.link_pool import LinkPool
from memq.client.metadata import ClusterMetadata
from memq.client.producer.producer import AsyncProducer
from memq.errors import NotFoundError, NotReadyError, QueueError, UnreachableError
from memq.protocol.admin_messages import AdminAnswer, AdminRequest, AlterTopic, DeleteTopic
from memq.protocol.frames import Api, Frame
from memq.protocol.messages import Metadata, MetadataRequest, TopicMetadata, decode_message
from memq.runtime.network import parse_address
from memq.runtime.runtime import Runtime
from memq.topic import ReadPartition, Topic, TopicSettings, read_partitions
from tests.brokers import run as run_broker
from tests.brokers import running_broker
from tests.component.cluster_rig import Rig, rig
from tests.stepped_time import SteppedLoop, step, stepped_runtime
from tests.unit.toy_broker import ToyBroker, ToyConnection, address_of, run, toy_topic


async def create(broker: Broker, name: str = "clicks") -> Topic:
    return await broker.partitions.create(name, 1, TopicSettings(), exist_ok=False)


async def made_again(cluster: Rig) -> tuple[Broker, Topic, Topic]:
    """Return a broker that knows only the first topic of a name, with that one and the topic of the name now."""
    one, behind = await cluster.start("one"), await cluster.start("behind")
    first = await create(one)
    await behind.partitions.refresh()
    stale = await behind.services.coordinator.topics()

    async def topics() -> Sequence[Topic]:
        return stale

    behind.services.coordinator.topics = topics  # type: ignore[method-assign]
    await one.partitions.delete(first)
    return behind, first, await create(one)


def test_a_broker_confirms_what_its_client_does_not_know() -> None:
    async def work() -> None:
        async with rig() as cluster:
            behind, first, second = await made_again(cluster)
            for known in ({}, {"clicks": second.id}):
                with pytest.raises(NotReadyError, match="broker 'behind' has not read topic 'clicks'"):
                    await behind.partitions.confirm(["clicks"], known)
            assert await behind.partitions.confirm(["clicks"], {"clicks": first.id}) == []
            assert await behind.partitions.confirm(["views"], {}) == [], "that one is read when it is looked for"
            assert await cluster.brokers[0].partitions.confirm(["clicks"], {}) == []

    asyncio.run(work())


def test_a_broker_that_has_not_heard_of_a_deletion_contradicts_the_coordinator() -> None:
    async def work() -> None:
        async with rig() as cluster:
            behind, _, second = await made_again(cluster)
            await cluster.brokers[0].partitions.delete(second)
            with pytest.raises(NotReadyError):
                await behind.partitions.confirm(["clicks"], {})

    asyncio.run(work())


def test_a_broker_says_what_its_coordinator_could_not_confirm(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with rig(stepped_runtime()) as cluster:
            behind, _, _ = await made_again(cluster)
            current, asked = behind.services.coordinator.current_topic, list[str]()

            async def current_topic(name: str) -> Topic | None:
                asked.append(name)
                if len(asked) == 1:
                    raise UnreachableError("ZooKeeper does not answer")
                await asyncio.get_running_loop().create_future()
                return None

            behind.services.coordinator.current_topic = current_topic  # type: ignore[method-assign]
            monkeypatch.setattr("memq.broker.partitions.CONFIRM_S", 0.01)
            for _ in range(4):
                assert await behind.partitions.confirm(["clicks"], {}) == ["clicks"]
            assert asked == ["clicks"] * 2, "nobody waits again at once for one that is silent"
            behind.services.coordinator.current_topic = current  # type: ignore[method-assign]
            step(CONFIRM_PAUSE_S)
            with pytest.raises(NotReadyError):
                await behind.partitions.confirm(["clicks"], {})

    run_broker(work(), SteppedLoop)


def test_a_producer_says_that_no_broker_could_confirm_the_topic_of_its_records() -> None:
    """Its brokers knew only the deleted topic of the name, and could not ask the coordinator."""

    async def away(name: str) -> Topic | None:
        raise QueueError(f"nothing is known of '{name}' now")

    async def work() -> None:
        async with rig() as cluster:
            behind, _, second = await made_again(cluster)
            coordinator = behind.services.coordinator
            coordinator.current_topic = away  # type: ignore[method-assign]
            async with AsyncProducer(behind.address, audit=False) as producer:
                delivery = await producer.send("clicks", b"for the first topic")
                del coordinator.current_topic, coordinator.topics  # as they were
                await behind.partitions.refresh()
                with pytest.raises(NotFoundError, match="no broker could confirm the id") as failed:
                    await delivery
                assert "send the records again" in failed.value.hint
                ack = await (await producer.send("clicks", b"for the second topic"))
                assert ack.topic == second.name

    asyncio.run(work())


def test_client_of_an_outdated_broker_gets_the_present_topic() -> None:
    async def work() -> None:
        async with rig() as cluster:
            behind, _, second = await made_again(cluster)
            runtime = Runtime()
            pool = LinkPool(runtime, [parse_address(behind.address), parse_address(cluster.brokers[0].address)])
            metadata = ClusterMetadata(runtime, pool)
            assert (await metadata.topic("clicks")).topic.id == second.id
            await metadata.close()
            await pool.close()

    asyncio.run(work())


def test_a_request_that_comes_late_changes_no_later_topic() -> None:
    async def work() -> None:
        async with rig() as cluster:
            one = await cluster.start("one")
            first = await create(one)
            runtime = Runtime()
            pool = LinkPool(runtime, [parse_address(one.address)])
            link = (await pool.session(parse_address(one.address))).link
            await one.partitions.delete(first)
            second = await create(one)
            late = (
                DeleteTopic(name="clicks", topic_id=first.id),
                AlterTopic(name="clicks", topic_id=first.id, settings={"ring_slots": 2}),
            )
            for ask in late:
                with pytest.raises(NotFoundError, match="was deleted"):
                    await link.request(Api.ADMIN, AdminRequest(ask=ask), AdminAnswer, timeout_s=5)
            assert one.partitions.topic("clicks") == second
            await pool.close()

    asyncio.run(work())


def test_a_producer_does_not_create_a_topic_again_that_was_deleted() -> None:
    """It would have as many partitions as a new topic has by default, and none of its settings."""

    async def work() -> None:
        async with running_broker() as broker, AsyncProducer(broker.address) as producer:
            await (await producer.send("clicks", b"first"))
            await broker.partitions.delete(broker.partitions.topic("clicks"))
            with pytest.raises(NotFoundError):
                await (await producer.send("clicks", b"too late"))
            for _ in range(2):
                with pytest.raises(NotFoundError, match="topic 'clicks' does not exist"):
                    await producer.send("clicks", b"too late")
            assert "clicks" not in [topic.name for topic in broker.partitions.topics()]
            await create(broker)
            assert (await (await producer.send("clicks", b"second"))).records == 1

    run_broker(work())


def test_an_admin_names_the_topic_that_is_there_now() -> None:
    async def work() -> None:
        async with rig() as cluster:
            one = await cluster.start("one")
            async with AsyncAdmin([one.address]) as admin:
                first = await admin.create_topic("clicks")
                assert (await admin.topic("clicks")).topic == first
                await one.partitions.delete(first)
                second = await create(one)
                altered = await admin.alter_topic("clicks", settings={"ring_slots": 2})
                assert (altered.id, altered.settings.ring_slots) == (second.id, 2)
                await admin.delete_topic("clicks")
                with pytest.raises(NotFoundError):
                    await admin.delete_topic("clicks")

    asyncio.run(work())


def test_a_deletion_continues_while_the_queue_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memq.broker.partitions.DROP_RETRY_S", 0.001)
    failures = 3

    async def work() -> None:
        async with rig() as cluster:
            one = await cluster.start("one")
            topic = await create(one)
            drop = cluster.queue.drop

            async def fails(partitions: Sequence[ReadPartition]) -> None:
                nonlocal failures
                failures -= 1
                if failures >= 0:
                    raise QueueError("the queue does not answer")
                await drop(partitions)

            cluster.queue.drop = fails  # type: ignore[method-assign]
            await one.partitions.delete(topic)
            assert failures == -1
            for partition in read_partitions(topic):
                with pytest.raises(NotFoundError):
                    await cluster.queue.span(partition)

    asyncio.run(work())


# ---- clients -------------------------------------------------------------------------------------


def answer(topic_id: str, *, confirmed: bool) -> Metadata:
    found = TopicMetadata(topic=toy_topic(topic_id=topic_id))
    return Metadata(cluster="toy", topics=[found], unconfirmed=[] if confirmed else ["clicks"])


def test_unconfirmed_topic_replaces_no_other_of_the_name() -> None:
    answers = [
        answer("aa" * 16, confirmed=False),
        answer("bb" * 16, confirmed=True),
        answer("aa" * 16, confirmed=False),
        answer("cc" * 16, confirmed=False),
    ]
    known: list[dict[str, str]] = []

    def script(connection: ToyConnection, frame: Frame) -> bool:
        if frame.api != Api.METADATA:
            return False
        known.append(decode_message(frame.body, MetadataRequest).known)
        connection.answer(frame, answers[len(known) - 1])
        return True

    async def test(broker: ToyBroker) -> None:
        broker.script = script
        runtime = Runtime()
        pool = LinkPool(runtime, [address_of(broker)])
        metadata = ClusterMetadata(runtime, pool)
        seen = []
        for _ in range(3):
            found = await metadata.refresh("clicks")
            seen.append("" if found is None else found.topic.id[:2])
        assert seen == ["aa", "bb", "bb"], "the first answer must do, since no broker knows better"
        metadata.doubt("clicks", "aa" * 16)
        assert (await metadata.topic("clicks")).topic.id == "bb" * 16, "another one of that name is gone"
        assert known == [{}, {}, {"clicks": "bb" * 16}], "what no broker could confirm is asked for as if unknown"
        metadata.doubt("clicks", "bb" * 16)
        assert (await metadata.topic("clicks")).topic.id == "cc" * 16, "a broker said that the known one is gone"
        assert known[3] == {}, "it is no answer again"
        await metadata.close()
        await pool.close()

    run(test)


def test_only_a_confirmed_topic_of_the_name_ends_the_wait_for_a_seal() -> None:
    """A broker that has slept knows an earlier topic of the name, and its coordinator does not answer."""
    answers = [("bb" * 16, True), ("aa" * 16, False), ("bb" * 16, True), ("cc" * 16, True)]

    def script(connection: ToyConnection, frame: Frame) -> bool:
        if frame.api == Api.METADATA:
            topic_id, confirmed = answers.pop(0)
            found = msgspec.structs.replace(toy_topic(topic_id=topic_id), sealed_ms=1)
            unconfirmed = [] if confirmed else ["clicks"]
            metadata = Metadata(cluster="toy", topics=[TopicMetadata(topic=found)], unconfirmed=unconfirmed)
            connection.answer(frame, metadata)
        elif frame.api == Api.ADMIN:
            sealed = msgspec.structs.replace(toy_topic(topic_id="bb" * 16), sealed_ms=1)
            connection.answer(frame, AdminAnswer(topic=sealed))
        return frame.api in (Api.METADATA, Api.ADMIN)

    async def test(broker: ToyBroker) -> None:
        broker.script = script
        async with AsyncAdmin(broker.address) as admin:
            with pytest.raises(NotFoundError, match="was deleted while it was being sealed"):
                await admin.seal_topic("clicks")
        assert answers == []

    run(test)


def test_a_topic_that_is_doubted_is_asked_for_again_and_never_goes_back_to_an_older_version() -> None:
    versions, known = [2, 1, 3], list[dict[str, str]]()

    def script(connection: ToyConnection, frame: Frame) -> bool:
        if frame.api != Api.METADATA:
            return False
        known.append(decode_message(frame.body, MetadataRequest).known)
        topic = msgspec.structs.replace(toy_topic(), version=versions[len(known) - 1])
        connection.answer(frame, Metadata(cluster="toy", topics=[TopicMetadata(topic=topic)]))
        return True

    async def test(broker: ToyBroker) -> None:
        broker.script = script
        runtime = Runtime()
        pool = LinkPool(runtime, [address_of(broker)])
        metadata = ClusterMetadata(runtime, pool)
        topic_id = (await metadata.topic("clicks")).topic.id
        metadata.doubt("clicks", topic_id)
        assert (await metadata.topic("clicks")).topic.version == 2, "keys would go to other partitions, and back"
        assert (await metadata.topic("clicks")).topic.version == 2
        await metadata.refresh("clicks")
        assert (await metadata.topic("clicks")).topic.version == 3
        assert known == [{}, {}, {"clicks": topic_id}]
        await metadata.close()
        await pool.close()

    run(test)
