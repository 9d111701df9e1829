"""Limits at a broker, over sockets: observe only counts, soft slows without an error, hard refuses."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from memq.broker.broker import Broker
from memq.broker.ingest.quotas import ClientLimits, Quotas, RatePerSecond
from memq.client.admin import AsyncAdmin
from memq.client.consumer.consumer import AsyncConsumer
from memq.client.producer.delivery import AsyncDelivery
from memq.client.producer.producer import AsyncProducer
from memq.errors import NotFoundError, OverLimitError
from memq.governor.planning import join, split
from memq.limits import KIB
from memq.protocol.frames import Api, encode_frame
from memq.protocol.messages import MetadataRequest, encode_message
from memq.runtime.clock import SystemClock
from memq.topic import LimitMode, Topic, TopicSettings, equal_slots, parse_settings
from tests.brokers import BareClient, run, running_broker

RECORDS = 40
VALUE = bytes(900)  # fills a block


def limit_of(mode: LimitMode, **limits: int) -> TopicSettings:
    return parse_settings({"limit_mode": mode, **limits}, TopicSettings())


def over(broker: Broker) -> dict[str, int]:
    """What was over limits, by mode, of all topics and clients."""
    found = {"observe": 0, "soft": 0, "hard": 0}
    for limiter in broker.services.limits.limiters():
        for mode, count in limiter.over.items():
            found[mode] += count
    return found


def producer_of(broker: Broker, client_id: str = "") -> AsyncProducer:
    return AsyncProducer(broker.address, linger_ms=0, block_bytes=KIB, codec="none", client_id=client_id)


async def send_all(producer: AsyncProducer, topic: str = "clicks") -> list[AsyncDelivery]:
    return [await producer.send(topic, VALUE) for _ in range(RECORDS)]


async def in_time(producer: AsyncProducer) -> None:
    """Send one more record, again and again: there is room for it when the clock has filled the bucket."""
    while True:
        with contextlib.suppress(OverLimitError):
            await (await producer.send("clicks", b"again"))
            return


@pytest.mark.parametrize("settings", [limit_of("soft", limit_bytes_s=10_000), limit_of("soft", limit_requests_s=10)])
def test_a_soft_limit_slows_the_producer_without_an_error(settings: TopicSettings) -> None:
    async def scenario() -> None:
        async with running_broker() as broker:
            await broker.partitions.create("clicks", 1, settings, exist_ok=False)
            async with producer_of(broker) as producer:
                for delivery in await send_all(producer):
                    await delivery
                assert (producer.stats().records_acked, producer.stats().blocks_failed) == (RECORDS, 0)
            assert over(broker)["soft"] > 0

    run(scenario())


def test_a_hard_limit_is_an_error_that_says_what_to_do_and_when_and_later_records_pass() -> None:
    async def scenario() -> None:
        async with running_broker() as broker:
            settings = limit_of("hard", limit_bytes_s=10_000)
            await broker.partitions.create("clicks", 1, settings, exist_ok=False)
            async with producer_of(broker) as producer:
                outcomes = await asyncio.gather(*await send_all(producer), return_exceptions=True)
                refused = [each for each in outcomes if isinstance(each, BaseException)]
                assert 0 < len(refused) < RECORDS
                for error in refused:
                    assert isinstance(error, OverLimitError), repr(error)
                    assert str(error) == "topic 'clicks' is over its limit of 10000 bytes/s"
                    assert f"try again in {error.retry_after_ms} ms" in error.hint
                    assert error.retry_after_ms > 0
                await in_time(producer)
            assert over(broker)["hard"] > 0

    run(scenario())


def test_a_dark_limit_counts_and_does_nothing() -> None:
    async def scenario() -> None:
        async with running_broker() as broker:
            await broker.partitions.create("clicks", 1, limit_of("observe", limit_bytes_s=1), exist_ok=False)
            async with producer_of(broker) as producer:
                for delivery in await send_all(producer):
                    await delivery
                assert producer.stats().block_writes == producer.stats().blocks_acked
            assert 0 < over(broker)["observe"] < RECORDS + 1

    run(scenario())


def test_a_limit_that_is_altered_holds_on_open_streams() -> None:
    async def scenario() -> None:
        async with running_broker() as broker:
            await broker.partitions.create("clicks", 1, TopicSettings(), exist_ok=False)
            async with producer_of(broker) as producer:
                await (await producer.send("clicks", VALUE))
                await broker.partitions.alter(broker.partitions.topic("clicks"), limit_of("hard", limit_bytes_s=1))
                outcomes = await asyncio.gather(*await send_all(producer), return_exceptions=True)
                assert any(isinstance(each, OverLimitError) for each in outcomes)
                await broker.partitions.alter(broker.partitions.topic("clicks"), TopicSettings())
                for delivery in await send_all(producer):
                    await delivery

    run(scenario())


def test_a_clients_limit_is_its_own() -> None:
    async def scenario() -> None:
        limits = ClientLimits(named={"loader": RatePerSecond("hard", bytes_s=10_000)})
        async with (
            running_broker(limits) as broker,
            producer_of(broker, "loader") as loader,
            producer_of(broker, "other") as other,
        ):
            outcomes = await asyncio.gather(*await send_all(loader), return_exceptions=True)
            refused = [each for each in outcomes if isinstance(each, OverLimitError)]
            assert refused
            assert str(refused[0]) == "client 'loader' is over its limit of 10000 bytes/s"
            for delivery in await send_all(other):
                await delivery
            async with AsyncAdmin(broker.address) as admin:
                everybody, known = await admin.clients("broker-1")
                with pytest.raises(NotFoundError, match="broker 'broker-2' is not running"):
                    await admin.clients("broker-2")
            assert (everybody.client, everybody.mode, everybody.connections) == ("default", "off", 0)
            assert (known.client, known.mode, known.bytes_s, known.requests_s) == ("loader", "hard", 10_000, 0)
            assert known.connections >= 1
            assert known.over > 0

    run(scenario())


@pytest.mark.parametrize(("owned", "share"), [([0], 20), ([0, 2], 40), ([0, 1, 2], 60), ([7], None)])
def test_owners_share_a_limit_by_the_partitions_that_take_records(owned: list[int], share: int | None) -> None:
    settings = limit_of("hard", limit_requests_s=60)
    topic = Topic(name="clicks", id="1" * 32, created_ms=0, partitions=equal_slots(1), settings=settings)
    wide = split(split(topic, 0, 1), 0, 2)
    assert share_of(wide, owned) == share
    if 2 in owned:
        assert share_of(join(wide, 0, 2, 3), owned) == (60 if 1 in owned else 30), "2 takes nothing any more"


def share_of(topic: Topic, owned: list[int]) -> int | None:
    """Return how many requests per second a broker lets in that owns some partitions of a topic."""
    book = Quotas(SystemClock(), ClientLimits())
    book.follow([topic], [(topic.id, number) for number in owned])
    limiters = book.of_topic(topic.id)
    return limiters[0].room(0)[0] if limiters else None


def test_requests_over_a_hard_limit_are_refused_and_over_a_soft_one_answered_late() -> None:
    async def scenario() -> None:
        limits = ClientLimits(RatePerSecond("soft", requests_s=10), {"probe": RatePerSecond("hard", requests_s=1)})
        ask = encode_message(MetadataRequest(topics=[]))
        async with running_broker(limits) as broker:
            probe, other = await BareClient.connect(broker, client_id="probe"), await BareClient.connect(broker)
            for client in (probe, other):
                for number in range(1, 31):
                    client.write(encode_frame(Api.METADATA, 0, number, ask))
            answers = [(await probe.frame()).api for _ in range(30)]
            assert answers[0] == Api.METADATA
            assert Api.ERROR in answers
            assert [(await other.frame()).api for _ in range(30)] == [Api.METADATA] * 30
            names = {limiter.name: limiter.over for limiter in broker.services.limits.limiters()}
            assert names["probe"]["hard"] == answers.count(Api.ERROR)
            assert names["127.0.0.1"]["soft"] > 0, "who has no client id is known by its host"
            await probe.close()
            await other.close()

    run(scenario())


def test_a_consumer_over_its_limit_reads_everything_all_the_same() -> None:
    async def scenario() -> None:
        limits = ClientLimits(
            named={"slow": RatePerSecond("soft", bytes_s=50_000), "refused": RatePerSecond("hard", requests_s=20)}
        )
        async with running_broker(limits) as broker:
            async with producer_of(broker) as producer:
                for delivery in await send_all(producer):
                    await delivery
            for name in ("slow", "refused"):
                got = 0
                async with AsyncConsumer(
                    broker.address, "clicks", end="end", read="broker", client_id=name
                ) as consumer:
                    async for batch in consumer:
                        got += len(batch.values())
                assert got == RECORDS

    run(scenario())
