"""GETs of a real S3 server that hang, trickle or stop in the middle: retried in time, or reported.

Both data paths have the same limits: a time for one request with its whole body, and a time for all tries.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Literal, TypeVar

import pytest

import memq
import tests.contract.test_storage_handler  # noqa: F401 - fills SCENARIOS
from memq.audit.checks.object_reads import read_entries
from memq.audit.collector import audit
from memq.audit.opened_topic import opened_topic
from memq.broker.broker import Broker
from memq.broker.restore.restore import Restorer
from memq.broker.sweep.broker_sweep import sweep
from memq.client.broker_router import BrokerRouter
from memq.client.link_pool import LinkPool, bootstrap_addresses
from memq.errors import StoreError
from memq.format.pointer import decode_pointer
from memq.governor.memory import MemoryCluster, MemoryCoordinator
from memq.notification.memory import MemoryQueue
from memq.runtime.clock import SystemClock
from memq.runtime.runtime import Runtime
from memq.settings import BrokerSettings
from tests.contract.stores import HANG_S, SCENARIOS
from tests.s3_proxy import HANGS, HANGS_OF_BODIES, FaultProxy, PlannedFault, harming_proxy
from tests.s3_servers import S3Place, seaweedfs

REQUEST_MS = 300
TRIES_MS = 10_000
DATA_PATHS = ("obstore", "aiobotocore")
MEETING = ("test_stored_object_is_read_whole_and_in_ranges", "test_other_bytes_under_the_key_are_refused")
STUCK = [*HANGS, *HANGS_OF_BODIES, PlannedFault("body", "cut")]
BATCHES = 20
VALUES = [b"%d" % number for number in range(BATCHES)]
Result = TypeVar("Result")
Choose = Callable[[str, bool], PlannedFault | None]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Place]:
    with seaweedfs(tmp_path_factory.mktemp("s3")) as real:
        yield real


def some(method: str, seed: str, share: float = 0.3) -> Choose:
    """Return what harms a share of the requests of a method."""
    dice = random.Random(seed)
    return lambda kind, ranged: dice.choice(STUCK) if kind == method and dice.random() < share else None


def every(method: str, harm: PlannedFault) -> Choose:
    """Return what harms all requests of a method."""
    return lambda kind, ranged: harm if kind == method else None


@asynccontextmanager
async def stored_batches(
    place: S3Place, data_path: str, tries_ms: int = TRIES_MS
) -> AsyncIterator[tuple[Broker, FaultProxy, dict[str, object]]]:
    """Run a broker on the store behind a proxy, with batches in it; yield the keys and times for clients, too."""
    async with harming_proxy(place.endpoint) as proxy, asyncio.timeout(HANG_S):
        times: dict[str, object] = {"request_timeout_ms": REQUEST_MS, "deadline_ms": tries_ms, "hedge_permille": 0}
        store = replace(place, endpoint=proxy.endpoint, settings=times).open(data_path=data_path)
        keys = {"access_key_id": place.access_key_id, "secret_access_key": place.secret_access_key}
        runtime = Runtime()
        settings = BrokerSettings(port=0, http_port=-1, partitions=1, audit=False)
        queue, coordinator = MemoryQueue(runtime.clock), MemoryCoordinator(MemoryCluster())
        broker = Broker(settings, runtime, {"main": store}, queue, coordinator)
        await broker.start()
        try:
            async with memq.aio.Producer(broker.address) as producer:
                for value in VALUES:
                    await (await producer.send("clicks", value))
            broker.services.recent_batches.clear()
            yield broker, proxy, {**keys, **times, "trusted_endpoints": proxy.endpoint, "data_path": data_path}
        finally:
            proxy.choose = lambda method, ranged: None
            await broker.close()
            await store.close()


@pytest.mark.parametrize("data_path", DATA_PATHS)
@pytest.mark.parametrize("harm", STUCK, ids=str)
def test_the_contract_holds_though_each_third_get_is_stuck(harm: PlannedFault, data_path: str, place: S3Place) -> None:
    async def run(name: str) -> int:
        asked = 0

        def choose(method: str, ranged: bool) -> PlannedFault | None:
            nonlocal asked
            asked += method == "GET"
            return harm if method == "GET" and asked % 3 == 1 else None

        async with harming_proxy(place.endpoint) as proxy, asyncio.timeout(HANG_S):
            proxy.choose = choose
            times: dict[str, object] = {"request_timeout_ms": REQUEST_MS, "deadline_ms": TRIES_MS, "hedge_permille": 0}
            store = replace(place, endpoint=proxy.endpoint, settings=times).open(data_path=data_path)
            try:
                await SCENARIOS[name](store)
            finally:
                await store.close()
            met = sum(proxy.met.values())
            assert store.counters.retries >= met > 0
            return met

    for name in MEETING:
        asyncio.run(run(name))


@pytest.mark.parametrize("data_path", DATA_PATHS)
@pytest.mark.parametrize("read", ["direct", "broker"])
def test_a_group_gets_every_record_though_gets_are_stuck(
    read: Literal["direct", "broker"], data_path: str, place: S3Place
) -> None:
    async def run() -> None:
        async with stored_batches(place, data_path) as (broker, proxy, s3):
            proxy.choose = some("GET", f"{read} {data_path}")
            async with memq.aio.Consumer(
                broker.address, "clicks", group="g", end="end", on_damaged="skip", read=read, s3=s3
            ) as consumer:
                assert [value async for batch in consumer for value in batch.values()] == VALUES
                counts = consumer.stats().counts
            assert (counts.damaged_blocks, counts.damaged_records) == (0, 0)
            assert proxy.met

    asyncio.run(run())


@pytest.mark.parametrize("data_path", DATA_PATHS)
@pytest.mark.parametrize("harm", STUCK, ids=str)
def test_a_read_of_a_store_that_stays_stuck_is_an_error_that_names_it(
    harm: PlannedFault, data_path: str, place: S3Place
) -> None:
    """READ of a broker, and the index that the live audit reads by it; then the store answers, and both continue."""

    async def run() -> None:
        async with stored_batches(place, data_path, 1_000) as (broker, proxy, _):
            topic = (await broker.services.coordinator.topics())[0]
            entries = await broker.services.queue.read(topic.read_partition_of(0), 1, 1)
            location = decode_pointer(entries[0].body).locations[0]
            pool = LinkPool(Runtime(), bootstrap_addresses(broker.address))
            router = BrokerRouter(pool)
            try:
                proxy.choose = every("GET", harm)
                with pytest.raises(StoreError) as caught:
                    await read_entries(router.read, location)
                assert location.key in str(caught.value)
                assert proxy.endpoint in str(caught.value)
                proxy.choose = lambda method, ranged: None
                assert await again(lambda: read_entries(router.read, location))
            finally:
                await pool.close()

    asyncio.run(run())


async def again(ask: Callable[[], Awaitable[Result]]) -> Result:
    """Ask until the store's breaker lets a request through."""
    while True:
        with suppress(StoreError):
            return await ask()


@pytest.mark.parametrize("data_path", DATA_PATHS)
def test_the_audit_finds_nothing_wrong_though_gets_are_stuck(
    data_path: str, place: S3Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with stored_batches(place, data_path) as (broker, proxy, s3):
            for name, value in s3.items():
                monkeypatch.setenv(f"MEMQ_S3_{name.upper()}", str(value))
            proxy.choose = some("GET", data_path)
            async with opened_topic(broker.address, "clicks") as opened:
                verdict = await audit(opened.topic, opened.queue, opened.read, SystemClock().wall_ms())
            assert verdict.passed, verdict.findings
            assert proxy.met

    asyncio.run(run())


@pytest.mark.parametrize("data_path", DATA_PATHS)
def test_a_lost_queue_is_restored_though_gets_are_stuck(data_path: str, place: S3Place) -> None:
    async def run() -> None:
        async with stored_batches(place, data_path, 3_000) as (broker, proxy, _):
            services, (topic,) = broker.services, await broker.services.coordinator.topics()
            queue = MemoryQueue(services.runtime.clock)
            restorer = Restorer(services.settings.cluster, "main", services.store, queue, services.runtime.clock)
            proxy.choose = every("GET", PlannedFault("body", "hang"))
            with pytest.raises(StoreError, match="nothing in"):
                await restorer.restore(topic)
            proxy.choose = some("GET", data_path)
            output = await again(lambda: restorer.restore(topic))
            assert output.records + output.held >= BATCHES
            assert (output.findings, output.damaged_blocks) == ([], 0)
            second = await again(lambda: restorer.restore(topic))
            assert (second.pointers, second.findings) == (0, [])

    asyncio.run(run())


@pytest.mark.parametrize("data_path", DATA_PATHS)
def test_a_listing_that_is_stuck_ends_the_sweep_and_is_no_empty_one(data_path: str, place: S3Place) -> None:
    async def run() -> None:
        async with stored_batches(place, data_path, 1_000) as (broker, proxy, _):
            for harm in STUCK:
                proxy.choose = every("LIST", harm)
                with pytest.raises(StoreError, match="nothing in" if harm.harm in ("hang", "trickle") else None):
                    await sweep(broker.services, 0)
            proxy.choose = some("LIST", data_path)
            await again(lambda: sweep(broker.services, 0))
            proxy.choose = lambda method, ranged: None
            assert len([entry async for entry in broker.services.store.list()]) >= BATCHES

    asyncio.run(run())
