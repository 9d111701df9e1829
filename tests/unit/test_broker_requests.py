"""Requests that are well-formed and absurd: any number and any text in any field; the broker answers and lives on."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memq.broker.broker import Broker
from memq.governor.data_folder import DataFolder
from memq.governor.standalone import StandaloneCoordinator
from memq.network import Runtime
from memq.notification.sqlite import SqliteQueue
from memq.protocol.frames import Api, encode_frame
from memq.settings import BrokerSettings
from memq.storage_handlers.filesystem import FilesystemHandler
from tests.brokers import BareClient

NUMBERS = (0, 1, -1, 7, 1 << 31, -(1 << 31), (1 << 53) - 1, (1 << 63) - 1, 1 << 63, -(1 << 63) - 1, (1 << 64) + 5, 10**30)
TEXTS = ("", "clicks", "g", "m", "..", ".", "/", "a/b", "\x00", "a\x00b", "сlicks", "x" * 10_000, "\ufeff", "_memq", "%s%n", "'; --")
numbers = st.sampled_from(NUMBERS) | st.integers(-(1 << 70), 1 << 70)
texts = st.sampled_from(TEXTS) | st.text(max_size=20)


@asynccontextmanager
async def disk_broker(folder: Path) -> AsyncIterator[Broker]:
    """Run a broker on the parts of `memq dev`."""
    runtime = Runtime()
    data = DataFolder.open(folder, runtime.random)
    queue, store = SqliteQueue(data.queue, runtime.clock), FilesystemHandler(data.objects, data.tmp)
    coordinator = StandaloneCoordinator(data.topics, data.cluster)
    chosen = dataclasses.replace(BrokerSettings(port=0), cluster=data.cluster)
    broker = Broker(chosen, runtime, {"main": store}, queue, coordinator)
    await broker.start()
    try:
        yield broker
    finally:
        await broker.close()
        await queue.close()
        await store.close()
        await coordinator.close()
        data.close()


def bodies(topic_id: str) -> dict[Api, st.SearchStrategy[dict[str, Any]]]:
    """Bodies of all requests: the shape is right, every value is drawn."""
    names, ids = st.just("clicks") | texts, st.just(topic_id) | texts
    ref = st.fixed_dictionaries({"topic": names, "topic_id": ids, "partition": st.just(0) | numbers})
    refs = st.lists(ref, max_size=3)
    position = st.fixed_dictionaries(
        {"partition": ref, "pointer_offset": numbers, "record_index": numbers, "records": numbers, "bytes": numbers}
    )
    member = {"group": texts, "member": texts, "generation": st.just(-1) | numbers}
    choices = st.dictionaries(texts | st.just("retention_ms"), numbers | texts | st.booleans(), max_size=2)
    tell = st.fixed_dictionaries
    polls = st.one_of(
        tell(
            {
                "op": st.just("entries"),
                "partitions": st.lists(tell({"partition": ref, "offset": numbers}), max_size=3),
                "wait_ms": st.sampled_from((0, -1, 1)),
                "bytes_max": numbers,
            }
        ),
        tell({"op": st.just("time"), "partition": ref, "time_ms": numbers}),
        tell({"op": st.just("spans"), "partitions": refs}),
    )
    asks = st.one_of(
        tell({"op": st.just("create-topic"), "name": texts, "partitions": st.just(3) | numbers, "settings": choices}),
        tell({"op": st.just("alter-topic"), "name": names, "settings": choices}),
        tell({"op": st.just("list-groups")}),
        *(tell({"op": st.just(op), "group": texts}) for op in ("describe-group", "delete-group")),
    )
    return {
        Api.OPEN: tell(
            {
                "topic": names,
                "topic_id": ids,
                "partition": st.just(0) | numbers,
                "producer": st.just("00000000000000ff") | texts,
                "acks": st.just(2) | numbers,
                "sequence": numbers,
            }
        ),
        Api.CLOSE: tell(
            {"next_sequence": st.just(1) | numbers, "burned": st.lists(st.tuples(numbers, numbers), max_size=3)}
        ),
        Api.METADATA: tell({"topics": st.none() | st.lists(texts, max_size=3), "create": st.booleans()}),
        Api.READ: tell({"store": st.just("main") | texts, "key": texts, "offset": numbers, "length": st.just(9) | numbers}),
        Api.POLL: tell({"ask": polls}),
        Api.COMMIT: tell({**member, "positions": st.lists(position, max_size=3), "fetch": refs}),
        Api.JOIN: tell(
            {"group": texts, "member": texts, "partitions": refs, "session_timeout_ms": numbers, "leave": st.booleans()}
        ),
        Api.HEARTBEAT: tell({**member, "released": refs}),
        Api.ADMIN: tell({"ask": asks}),
        Api.FORWARD: tell({}),
    }


@pytest.fixture
def loop() -> Any:
    with asyncio.Runner() as runner:
        yield runner


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_absurd_requests_are_answered_and_nothing_dies(tmp_path: Path, data: st.DataObject) -> None:
    async def work() -> None:
        async with disk_broker(tmp_path / "data") as broker:
            client = await BareClient.connect(broker)
            topic = await client.topic()
            shapes = bodies(topic.id)
            for _ in range(10):
                api = data.draw(st.sampled_from(sorted(shapes)))
                body = data.draw(shapes[Api(api)])
                client.write(encode_frame(api, 1, 5, msgspec.json.encode(body) if body else b"{}"))
                frame = await client.frame()
                assert frame.api in (api, Api.ERROR)
                assert broker.failure is None
            await client.close()

    asyncio.run(work())
