"""Clients of several brokers, over sockets: stale metadata costs one redirect, near brokers are asked first."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import UTC, datetime

import pytest
from msgspec.structs import replace

from memq.audit.collector import audit
from memq.audit.opened_topic import opened_topic
from memq.broker.broker import Broker
from memq.broker.ingest.connection import Connection
from memq.client.consumer.consumer import AsyncConsumer
from memq.client.link_pool import DEAD_S, LinkPool
from memq.client.metadata import ClusterMetadata
from memq.client.producer.producer import AsyncProducer
from memq.client.producer.window_events import OpenFailed, OpenStream, Sealed, Tick
from memq.errors import MovedError, NotReadyError, ThrottledError, UnreachableError
from memq.format.pointer import decode_pointer
from memq.governor import Assignment
from memq.governor.memory import MemoryCoordinator
from memq.notification import Publication, Span
from memq.notification.memory import MemoryQueue
from memq.notification.remote import RemoteQueue
from memq.protocol.frames import Api, Frame
from memq.protocol.messages import Metadata, MetadataRequest, Owner, TopicMetadata
from memq.runtime.clock import SystemClock
from memq.runtime.network import parse_address
from memq.runtime.runtime import Runtime
from memq.topic import ReadPartition, Topic, TopicSettings, equal_slots
from tests.brokers import run, until
from tests.component.cluster_rig import Rig, rig
from tests.contract.manual_clock import ManualClock
from tests.unit.producer_parts import block, moved, new_window

PRODUCERS = 100
FAR_AHEAD = datetime(2100, 1, 1, tzinfo=UTC)
Asked = Counter[tuple[str, str, Api]]


def count_requests(broker: Broker, asked: Asked) -> None:
    """Count what a broker is asked, by its id, the client's, and the kind of request."""
    requests = broker.requests
    answer = requests.request

    def counted(connection: Connection, frame: Frame) -> None:
        asked[broker.services.settings.broker_id, connection.client, Api(frame.api)] += 1
        answer(connection, frame)

    requests.request = counted  # type: ignore[method-assign]  # a witness


def test_a_hundred_producers_with_stale_metadata_ask_no_more_and_are_redirected_once() -> None:
    async def scenario() -> None:
        asked: Asked = Counter()
        async with rig() as cluster:
            one = await cluster.start("one")
            topic = await one.partitions.create("clicks", 1, TopicSettings(), exist_ok=False)
            names = [f"p{number}" for number in range(PRODUCERS)]  # whose requests are counted: they report nothing
            producers = [AsyncProducer(one.address, client_id=name, audit=False) for name in names]
            await asyncio.gather(*(producer.resume_points("clicks") for producer in producers))
            for producer in producers[::2]:  # these have streams, the others only know where the owner was
                await (await producer.send("clicks", b"before"))
            two = await cluster.start("two")
            await one.hand_over()
            assert cluster.owner(topic).broker == "two"
            for broker in (one, two):
                count_requests(broker, asked)
            for producer in producers:
                await (await producer.send("clicks", b"after"))
            for number in range(PRODUCERS):
                name = f"p{number}"
                wrong, right = asked["one", name, Api.OPEN], asked["two", name, Api.OPEN]
                assert (wrong, right) == ((number % 2), 1) or (wrong, right) == (0, 0), "one redirect"
                metadata = asked["one", name, Api.METADATA] + asked["two", name, Api.METADATA]
                assert metadata <= 2
            await asyncio.gather(*(producer.close() for producer in producers))

    run(scenario())


class StaleNode(MemoryQueue):
    """Shows the logs of another queue, but as empty for as many questions as `stale` says.

    So answers a node of Kafka that was paused while another one became the leader.
    """

    def __init__(self, queue: MemoryQueue) -> None:
        super().__init__(SystemClock())
        self.logs = queue.logs
        self.stale = 0

    async def span(self, partition: ReadPartition) -> Span:
        """See `PointerReader.span`."""
        if self.stale:
            self.stale -= 1
            return Span(0, 0)
        return await super().span(partition)


@pytest.mark.parametrize("end", ["end", FAR_AHEAD])
def test_the_end_of_a_consumer_is_the_one_that_the_owners_know(end: str | datetime) -> None:
    async def scenario() -> None:
        async with rig() as cluster:
            owner = await cluster.start("one")
            topic = await owner.partitions.create("clicks", 1, TopicSettings(), exist_ok=False)
            cluster.queue = stale = StaleNode(cluster.queue)
            other = await cluster.start("two")
            async with AsyncProducer(owner.address) as producer:
                await (await producer.send("clicks", b"v"))
            assert cluster.owner(topic).broker == "one"
            stale.stale = 2  # both questions that a consumer asks any broker
            async with AsyncConsumer(other.address, "clicks", end=end) as consumer:
                assert [batch.values() async for batch in consumer] == [[b"v"]]
            assert stale.stale == 0

    run(scenario())


@pytest.mark.parametrize(("end", "questions"), [("end", 2), (FAR_AHEAD, 3)])
def test_an_owner_that_has_not_opened_yet_opens_before_it_shows_an_end(end: str | datetime, questions: int) -> None:
    async def scenario() -> None:
        async with rig() as cluster:
            cluster.queue = stale = StaleNode(cluster.queue)
            one = await cluster.start("one")
            topic = await one.partitions.create("clicks", 1, TopicSettings(), exist_ok=False)
            async with AsyncProducer(one.address) as producer:
                await (await producer.send("clicks", b"v"))
            two = await cluster.start("two")
            await one.hand_over()
            assert cluster.owner(topic).broker == "two"
            stale.stale = questions + 2  # of the consumer, of the opening, and of the owner's answer
            async with AsyncConsumer(two.address, "clicks", end=end) as consumer:
                assert [batch.values() async for batch in consumer] == [[b"v"]]
            assert stale.stale == 0
            log = await stale.read(topic.read_partition_of(0), 0, 1 << 20)
            kinds = [decode_pointer(entry.body).kind for entry in log]
            assert kinds == ["opened", "data", "ended", "closed", "opened"], "the opening proves the end"

    run(scenario())


@pytest.mark.parametrize("known", ["new", "set back", "away"])
def test_a_question_for_the_end_opens_no_partition_that_was_never_opened(known: str) -> None:
    """An audit of a new topic with many partitions opened them all. A coordinator that was set back proves nothing."""

    async def scenario() -> None:
        async with rig() as cluster:
            one = await cluster.start("one")
            topic = await one.partitions.create("clicks", 1, TopicSettings(), exist_ok=False)
            log = topic.read_partition_of(0)
            if known == "set back":
                await cluster.queue.publish(
                    Publication(log, 0, 7, cluster.runtime.clock.wall_ms(), b"of a later epoch")
                )
            if known == "away":
                one.services.coordinator.assignment = away  # type: ignore[method-assign]
            address = parse_address(one.address)
            link = (await LinkPool(cluster.runtime, [address]).session(address)).link
            asking = asyncio.create_task(RemoteQueue(link.request).owner_span(log, 0))
            if known == "new":
                assert await asking == Span(0, 0)
            await until(lambda: asking.done() or bool(one.partitions.processors))
            assert bool(one.partitions.processors) == (known != "new")
            asking.cancel()

    run(scenario())


def test_a_replaced_owner_that_does_not_know_it_shows_no_end() -> None:
    async def scenario() -> None:
        async with rig() as cluster:
            cluster.queue = stale = StaleNode(cluster.queue)
            one = await cluster.start("one")
            topic = await one.partitions.create("clicks", 1, TopicSettings(), exist_ok=False)
            two = await cluster.start("two")
            async with AsyncProducer(one.address) as producer:
                await (await producer.send("clicks", b"v"))
            one.partitions.refresh = nothing  # type: ignore[method-assign]  # it was paused, and its watches with it
            coordinator = MemoryCoordinator(cluster.shared)
            await coordinator.set_assignment(replace(cluster.owner(topic), broker="two", session=""))
            await two.partitions.refresh()
            async with AsyncProducer(two.address) as producer:
                await (await producer.send("clicks", b"w"))
            assert one.partitions.owns(topic, 0)
            address = parse_address(one.address)
            link = (await LinkPool(cluster.runtime, [address]).session(address)).link
            stale.stale = 1
            with pytest.raises(MovedError, match="partition 0 of topic 'clicks' belongs to broker 'two'"):
                await RemoteQueue(link.request).owner_span(topic.read_partition_of(0), 0)

    run(scenario())


async def away(topic_id: str, partition: int) -> Assignment:
    """Be a coordinator that does not answer."""
    raise UnreachableError("away")


async def nothing() -> None:
    """Leave a broker with what it knows."""


async def end_of(broker: Broker, topic: Topic) -> int:
    return (await broker.services.queue.span(topic.read_partition_of(0))).end


def test_an_audit_takes_the_end_that_the_owners_know() -> None:
    async def scenario() -> None:
        async with rig() as cluster:
            owner = await cluster.start("one")
            topic = await owner.partitions.create("clicks", 1, TopicSettings(), exist_ok=False)
            cluster.queue = stale = StaleNode(cluster.queue)
            other = await cluster.start("two")
            async with AsyncProducer(owner.address) as producer:
                await (await producer.send("clicks", b"v"))
            assert cluster.owner(topic).broker == "one"
            async with opened_topic(other.address, "clicks") as opened:
                stale.stale = 1
                verdict = await audit(opened.topic, opened.queue, opened.read, 0)
            assert stale.stale == 0
            (part,) = verdict.coverage.partitions
            assert part.pointers == part.end == await end_of(owner, topic)
            assert part.end > 1, "the opening, and the batch"

    run(scenario())


async def read_all(cluster: Rig, consumer: AsyncConsumer, records: int) -> None:
    got = 0
    async for batch in consumer:
        got += len(batch.values())
        if got >= records:
            return


def read_by(broker: Broker) -> int:
    """Return how many READ requests a broker has got, and batches it has sent in answers to POLL."""
    return broker.services.counters.read_requests + broker.services.counters.poll_batches


@pytest.mark.thorough
def test_a_consumer_reads_through_the_broker_of_its_zone_falls_back_and_comes_back() -> None:
    async def scenario() -> None:
        async with rig() as cluster:
            far, near = await cluster.start("far", "x"), await cluster.start("near", "y")
            await far.partitions.create("clicks", 2, TopicSettings(), exist_ok=False)
            async with (
                AsyncProducer(far.address) as producer,
                AsyncConsumer(far.address, "clicks", read="broker", zone="y") as consumer,
            ):

                async def one_more(broker: Broker) -> None:
                    """Send records until one is read through this broker."""
                    before = read_by(broker)
                    while read_by(broker) == before:
                        await (await producer.send("clicks", b"v"))
                        await read_all(cluster, consumer, 1)

                await one_more(near)
                await near.close()
                await one_more(far)
                await one_more(await cluster.start("near", "y", parse_address(near.address)[1]))

    run(scenario())


def test_moved_not_ready_and_over_capacity_are_three_answers() -> None:
    """Go there at once; wait, and ask again only now and then; back off for as long as it says, and ask nobody."""
    window = new_window()
    window.handle(Sealed(block(0, deadline_s=1e9)))
    assert window.handle(OpenFailed(moved("b:2"), 0.0)) == [OpenStream(0, "b:2", False)]
    asked = []
    for number in range(8):
        window.handle(OpenFailed(NotReadyError("not yet", retry_after_ms=200), float(number)))
        due_s = window.next_deadline_s
        assert due_s is not None
        assert due_s >= number + 0.2
        (again,) = window.handle(Tick(due_s))
        assert isinstance(again, OpenStream)
        asked.append(again.refresh)
    assert asked == [False, False, True, False, False, False, True, False], "each fourth answer without an ack"
    for _ in range(8):
        window.handle(OpenFailed(ThrottledError("slow", retry_after_ms=5_000), 100.0))
        due_s = window.next_deadline_s
        assert due_s is not None
        assert due_s >= 105.0
        assert window.handle(Tick(due_s)) == [OpenStream(0, "", False)]


# ---- the cache -----------------------------------------------------------------------------------


def metadata_of(version: int, *owners: tuple[str, int]) -> TopicMetadata:
    topic = Topic(name="clicks", id="ab" * 16, created_ms=0, partitions=equal_slots(len(owners)), version=version)
    return TopicMetadata(
        topic=topic,
        owners=[
            Owner(partition=number, address=address, epoch=epoch, broker=address)
            for number, (address, epoch) in enumerate(owners)
        ],
    )


def test_an_answer_of_a_broker_that_lags_takes_nothing_back() -> None:
    async def scenario() -> None:
        runtime = Runtime()
        metadata = ClusterMetadata(runtime, LinkPool(runtime, [("127.0.0.1", 1)]))

        async def heard(*owners: tuple[str, int], version: int) -> None:
            async def ask(request: MetadataRequest) -> Metadata:
                return Metadata(cluster="c", topics=[metadata_of(version, *owners)])

            metadata.ask = ask  # type: ignore[method-assign]  # what brokers say
            await metadata.refresh("clicks")

        def owner(partition: int) -> str:
            address = metadata.owner("clicks", "ab" * 16, partition)
            return "" if address is None else f"{address[0]}:{address[1]}"

        await heard(("a:1", 4), ("a:1", 7), version=5)
        await heard(("b:1", 3), ("b:1", 7), version=4)
        assert (owner(0), owner(1)) == ("a:1", "b:1"), "a higher epoch stays, as high a one is replaced"
        known = metadata.known("clicks")
        assert known is not None
        assert known.topic.version == 5
        metadata.moved("clicks", "ab" * 16, 0, "c:1")
        assert owner(0) == "c:1"
        await heard(("d:1", 4), ("d:1", 8), version=6)
        assert (owner(0), owner(1)) == ("d:1", "d:1")

    run(scenario())


def test_brokers_are_asked_nearest_first_and_the_dead_ones_last() -> None:
    async def scenario() -> None:
        clock = ManualClock()
        pool = LinkPool(Runtime(clock), [("127.0.0.1", 1)], zone="y")
        live = [parse_address(f"127.0.0.1:{port}") for port in (2, 3, 4)]
        pool.learn(live, ["x", "y", "y"])
        assert set(pool.candidates()[:2]) == {live[1], live[2]}
        with pytest.raises(UnreachableError):
            await pool.session(live[1])
        assert (pool.candidates()[0], pool.candidates()[-1]) == (live[2], live[1])
        clock.advance(int(DEAD_S * 1000))
        assert live[1] in pool.candidates()[:2], "a dead endpoint comes back"
        pool.learn(live[:1], [])
        assert set(pool.candidates()) == {("127.0.0.1", 1), live[0]}, "who left is forgotten, the first ones stay"

    run(scenario())


def test_reads_through_brokers_are_served_from_the_owners_memory() -> None:
    async def scenario() -> None:
        async with rig() as cluster:
            brokers = [await cluster.start(name) for name in ("one", "two", "three")]
            await brokers[0].partitions.create("clicks", 6, TopicSettings(), exist_ok=False)
            async with AsyncProducer(brokers[0].address, audit=False) as producer:
                for number in range(60):
                    await (await producer.send("clicks", b"%d" % number, partition=number % 6))
            async with AsyncConsumer(brokers[0].address, "clicks", start="beginning", read="broker") as consumer:
                await read_all(cluster, consumer, 60)
            counters = [broker.services.counters for broker in brokers]
            asked = [each.read_requests for each in counters]
            assert [each.read_hot_requests for each in counters] == asked
            assert sum(map(bool, asked)) >= 2, "more than one of them owns partitions"

    run(scenario())
