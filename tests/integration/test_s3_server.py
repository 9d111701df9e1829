"""The S3 store on a real server: parts, encryption, missing rights, a broker and its clients, inspect and verify."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Iterator

import pytest
from awscrt.checksums import crc32c
from prometheus_client import CollectorRegistry, generate_latest

import memq
from memq.broker.broker import Broker
from memq.broker.metrics import StoreCollector
from memq.cli.run import run
from memq.errors import CorruptDataError, DeniedError, MemqError, ObjectExistsError
from memq.governor.memory import MemoryCluster, MemoryCoordinator
from memq.notification.memory import MemoryQueue
from memq.runtime.runtime import Runtime
from memq.settings import BrokerSettings
from memq.storage_handlers.s3.handler import S3Handler
from memq_localstack.servers import ADMIN, Identity, start_s3
from tests.s3_servers import BUCKET, S3Place

HANG_S = 60
READER = Identity("reader", "reader-key", "reader-secret", ("Read", "List"))
WRITER = Identity("writer", "writer-key", "writer-secret", ("Write",))
IDENTITIES = (ADMIN, READER, WRITER)
PART = 5 << 20


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Place]:
    with start_s3(tmp_path_factory.mktemp("s3"), buckets=(BUCKET,), identities=IDENTITIES) as server:
        yield S3Place(server.endpoint, server.access_key, server.secret_key)


def use(store: S3Handler, work: Callable[[S3Handler], Awaitable[None]]) -> None:
    """Run work on a store and close that."""

    async def both() -> None:
        try:
            async with asyncio.timeout(HANG_S):
                await work(store)
        finally:
            await store.close()

    asyncio.run(both())


@pytest.mark.parametrize("data_path", ["obstore", "aiobotocore"])
def test_a_large_object_goes_in_parts_and_only_where_nothing_lies(place: S3Place, data_path: str) -> None:
    body = os.urandom(1 << 20) * 12  # noqa: TID251 - any bytes will do
    buffers = [memoryview(body)[at : at + 1_000_003] for at in range(0, len(body), 1_000_003)]

    async def work(store: S3Handler) -> None:
        await store.put("large", buffers, crc32c(body))
        assert await store.get("large") == body
        assert await store.get_range("large", PART - 1, PART + 2) == body[PART - 1 : 2 * PART + 1]
        await store.put("large", buffers, crc32c(body))
        assert store.counters.lost_answers == 1, "the second one finds the first"
        with pytest.raises(ObjectExistsError):
            await store.put("large", [body[1:]], crc32c(body[1:]))
        with pytest.raises(CorruptDataError):
            await store.get_range("large", PART, len(body))
        assert [entry.key async for entry in store.list()] == ["large"]

    use(place.open(data_path=data_path, multipart_bytes_min=PART, part_bytes=PART), work)


@pytest.mark.parametrize("data_path", ["obstore", "aiobotocore"])
def test_encryption_and_storage_class_are_asked_for(place: S3Place, data_path: str) -> None:
    async def work(store: S3Handler) -> None:
        await store.check()
        await store.put("sealed", [b"bytes"], crc32c(b"bytes"))
        assert await store.get("sealed") == b"bytes"

    use(place.open(data_path=data_path, sse="AES256", storage_class="STANDARD"), work)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ((READER.access_key, READER.secret_key), ["s3:PutObject is missing"]),
        ((WRITER.access_key, WRITER.secret_key), ["s3:ListBucket is missing", "s3:GetObject is missing"]),
        (("nobody", "nothing"), ["InvalidAccessKeyId"]),
        ((READER.access_key, "wrong"), ["SignatureDoesNotMatch"]),
    ],
)
def test_missing_rights_are_named_at_the_start(place: S3Place, keys: tuple[str, str], said: list[str]) -> None:
    async def work(store: S3Handler) -> None:
        with pytest.raises(DeniedError) as caught:
            await store.check()
        for words in said:
            assert words in str(caught.value)

    use(place.open(access_key_id=keys[0], secret_access_key=keys[1]), work)


def test_a_bucket_that_is_not_there_is_named(place: S3Place) -> None:
    async def work(store: S3Handler) -> None:
        with pytest.raises(MemqError, match="bucket 'nowhere' at http"):
            await store.check()

    use(place.open(bucket="nowhere", access_key_id=READER.access_key, secret_access_key=READER.secret_key), work)


def test_a_broker_and_its_clients_on_a_bucket(
    place: S3Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = place.open("cluster")
    asyncio.run(_produce_and_consume(store, monkeypatch))
    monkeypatch.setenv("MEMQ_S3_ACCESS_KEY_ID", READER.access_key)
    monkeypatch.setenv("MEMQ_S3_SECRET_ACCESS_KEY", READER.secret_key)
    assert run(["verify", "--json", store.url]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["records"], found["damaged"]) == (1_000, 0)
    assert run(["inspect", "--json", store.url]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert sum(line["records"] for line in lines) == 1_000
    bucket, _, query = store.url.partition("?")
    assert run(["inspect", f"s3://{lines[0]['object'].removeprefix('s3://')}?{query}"]) == 0
    assert "topic clicks" in capsys.readouterr().out
    assert run(["inspect", f"{bucket}/absent?{query}"]) == 3


async def _produce_and_consume(store: S3Handler, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    settings = BrokerSettings(port=0, audit=False)  # reports are records, too: here those of the bucket are counted
    broker = Broker(settings, runtime, {"main": store}, MemoryQueue(runtime.clock), MemoryCoordinator(MemoryCluster()))
    monkeypatch.setenv("MEMQ_S3_TRUSTED_ENDPOINTS", store.bucket.settings.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", READER.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", READER.secret_key)
    await broker.start()
    try:
        async with asyncio.timeout(HANG_S):
            async with memq.aio.Producer(broker.address) as producer:
                for number in range(1_000):
                    await producer.send("clicks", f"{number}")
                await producer.flush()
            async with memq.aio.Consumer(broker.address, ["clicks"], end="end", read="direct") as consumer:
                values = [int(value or b"") async for batch in consumer for value in batch.values()]
            assert sorted(values) == list(range(1_000))
            await broker.check()
            await broker.drain()
    finally:
        await broker.close()
        await store.close()
    registry = CollectorRegistry()
    registry.register(StoreCollector({"main": store}))
    page = generate_latest(registry).decode()
    assert f'memq_store_put_requests_total{{store="main"}} {float(store.counters.put_requests)}' in page
    assert 'memq_store_breaker_open{store="main"} 0.0' in page
    assert store.counters.put_requests >= 1
