"""Keys for S3 go to no endpoint that only a broker names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import memq.aio
from memq.errors import UntrustedStoreError
from memq.storage_handlers.memory import MemoryHandler
from memq.storage_handlers.s3 import check_trust
from tests.brokers import BareClient, block_of, log_lines, run, running_broker, write_frame

pytest.importorskip("boto3")
KEYS = {"access_key_id": "AKIAVICTIM", "secret_access_key": "victimsecret", "session_token": "VICTIMTOKEN"}


@asynccontextmanager
async def collector() -> AsyncIterator[tuple[str, list[bytes]]]:
    """Listen as a false store; yield its endpoint and what it receives."""
    received: list[bytes] = []

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(await reader.read(4096))
        writer.close()

    server = await asyncio.start_server(take, "127.0.0.1", 0)  # noqa: TID251 - a bare server
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", received
    finally:
        server.close()
        await server.wait_closed()


async def read(address: str, **options: Any) -> list[bytes | None]:
    found: list[bytes | None] = []
    async with memq.aio.Consumer(address, "clicks", start="beginning", end="end", audit=False, **options) as consumer:
        async for batch in consumer:
            found += batch.values()
    return found


def test_a_store_that_only_a_broker_names_gets_no_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        async with collector() as (endpoint, received), running_broker() as broker:
            monkeypatch.setattr(MemoryHandler, "url", f"s3://stolen?endpoint={endpoint}&region=us-east-1")
            client = await BareClient.connect(broker)
            topic = await client.topic()
            await client.open(topic)
            client.write(write_frame(block_of(topic, 0, [b"a"])))
            await client.frame()
            await client.close()
            broker.services.recent_batches.clear()  # its memory answers no reader
            assert await read(broker.address, s3=KEYS) == [b"a"], "the broker reads for it"
            assert any("client.store-untrusted" in line for line in log_lines(caplog))
            with pytest.raises(UntrustedStoreError, match="not in your configuration"):
                await read(broker.address, s3=KEYS, read="direct")
            assert not received
            times = {"request_timeout_ms": 1_000, "deadline_ms": 2_000}
            trusted = {**KEYS, **times, "trusted_endpoints": endpoint}
            assert await read(broker.address, s3=trusted) == [b"a"]
            assert received, "the user named the endpoint, so it is asked"

    run(work())


URL = "s3://bucket?endpoint=http://store:9000"


@pytest.mark.parametrize(
    ("section", "own"),
    [
        ({"endpoint": "http://store:9000/"}, []),
        ({"trusted_endpoints": "http://other:1, HTTP://store:9000"}, []),
        ({}, ["s3://mine?endpoint=http://store:9000"]),
        ({}, ["http://store:9000"]),
    ],
)
def test_an_endpoint_is_trusted_when_the_configuration_names_it(section: dict[str, str], own: list[str]) -> None:
    check_trust(URL, {name: (value, "here") for name, value in section.items()}, own)


@pytest.mark.parametrize("own", [[], ["", "s3://bucket", "http://store:9001", "file:/x?endpoint=http://store:9000"]])
def test_no_other_endpoint_is_trusted(own: list[str]) -> None:
    with pytest.raises(UntrustedStoreError, match="http://store:9000"):
        check_trust(URL, {}, own)


def test_a_bucket_of_aws_needs_no_trust() -> None:
    check_trust("s3://bucket?region=eu-west-1", {}, [])
