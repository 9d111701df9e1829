"""Answers about streams, topics and the cluster, on virtual time: slow openings, new topics, loads."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from memq.broker.api.stream_requests import OPEN_TIMEOUT_S
from memq.broker.partition.ownership import INSTANCES_PER_EPOCH
from memq.governor import Load
from memq.governor.memory import MemoryCoordinator
from memq.protocol.admin_messages import (
    AdminRequest,
    BeginProducer,
    CreateTopic,
    DescribeClients,
    DescribeCluster,
    DescribeLoad,
    DrainBroker,
)
from memq.protocol.frames import PREFIX, Api
from memq.protocol.messages import Close, Metadata, MetadataRequest, Nack, OpenAnswer, ReadRequest, decode_message
from memq.storage_handlers import Count
from memq.topic import Topic
from tests.brokers import PRODUCER, block_of, write_frame
from tests.component.served_brokers import MEMORY_BYTES, Calls, Served, open_of, served, topic_named
from tests.skipping_loop import skip

# ---- streams -------------------------------------------------------------------------------------------


def test_of_two_openings_of_one_stream_at_once_the_first_has_it() -> None:
    async def work(at: Served) -> None:
        topic, client = await at.topic(), at.call()
        calls = Calls(at.cluster.queue, "publish")
        calls.takes_s["publish"] = 2.0
        for number in (1, 2):
            client.ask(Api.OPEN, open_of(topic), stream=9, number=number)
        await skip(5)
        first, second = client.heard()
        assert (first.api, first.argument) == (Api.OPEN, 1)
        assert decode_message(first.body, OpenAnswer).epoch == 1
        assert (second.api, second.argument) == (Api.ERROR, 2)
        refused = decode_message(second.body, Nack)
        assert (refused.code, refused.text) == ("not-ready", "stream 9 was closed or opened again meanwhile")
        calls.takes_s.clear()
        client.say(write_frame(block_of(topic, 0, [b"v"], producer=PRODUCER), stream=9))
        await skip(1)
        assert [frame.api for frame in client.heard()] == [Api.ACK]

    served(work)


def test_a_connection_that_is_refused_meanwhile_gets_no_stream() -> None:
    async def work(at: Served) -> None:
        topic, client = await at.topic(), at.call()
        calls = Calls(at.cluster.queue, "publish")
        calls.takes_s["publish"] = 2.0
        client.ask(Api.OPEN, open_of(topic), stream=9)
        await skip(1)
        client.wire.deaf = True
        client.say(PREFIX.pack(0, 99, 0, 0, 1))
        connection: Any = client.wire.protocol
        await skip(5)
        assert connection.closed
        assert connection.streams == {}

    served(work)


def test_a_stream_that_is_opened_again_or_closed_gets_no_acks_of_before() -> None:
    async def work(at: Served) -> None:
        topic, client = await at.topic(), at.call()
        assert (await at.answered(client, Api.OPEN, open_of(topic), stream=9)).api == Api.OPEN
        processor = at.broker.partitions.processor(topic, 0)
        producer = processor.owned().producer(PRODUCER)
        assert producer.streams == 1
        await at.answered(client, Api.OPEN, open_of(topic), stream=9)
        assert producer.streams == 1
        await at.answered(client, Api.CLOSE, Close(next_sequence=0), stream=9)
        assert producer.streams == 0

    served(work)


def test_a_partition_that_opens_for_long_is_not_ready_yet() -> None:
    async def work(at: Served) -> None:
        topic, client = await at.topic(), at.call()
        calls = Calls(at.cluster.queue, "publish")
        calls.takes_s["publish"] = 3 * OPEN_TIMEOUT_S
        client.ask(Api.OPEN, open_of(topic), stream=9)
        await skip(OPEN_TIMEOUT_S - 0.5)
        assert client.heard() == []
        await skip(1)
        refused = client.error()
        assert (refused.code, refused.retry_after_ms) == ("not-ready", 200)
        assert refused.text == "topic 'clicks' partition 0 is still being opened"
        calls.takes_s.clear()
        await skip(3 * OPEN_TIMEOUT_S)
        assert (await at.answered(client, Api.OPEN, open_of(topic), stream=9)).api == Api.OPEN

    served(work)


@pytest.mark.parametrize("before", ["two", ""])
def test_a_partition_that_has_just_come_is_opened_though_the_broker_was_not_notified(before: str) -> None:
    async def work(at: Served) -> None:
        topic, client, other = await at.topic(), at.call(), MemoryCoordinator(at.cluster.shared)
        await skip(1)
        at.broker.governor = None  # it would take what nobody has
        elsewhere = msgspec.structs.replace(at.cluster.owner(topic), broker=before)
        await other.set_assignment(elsewhere)
        await skip(1)
        refused = await at.error(client, Api.OPEN, open_of(topic), stream=9)
        assert refused.code == "not-ready", "nobody is there"
        here = msgspec.structs.replace(at.cluster.owner(topic), broker="one")
        at.cluster.shared.handles.remove(at.broker.services.coordinator)  # type: ignore[arg-type]  # it hears nothing
        await other.set_assignment(here)
        assert (await at.answered(client, Api.OPEN, open_of(topic), stream=9)).api == Api.OPEN

    served(work)


def test_a_partition_of_a_live_broker_that_has_just_come_is_opened_too() -> None:
    async def work(at: Served) -> None:
        two = await at.cluster.start("two", audit=False, governs=False)
        topic, client, other = await at.topic(), at.call(), MemoryCoordinator(at.cluster.shared)
        await skip(1)
        at.broker.governor = None
        await other.set_assignment(msgspec.structs.replace(at.cluster.owner(topic), broker="two"))
        await skip(1)
        refused = await at.error(client, Api.OPEN, open_of(topic), stream=9)
        assert (refused.code, refused.address) == ("moved", two.address)
        at.cluster.shared.handles.remove(at.broker.services.coordinator)  # type: ignore[arg-type]  # it hears nothing
        await other.set_assignment(msgspec.structs.replace(at.cluster.owner(topic), broker="one"))
        assert (await at.answered(client, Api.OPEN, open_of(topic), stream=9)).api == Api.OPEN

    served(work)


def test_instances_of_a_named_producer_are_counted_above_all_of_earlier_owners() -> None:
    async def work(at: Served) -> None:
        topic, client = await at.topic(), at.call()
        ask = BeginProducer(topic=topic.name, topic_id=topic.id, partition=0, producer=f"{PRODUCER:016x}")
        before = INSTANCES_PER_EPOCH  # of the owner's first epoch, 1
        for number in (1, 2, 3):
            instance = (await at.admin(client, ask)).instance
            assert instance is not None
            assert (instance.epoch, instance.next_sequence) == (before + number, 0)
        refused = await at.error(client, Api.OPEN, open_of(topic, producer_epoch=before + 2), stream=9)
        assert refused.code == "producer-fenced"
        newest = open_of(topic, producer_epoch=before + 3)
        assert (await at.answered(client, Api.OPEN, newest, stream=9)).api == Api.OPEN

    served(work)


# ---- topics --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("create", "allowed"), [(True, True), (True, False), (False, True)])
def test_a_topic_is_made_for_who_asks_for_it_where_that_is_allowed(create: bool, allowed: bool) -> None:
    async def work(at: Served) -> None:
        answer = await at.metadata(at.call(), topics=["new"], create=create)
        made = create and allowed
        assert ([each.topic.name for each in answer.topics], answer.missing) == (
            (["new"], []) if made else ([], ["new"])
        )
        assert [len(each.owners) for each in answer.topics] == [3] * made

    served(work, auto_create_topics=allowed, partitions=3)


def test_clients_that_ask_for_a_new_topic_at_once_get_the_same_one() -> None:
    async def work(at: Served) -> None:
        calls = Calls(at.broker.services.coordinator, "create_topic")
        calls.takes_s["create_topic"] = 1.0
        clients = [at.call() for _ in range(3)]
        for client in clients:
            client.ask(Api.METADATA, MetadataRequest(topics=["new"], create=True))
        await skip(5)
        answers = [decode_message(client.heard()[0].body, Metadata) for client in clients]
        assert len({answer.topics[0].topic.id for answer in answers}) == 1
        assert len(calls.at_s["create_topic"]) == 3

    served(work)


def test_metadata_names_topics_of_memq_itself_and_refuses_what_is_no_name() -> None:
    async def work(at: Served) -> None:
        await at.topic("a")
        answer = await at.metadata(at.call(), topics=["_memq_audit", "a"])
        assert ([each.topic.name for each in answer.topics], answer.missing) == (["a"], ["_memq_audit"])
        assert (answer.cluster, answer.brokers, answer.zones) == ("memq", [at.broker.address], ["near"])
        assert [(store.name, store.url) for store in answer.stores] == [("main", at.cluster.store.url)]
        refused = await at.error(at.call(), Api.METADATA, MetadataRequest(topics=["a/b/c"]))
        assert refused.code == "invalid-name"

    served(work, zone="near")


@pytest.mark.parametrize(("asked", "made"), [(0, 2), (5, 5)])
def test_a_topic_has_as_many_partitions_as_asked_for_or_as_its_broker_says(asked: int, made: int) -> None:
    async def work(at: Served) -> None:
        answer = await at.admin(at.call(), CreateTopic(name="new", partitions=asked))
        assert answer.topic is not None
        assert len(answer.topic.partitions) == made
        again = await at.error(at.call(), Api.ADMIN, AdminRequest(ask=CreateTopic(name="new")))
        assert again.code == "already-exists"
        same = await at.admin(at.call(), CreateTopic(name="new", exist_ok=True))
        assert same.topic == answer.topic

    served(work, partitions=2)


def test_newest_batch_is_read_from_memory_and_counted() -> None:
    async def work(at: Served) -> None:
        topic, client = await at.topic(), at.call()
        await at.answered(client, Api.OPEN, open_of(topic), stream=9)
        block = block_of(topic, 0, [b"value"], producer=PRODUCER)
        client.say(write_frame(block, stream=9))
        await skip(1)
        assert [frame.api for frame in client.heard()] == [Api.ACK]
        (key,) = at.cluster.store.objects
        at.cluster.store.objects.clear()
        ask = ReadRequest(store="main", key=key, offset=0, length=len(block))
        assert bytes((await at.answered(client, Api.READ, ask)).body) == block
        counters = at.broker.services.counters
        assert (counters.read_requests, counters.read_hot_requests, counters.read_bytes) == (1, 1, len(block))

    served(work)


# ---- the cluster ---------------------------------------------------------------------------------------


def test_a_cluster_is_described_with_the_load_of_each_broker() -> None:
    async def work(at: Served) -> None:
        await at.cluster.start("two", "zone-b", audit=False, capacity_bytes_s=7_000)
        topic = await at.topic(partitions=3)
        view = {number: at.cluster.owner(topic, number) for number in range(3)}
        owned = [number for number, entry in view.items() if entry.broker == "one"]
        assert 0 < len(owned) < 3
        loads = [load_of(topic, number, 100 + number) for number in range(3)] + [load_of(topic_named("x", 5), 0, 9)]

        async def reported() -> list[Load]:
            return loads

        at.broker.services.coordinator.loads = reported  # type: ignore[method-assign]
        answer = await at.admin(at.call(), DescribeCluster())
        rows = {row.broker: row for row in answer.brokers}
        for name in ("one", "two"):
            numbers = [number for number, entry in view.items() if entry.broker == name]
            assert rows[name].bytes_s == sum(100 + number for number in numbers)
            assert rows[name].partitions == len(numbers)
        assert (rows["one"].governs, rows["two"].governs) == (True, False)
        assert (rows["two"].zone, rows["two"].capacity_bytes_s, rows["two"].draining) == ("zone-b", 7_000, False)

    served(work)


def load_of(topic: Topic, partition: int, bytes_s: int) -> Load:
    return Load(topic_id=topic.id, partition=partition, bytes_s=bytes_s)


@pytest.mark.parametrize(
    ("counts", "names"),
    [
        ([("breaker_open", 1)], ["main"]),
        ([("breaker_open", 0), ("hedges", 3)], []),
        ([("hedges", 3), ("breaker_open", 1)], ["main"]),
    ],
)
def test_a_broker_says_how_full_it_is(counts: list[tuple[str, int]], names: list[str]) -> None:
    async def work(at: Served) -> None:
        topic, client = await at.topic(), at.call()
        at.cluster.store.counts = lambda: [Count(name, value) for name, value in counts]  # type: ignore[attr-defined]
        calls = Calls(at.cluster.store, "put")
        calls.takes_s["put"] = 60.0
        await at.answered(client, Api.OPEN, open_of(topic), stream=9)
        client.say(write_frame(block_of(topic, 0, [b"value"], producer=PRODUCER), stream=9))
        await skip(1)
        load = (await at.admin(client, DescribeLoad(broker="one"))).load
        assert load is not None
        assert (load.ring_batches, load.uploads, load.open_breakers) == (1, 1, names)
        assert load.memory_bytes == at.broker.services.pool.leased_bytes > 0
        assert load.memory_bytes_max == MEMORY_BYTES
        await skip(60)

    served(work)


@pytest.mark.parametrize("kind", [DescribeLoad, DescribeClients, DrainBroker])
def test_a_broker_answers_for_itself_and_names_the_address_of_another(kind: Any) -> None:
    async def work(at: Served) -> None:
        two = await at.cluster.start("two", audit=False)
        refused = await at.error(at.call(), Api.ADMIN, AdminRequest(ask=kind(broker="two")))
        assert (refused.code, refused.address) == ("moved", two.address)
        assert refused.hint == f"ask it at {two.address}"
        refused = await at.error(at.call(), Api.ADMIN, AdminRequest(ask=kind(broker="three")))
        assert (refused.code, refused.text) == ("not-found", "broker 'three' is not running")

    served(work)


def test_a_request_to_drain_a_broker_is_answered_when_others_have_its_partitions_or_after_thirty_seconds() -> None:
    async def work(at: Served) -> None:
        topic, client = await at.topic(), at.call()
        refused = await at.error(client, Api.ADMIN, AdminRequest(ask=DrainBroker(broker="one")))
        assert (refused.code, refused.hint) == ("invalid-request", "start another broker first")
        calls = Calls(at.cluster.store, "put")
        calls.takes_s["put"] = 50.0
        await at.answered(client, Api.OPEN, open_of(topic), stream=9)
        client.say(write_frame(block_of(topic, 0, [b"value"], producer=PRODUCER), stream=9))
        await at.cluster.start("two", audit=False)
        await skip(1)
        other = at.call()
        other.ask(Api.ADMIN, AdminRequest(ask=DrainBroker(broker="one")))
        await skip(29)
        assert other.heard() == []
        await skip(2)
        refused = other.error()
        assert (refused.code, refused.text) == ("timed-out", "broker 'one' still holds partitions")
        await skip(30)
        await at.admin(other, DrainBroker(broker="one"))
        assert at.cluster.owner(topic).broker == "two"
        assert at.broker.partitions.held() == []

    served(work)
