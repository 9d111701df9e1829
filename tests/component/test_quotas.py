"""Quotas of principals over sockets: producers and readers wait and lose nothing; changes apply at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import memq
from memq.broker.broker import Broker
from memq.broker.ingest.quotas import NO_CLIENT_LIMITS, ClientLimits, RatePerSecond
from memq.cli import run as cli
from memq.errors import OverLimitError
from memq.governor.memory import MemoryCluster, MemoryCoordinator
from memq.limits import KIB
from memq.notification.memory import MemoryQueue
from memq.protocol.frames import Api, encode_frame
from memq.protocol.link import connect_link
from memq.protocol.messages import MetadataRequest, encode_message
from memq.quotas import QuotaRule
from memq.runtime.clock import SystemClock
from memq.runtime.network import parse_address
from memq.runtime.runtime import Runtime
from memq.settings import BrokerSettings
from memq.storage_handlers.memory import MemoryHandler
from tests.brokers import BareClient, run, running_broker, until

RECORDS = 40
CLOCK = SystemClock()
VALUE = bytes(900)  # fills a block
ASK = encode_message(MetadataRequest(topics=[]))


@asynccontextmanager
async def broker_with(limits: ClientLimits = NO_CLIENT_LIMITS, **amounts: Any) -> AsyncIterator[Broker]:
    """Run a broker whose clients, all anonymous, have a quota."""
    async with running_broker(limits, quotas=True) as broker, memq.aio.Admin(broker.address) as admin:
        if amounts:
            await admin.change_quotas(put=[QuotaRule(name="anonymous", **amounts)])
        yield broker


def held(broker: Broker) -> int:
    """Return how often clients had to wait."""
    return sum(limiter.over["soft"] for limiter in broker.services.quotas.limiters())


async def send_all(broker: Broker, topic: str = "clicks") -> None:
    async with memq.aio.Producer(broker.address, linger_ms=0, block_bytes=KIB, codec="none") as producer:
        deliveries = [await producer.send(topic, VALUE) for _ in range(RECORDS)]
        await asyncio.gather(*deliveries)


async def read_all(broker: Broker, topic: str = "clicks") -> int:
    got = 0
    async with memq.aio.Consumer(broker.address, topic, end="end", read="broker") as consumer:
        async for batch in consumer:
            got += len(batch.values())
    return got


@pytest.mark.parametrize("amounts", [{"bytes_in_s": 20_000}, {"records_s": 20}])
def test_a_producer_over_its_quota_waits_and_every_record_arrives(amounts: dict[str, Any]) -> None:
    async def work() -> None:
        async with broker_with(**amounts) as broker:
            started_s = CLOCK.monotonic()
            await send_all(broker)
            assert CLOCK.monotonic() - started_s > 0.8, "the burst is one second's amount, and twice that was sent"
            assert held(broker) > 0
            assert await read_all(broker) == RECORDS

    run(work())


def test_a_reader_over_its_quota_waits_and_reads_everything() -> None:
    async def work() -> None:
        async with broker_with() as broker:
            await send_all(broker)
            async with memq.aio.Admin(broker.address) as admin:
                await admin.change_quotas(put=[QuotaRule(name="*", bytes_out_s=15_000)])
            started_s = CLOCK.monotonic()
            assert await read_all(broker) == RECORDS
            assert CLOCK.monotonic() - started_s > 0.8
            assert held(broker) > 0

    run(work())


def test_requests_at_once_are_answered_at_the_rate_of_the_quota() -> None:
    async def work() -> None:
        async with broker_with(requests_s=20) as broker:
            client = await BareClient.connect(broker)
            started_s = CLOCK.monotonic()
            for number in range(1, 51):
                client.write(encode_frame(Api.METADATA, 0, number, ASK))
            assert [(await client.frame()).api for _ in range(50)] == [Api.METADATA] * 50
            assert 1.2 < CLOCK.monotonic() - started_s < 3, "20 at once, and 30 in 1.5 s"
            await client.close()

    run(work())


def test_a_request_that_would_wait_too_long_is_refused_with_its_time() -> None:
    async def work() -> None:
        async with broker_with(requests_s=5) as broker:
            client = await BareClient.connect(broker)
            for number in range(1, 61):
                client.write(encode_frame(Api.METADATA, 0, number, ASK))
            answers = [await client.frame() for _ in range(60)]
            answered = [frame.api for frame in answers].count(Api.METADATA)
            assert 15 <= answered <= 22, "5 at once, and 15 in 3 s"
            assert {frame.api for frame in answers} == {Api.METADATA, Api.ERROR}
            await client.close()

    run(work())


def test_a_connection_over_the_quota_is_refused() -> None:
    async def work() -> None:
        limits = ClientLimits(named={"probe": RatePerSecond("soft", requests_s=1_000)})
        async with broker_with(limits, connections=3) as broker:
            address = parse_address(broker.address)
            links = [await connect_link(Runtime(), None, address, client_id="probe") for _ in range(2)]
            with pytest.raises(OverLimitError, match="'anonymous' has 3 connections"):
                await connect_link(Runtime(), None, address, client_id="probe")
            await until(lambda: len(broker.intake.readers) == 3)
            assert [each[2] for each in broker.services.limits.clients() if each[0] == "probe"] == [2]
            for link in links:
                link.close()
            await until(lambda: broker.services.quotas.use_of("principal", "anonymous").connections == 1)

    run(work())


def test_a_change_applies_to_open_connections_and_streams() -> None:
    async def work() -> None:
        async with (
            broker_with() as broker,
            memq.aio.Producer(broker.address, linger_ms=0) as producer,
            memq.aio.Admin(broker.address) as admin,
        ):
            await (await producer.send("clicks", VALUE))
            done = await admin.change_quotas(put=[QuotaRule(name="*", records_s=1)])
            assert done.enforced
            assert [str(each) for each in done.put] == ["principal '*': records_s 1"]
            for _ in range(4):
                await (await producer.send("clicks", VALUE))
            assert held(broker) > 0
            (use,) = await admin.quota_use("anonymous")
            assert use.quota == QuotaRule(name="*", records_s=1)
            assert [(rate.rate, rate.limit, rate.used) for rate in use.rates] == [("records_s", 1.0, 4)]
            assert use.rates[0].held > 0
            done = await admin.change_quotas(remove=[QuotaRule(name="*")])
            assert (len(done.put), len(done.removed)) == (0, 1)
            assert await admin.quotas() == []
            before = held(broker)
            for _ in range(5):
                await (await producer.send("clicks", VALUE))
            assert held(broker) == before

    run(work())


def test_an_unused_share_moves_to_the_broker_whose_clients_wait() -> None:
    async def work() -> None:
        shared, queue, store = MemoryCluster(), MemoryQueue(CLOCK), MemoryHandler(CLOCK)
        brokers: list[Broker] = []
        try:
            for number in range(3):
                settings = BrokerSettings(port=0, broker_id=f"b{number}", audit=False, quotas=True)
                coordinator = MemoryCoordinator(shared)
                brokers.append(Broker(settings, Runtime(), {"main": store}, queue, coordinator))
                await brokers[-1].start()
            async with memq.aio.Admin(brokers[0].address) as admin:
                await admin.change_quotas(put=[QuotaRule(name="anonymous", requests_s=60)])
            busy = brokers[2]
            await busy.services.permissions.refresh()
            client = await BareClient.connect(busy)
            ended_s = CLOCK.monotonic() + 20
            while part_of(busy) < 0.9:
                assert CLOCK.monotonic() < ended_s, f"its part is {part_of(busy)}"
                for number in range(1, 33):
                    client.write(encode_frame(Api.METADATA, 0, number, ASK))
                for _ in range(32):
                    await client.frame()
            await client.close()
        finally:
            for broker in brokers:
                await broker.close()

    run(work())


def part_of(broker: Broker) -> float:
    """Return the part of the quota that a broker gives out now."""
    limiter = broker.services.quotas.use_of("principal", "anonymous").limiter
    assert limiter is not None
    return limiter.buckets["requests_s"].rate / 60


@pytest.mark.parametrize("settings", [{}, {"quotas": False}])
def test_without_the_setting_quotas_have_no_effect(settings: dict[str, Any]) -> None:
    async def work() -> None:
        async with running_broker(**settings) as broker, memq.aio.Admin(broker.address) as admin:
            done = await admin.change_quotas(put=[QuotaRule(name="*", records_s=1)])
            assert not done.enforced
            await send_all(broker)
            assert held(broker) == 0

    run(work())


def test_the_command_sets_lists_shows_and_removes_quotas(capsys: pytest.CaptureFixture[str]) -> None:
    async def work() -> None:
        async with broker_with() as broker:

            async def command(*words: str) -> tuple[int, str]:
                code = await asyncio.to_thread(cli.run, ["quota", *words, "-b", broker.address])
                return code, "".join(capsys.readouterr())

            done = await command("set", "*", "--bytes-in", "10MiB", "--connections", "20")
            assert done == (0, "+ principal '*': bytes_in_s 10485760, connections 20\n")
            _, listed = await command("list")
            assert "10,485,760" in listed
            _, shown = await command("show", "anonymous")
            assert "bytes_in_s" in shown
            assert "connections" in shown
            assert await command("remove", "*") == (0, "- principal '*': bytes_in_s 10485760, connections 20\n")
            assert await command("remove", "*") == (0, "nothing to change\n")
            assert (await command("set", "ann", "--records", "many"))[0] == 2

    run(work())


@pytest.mark.parametrize("amounts", [{"bytes_in_s": 20_000}, {"records_s": 20}])
def test_producers_of_a_namespace_share_its_quota_and_others_do_not_wait(amounts: dict[str, Any]) -> None:
    async def work() -> None:
        async with broker_with() as broker:
            async with memq.aio.Admin(broker.address) as admin:
                await admin.change_quotas(put=[QuotaRule(kind="namespace", name="billing", **amounts)])
            started_s = CLOCK.monotonic()
            await send_all(broker, "other/clicks")
            await send_all(broker, "billing.clicks")
            assert held(broker) == 0
            await asyncio.gather(send_all(broker, "billing/one"), send_all(broker, "billing/two"))
            assert CLOCK.monotonic() - started_s > 2.5, "four seconds' amounts were sent"
            assert held(broker) > 0
            assert await read_all(broker, "billing/one") == await read_all(broker, "billing/two") == RECORDS
            limiter = broker.services.quotas.use_of("namespace", "billing").limiter
            assert limiter is not None
            assert sum(bucket.used for bucket in limiter.buckets.values()) >= min(2 * RECORDS, *amounts.values())

    run(work())


def test_readers_of_a_namespace_wait_and_count_what_they_were_sent() -> None:
    async def work() -> None:
        async with broker_with() as broker:
            for topic in ("billing/clicks", "other/clicks"):
                await send_all(broker, topic)
            async with memq.aio.Admin(broker.address) as admin:
                await admin.change_quotas(put=[QuotaRule(kind="namespace", name="b*", bytes_out_s=15_000)])
                started_s = CLOCK.monotonic()
                assert await read_all(broker, "other/clicks") == RECORDS
                assert (held(broker), await admin.quota_use("other", kind="namespace") != []) == (0, True)
                for _ in range(2):  # the first answer passes whole, and leaves a debt
                    assert await read_all(broker, "billing/clicks") == RECORDS
                assert CLOCK.monotonic() - started_s > 0.8
                assert held(broker) > 0
                (use,) = await admin.quota_use("billing", kind="namespace")
                assert use.quota is not None
                assert (use.quota.name, use.connections) == ("b*", 0)
                assert [rate.rate for rate in use.rates] == ["bytes_out_s"]
                assert use.rates[0].used > RECORDS * len(VALUE)
                (none,) = await admin.quota_use("billing")
                assert (none.quota, none.rates) == (None, [])

    run(work())


def test_requests_about_a_namespace_over_its_quota_are_refused_late() -> None:
    async def work() -> None:
        async with broker_with() as broker, memq.aio.Admin(broker.address) as admin:
            for topic in ("billing/clicks", "other/clicks"):
                await admin.create_topic(topic)
            await admin.change_quotas(put=[QuotaRule(kind="namespace", name="billing", requests_s=2)])
            asks = [admin.alter_topic("billing/clicks", settings={"retention_ms": 0}) for _ in range(30)]
            made = await asyncio.gather(*asks, return_exceptions=True)
            refused = [each for each in made if isinstance(each, OverLimitError)]
            assert 15 < len(refused) < 30
            assert "namespace 'billing' is over its limit of 2 requests/s" in str(refused[0])
            before_s = CLOCK.monotonic()
            for _ in range(10):
                await admin.alter_topic("other/clicks", settings={"retention_ms": 0})
            assert CLOCK.monotonic() - before_s < 2.0

    run(work())
