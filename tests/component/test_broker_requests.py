"""Well-formed but absurd requests: any number and text in any field; the broker answers and stays alive."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memq.broker.broker import Broker
from memq.broker.data_folder import DataFolder
from memq.format.sealed_json import seal
from memq.governor.standalone import StandaloneCoordinator
from memq.notification.sqlite.queue import SqliteQueue
from memq.protocol.frames import Api, Frame, encode_frame
from memq.protocol.messages import Nack, decode_message
from memq.runtime.runtime import Runtime
from memq.settings import BrokerSettings
from memq.storage_handlers.filesystem import FilesystemHandler
from tests.brokers import BareClient

NUMBERS = (
    0,
    1,
    -1,
    7,
    1 << 31,
    -(1 << 31),
    (1 << 53) - 1,
    (1 << 63) - 1,
    1 << 63,
    -(1 << 63) - 1,
    (1 << 64) + 5,
    10**30,
)
TEXTS = (
    "",
    "clicks",
    "g",
    "m",
    "..",
    ".",
    "/",
    "a/b",
    "\x00",
    "a\x00b",
    "сlicks",
    "x" * 10_000,
    "\ufeff",
    "_memq",
    "%s%n",
    "'; --",
)
numbers = st.sampled_from(NUMBERS) | st.integers(-(1 << 70), 1 << 70)
texts = st.sampled_from(TEXTS) | st.text(max_size=20)


TOPIC_ID = "the topic's id"


@asynccontextmanager
async def disk_broker(folder: Path) -> AsyncIterator[Broker]:
    """Run a broker on the parts of `memq dev`."""
    runtime = Runtime()
    data = DataFolder.open(folder, runtime.random)
    queue, store = SqliteQueue(data.queue, runtime.clock), FilesystemHandler(data.objects, data.tmp)
    coordinator = StandaloneCoordinator(data.topics, data.cluster, runtime.clock)
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


def bodies() -> dict[Api, st.SearchStrategy[dict[str, Any]]]:
    """Bodies of all requests: the shape is right, every value is drawn."""
    names, ids = st.just("clicks") | texts, st.just(TOPIC_ID) | texts
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
        Api.READ: tell(
            {"store": st.just("main") | texts, "key": texts, "offset": numbers, "length": st.just(9) | numbers}
        ),
        Api.POLL: tell({"ask": polls}),
        Api.COMMIT: tell({**member, "positions": st.lists(position, max_size=3), "fetch": refs}),
        Api.JOIN: tell(
            {"group": texts, "member": texts, "partitions": refs, "session_timeout_ms": numbers, "leave": st.booleans()}
        ),
        Api.HEARTBEAT: tell({**member, "released": refs}),
        Api.ADMIN: tell({"ask": asks}),
        Api.FORWARD: tell({}),
    }


BODIES = bodies()
requests = st.lists(
    st.one_of(*(st.tuples(st.just(api), body) for api, body in BODIES.items())), min_size=1, max_size=12
)


class Asker:
    """One broker for all examples, and a client that says what it is asked to."""

    def __init__(self, runner: asyncio.Runner, folder: Path) -> None:
        self._runner = runner
        self._running = disk_broker(folder)
        self.broker = runner.run(self._running.__aenter__())
        self._client = runner.run(BareClient.connect(self.broker))
        self.topic = runner.run(self._client.topic())

    def ask(self, asked: list[tuple[Api, dict[str, Any]]]) -> list[Frame]:
        """Send requests and return the answers."""
        return self._runner.run(self._ask(asked))

    async def _ask(self, asked: list[tuple[Api, dict[str, Any]]]) -> list[Frame]:
        for api, body in asked:
            text = json.dumps(body).replace(TOPIC_ID, self.topic.id)
            self._client.write(encode_frame(api, 1, 5, seal(text.encode()) if body else text.encode()))
        return [await self._client.frame() for _ in asked]

    def close(self) -> None:
        self._runner.run(self._client.close())
        self._runner.run(self._running.__aexit__(None, None, None))


@pytest.fixture
def asker(tmp_path: Path) -> Iterator[Asker]:
    with asyncio.Runner() as runner:
        asker = Asker(runner, tmp_path / "data")
        try:
            yield asker
        finally:
            asker.close()


@settings(max_examples=250, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(asked=requests)
def test_absurd_requests_are_answered_and_nothing_dies(asker: Asker, asked: list[tuple[Api, dict[str, Any]]]) -> None:
    answers = asker.ask(asked)
    apis = [api for api, _ in asked]
    assert all(answer.api in (*apis, Api.ERROR) for answer in answers)
    assert asker.broker.failure is None
    assert len(asker.ask([(Api.METADATA, {"topics": ["clicks"]})])) == 1


@pytest.mark.parametrize("number", [1 << 63, -(1 << 63) - 1, 10**30])
def test_a_number_that_nothing_can_hold_is_an_error_of_the_request(asker: Asker, number: int) -> None:
    """One such number in a POLL by time once ended the broker."""
    partition = {"topic": "clicks", "topic_id": TOPIC_ID, "partition": 0}
    answer = asker.ask([(Api.POLL, {"ask": {"op": "time", "partition": partition, "time_ms": number}})])[0]
    assert answer.api == Api.ERROR
    assert decode_message(answer.body, Nack).code == "protocol"
