"""Bounds of requests, at and beyond the last allowed value: ids, sequences, ranges, streams, queues."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from awscrt.checksums import crc32c

from memq.broker.api import reader_requests, requests, stream_requests, topic_requests
from memq.broker.broker import Broker
from memq.errors import NotFoundError, UnreachableError
from memq.limits import MIB, PRODUCER_ID_END, READ_BYTES_MAX, SEQUENCE_END
from memq.protocol.frames import AckLevel, Api, Frame, encode_frame
from memq.protocol.group_messages import CommitRequest, HeartbeatRequest
from memq.protocol.link import REQUEST_TIMEOUT_S
from memq.protocol.messages import (
    Close,
    Metadata,
    MetadataRequest,
    Nack,
    Open,
    PartitionRef,
    ReadRequest,
    decode_message,
    encode_message,
)
from memq.runtime.clock import SystemClock
from memq.storage_handlers.memory import MemoryHandler
from memq.topic import Topic
from tests.brokers import PRODUCER, SECRET, BareClient, run, running_broker, until
from tests.partition_owners import failing, pointers


@asynccontextmanager
async def client_of(**settings: Any) -> AsyncIterator[tuple[Broker, BareClient, Topic]]:
    async with running_broker(**settings) as broker:
        client = await BareClient.connect(broker)
        try:
            yield broker, client, await client.topic()
        finally:
            await client.close()


def code_of(frame: Frame) -> str:
    """Return the code of an error, "" for an answer."""
    return decode_message(frame.body, Nack).code if frame.api == Api.ERROR else ""


async def ask(client: BareClient, api: Api, message: msgspec.Struct, stream: int = 0) -> Frame:
    """Send a request; the answer must be to it."""
    client.write(encode_frame(api, stream, 41, encode_message(message)))
    frame = await client.frame()
    assert (frame.argument, frame.stream) == (41, stream)
    return frame


def open_of(topic: Topic, **fields: Any) -> Open:
    given = {"topic": topic.name, "topic_id": topic.id, "partition": 0, "producer": f"{PRODUCER:016x}", "acks": 2}
    given["secret"] = SECRET if given["producer"] == fields.get("producer", given["producer"]) else ""
    return Open(**{**given, "sequence": 0, **fields})


OPENINGS: list[tuple[dict[str, Any], str]] = [
    ({"producer": f"{1:016x}"}, ""),
    ({"producer": f"{PRODUCER_ID_END - 1:016x}"}, ""),
    ({"producer": f"{PRODUCER_ID_END:016x}"}, "invalid-request"),
    ({"producer": f"{0:016x}"}, "invalid-request"),
    ({"producer": "7"}, "invalid-request"),
    ({"producer": "x" * 16}, "invalid-request"),
    ({"acks": 3}, "invalid-request"),
    ({"sequence": SEQUENCE_END - 1}, ""),
    ({"sequence": SEQUENCE_END}, "protocol"),
    ({"sequence": -1}, "invalid-request"),
    ({"producer_epoch": 1, "acks": AckLevel.ONE}, "invalid-request"),
]


def test_a_stream_is_opened_within_the_bounds_of_its_fields() -> None:
    async def work() -> None:
        async with client_of() as (_, client, topic):
            found = [code_of(await ask(client, Api.OPEN, open_of(topic, **fields), 3)) for fields, _ in OPENINGS]
            assert found == [code for _, code in OPENINGS]
            assert code_of(await ask(client, Api.OPEN, open_of(topic), 0)) == "invalid-request"

    run(work())


def test_a_connection_has_so_many_streams_and_may_open_each_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_requests, "STREAMS_PER_CONNECTION_MAX", 2)

    async def work() -> None:
        async with client_of() as (_, client, topic):
            found = [code_of(await ask(client, Api.OPEN, open_of(topic), number)) for number in (1, 2, 2, 3, 1)]
            assert found == ["", "", "", "throttled", ""]

    run(work())


def test_streams_that_are_opened_at_once_keep_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_requests, "STREAMS_PER_CONNECTION_MAX", 2)

    async def work() -> None:
        async with client_of() as (_, client, topic):
            for number in range(1, 5):
                client.write(encode_frame(Api.OPEN, number, 41, encode_message(open_of(topic))))
            found = sorted([code_of(await client.frame()) for _ in range(4)])
            assert found == ["", "", "throttled", "throttled"]

    run(work())


def test_a_producer_s_end_has_its_sequences_merged_and_the_newest_where_there_are_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream_requests, "BURNED_RANGES_MAX", 2)

    async def work() -> None:
        async with client_of() as (broker, client, topic):
            for burned in ([(4, 4)], [(5, 4)], [(-1, 4)], [(0, SEQUENCE_END + 1)]):
                await ask(client, Api.OPEN, open_of(topic), 3)
                assert (
                    code_of(await ask(client, Api.CLOSE, Close(next_sequence=9, burned=burned), 3)) == "invalid-request"
                )
            for next_ in (-1, SEQUENCE_END + 1):
                await ask(client, Api.OPEN, open_of(topic), 3)
                assert code_of(await ask(client, Api.CLOSE, Close(next_sequence=next_), 3)) == "invalid-request"
            assert code_of(await ask(client, Api.CLOSE, Close(next_sequence=9), 3)) == "not-found"
            assert [each for each in await pointers(broker, topic) if each.ended] == []
            await ask(client, Api.OPEN, open_of(topic), 3)
            burned = [(0, 1), (4, 6), (6, 7), (9, 10)]
            assert code_of(await ask(client, Api.CLOSE, Close(next_sequence=SEQUENCE_END, burned=burned), 3)) == ""
            (end,) = (await pointers(broker, topic))[-1].ended
            assert (end.producer, end.next_sequence, end.burned) == (PRODUCER, SEQUENCE_END, ((4, 7), (9, 10)))

    run(work())


READS: list[tuple[str, int, int, str]] = [
    ("main", 0, 1, ""),
    ("main", 3, 3, ""),
    ("main", 0, 0, "too-large"),
    ("main", 0, -1, "too-large"),
    ("main", -1, 1, "too-large"),
    ("main", 0, READ_BYTES_MAX + 1, "too-large"),
    ("main", 0, READ_BYTES_MAX, "corrupt-data"),  # allowed, though the object is shorter
    ("other", 0, 1, "not-found"),
]


def test_a_read_is_within_its_bounds_and_counted() -> None:
    async def work() -> None:
        async with client_of() as (broker, client, _):
            await broker.services.store.put("k/1", [b"object"], crc32c(b"object"))
            for store, offset, length, code in READS:
                frame = await ask(client, Api.READ, ReadRequest(store=store, key="k/1", offset=offset, length=length))
                assert code_of(frame) == code, (store, offset, length)
                if not code:
                    assert bytes(frame.body) == b"object"[offset : offset + length]
            counters = broker.services.counters
            assert (counters.read_requests, counters.read_bytes, counters.read_hot_requests) == (3, 4, 0)

    run(work())


class Hanging(MemoryHandler):
    """A store whose reads hang until its gate is open."""

    def __init__(self) -> None:
        super().__init__(SystemClock())
        self.gate = asyncio.Event()
        self.reading = 0

    async def get_range(self, key: str, offset: int, length: int) -> bytes:
        """See `ObjectReader.get_range`."""
        self.reading += 1
        await self.gate.wait()
        if length > 1:
            raise NotFoundError("it is gone")  # what a bare client can't take
        return bytes(length)


def read_frame(number: int, length: int) -> bytes:
    return encode_frame(
        Api.READ, 0, number, encode_message(ReadRequest(store="main", key="k/1", offset=0, length=length))
    )


def test_a_store_that_hangs_is_named_before_the_client_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reader_requests.READ_S_MAX < REQUEST_TIMEOUT_S
    monkeypatch.setattr(reader_requests, "READ_S_MAX", 0.01)

    async def work() -> None:
        async with client_of() as (broker, client, _):
            store = broker.services.stores["main"] = Hanging()
            client.write(read_frame(41, 1))
            frame = await client.frame()
            nack = decode_message(frame.body, Nack)
            assert (nack.code, nack.text) == (
                "store-failed",
                "object 'k/1' in store 'main' was not read within 0.01 s",
            )
            store.gate.set()
            client.write(read_frame(42, 1))
            assert code_of(await client.frame()) == "", "the connection stays"

    run(work())


def test_reads_are_lent_a_sixteenth_of_the_memory_budget() -> None:
    async def work() -> None:
        async with client_of(memory_bytes_max=32 * MIB) as (broker, client, _):
            store = broker.services.stores["main"] = Hanging()
            client.write(b"".join(read_frame(number, MIB) for number in range(5)))
            other = await BareClient.connect(broker)
            for _ in range(3):
                assert (await other.topic()).name == "clicks"  # all that can begin has begun
            assert store.reading == 2
            store.gate.set()
            assert sorted([(await client.frame()).argument for _ in range(5)]) == list(range(5))
            await other.close()

    run(work())


def test_so_many_requests_of_a_connection_wait_and_each_answer_makes_room() -> None:
    async def work() -> None:
        async with client_of() as (broker, client, _):
            store = broker.services.stores["main"] = Hanging()
            most = requests.REQUESTS_PER_CONNECTION_MAX
            client.write(b"".join(read_frame(number, 1) for number in range(most + 1)))
            refused = await client.frame()
            assert (code_of(refused), refused.argument) == ("throttled", most)
            await until(lambda: store.reading == most)
            other = await BareClient.connect(broker)
            assert (await other.topic()).name == "clicks", "it has its own"
            store.gate.set()
            for _ in range(most):
                assert code_of(await client.frame()) == ""
            assert (await client.topic()).name == "clicks"
            await other.close()

    run(work())


def test_heartbeats_and_commits_have_room_while_other_requests_fill_theirs() -> None:
    beat = HeartbeatRequest(group="g", member="m", generation=1)

    async def work() -> None:
        async with client_of() as (broker, client, topic):
            commit = CommitRequest(group="g", fetch=[PartitionRef(topic="clicks", topic_id=topic.id, partition=0)])
            store = broker.services.stores["main"] = Hanging()
            most = requests.REQUESTS_PER_CONNECTION_MAX
            client.write(b"".join(read_frame(number, 1) for number in range(most)))
            await until(lambda: store.reading == most)
            assert code_of(await ask(client, Api.METADATA, MetadataRequest(topics=["clicks"]))) == "throttled"
            assert code_of(await ask(client, Api.HEARTBEAT, beat)) == "not-found", "no group has members"
            assert code_of(await ask(client, Api.COMMIT, commit)) == ""
            store.gate.set()

    run(work())


def test_bodies_of_waiting_requests_are_bounded_and_freed_with_their_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    message = MetadataRequest(topics=["clicks"])
    size = len(encode_message(message))
    one = read_frame(1, 1)
    body = len(one) - 16

    async def work() -> None:
        async with client_of() as (broker, client, _):
            store = broker.services.stores["main"] = Hanging()
            monkeypatch.setattr(requests, "PENDING_BYTES_MAX", body + size)
            for _ in range(2):
                store.gate.clear()
                client.write(one)
                assert code_of(await ask(client, Api.METADATA, message)) == "", "both have room"
                monkeypatch.setattr(requests, "PENDING_BYTES_MAX", body + size - 1)
                assert code_of(await ask(client, Api.METADATA, message)) == "throttled"
                monkeypatch.setattr(requests, "PENDING_BYTES_MAX", body + size)
                store.gate.set()
                assert (await client.frame()).api == Api.READ
            monkeypatch.setattr(requests, "REQUEST_BYTES_MAX", size)
            assert code_of(await ask(client, Api.METADATA, message)) == ""
            monkeypatch.setattr(requests, "REQUEST_BYTES_MAX", size - 1)
            assert code_of(await ask(client, Api.METADATA, message)) == "too-large"

    run(work())


def test_bodies_of_other_requests_take_no_room_from_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that hangs keeps the blocks of 32 producers of delayed records waiting: no group may end by that."""
    one, beat = read_frame(1, 1), HeartbeatRequest(group="g", member="m", generation=1)

    async def work() -> None:
        async with client_of() as (broker, client, _):
            store = broker.services.stores["main"] = Hanging()
            monkeypatch.setattr(requests, "PENDING_BYTES_MAX", len(one) - 16)
            client.write(one)
            await until(lambda: store.reading == 1)
            assert code_of(await ask(client, Api.METADATA, MetadataRequest(topics=["clicks"]))) == "throttled"
            assert code_of(await ask(client, Api.HEARTBEAT, beat)) == "not-found"
            monkeypatch.setattr(requests, "KEPT_BYTES", 1)
            assert code_of(await ask(client, Api.HEARTBEAT, beat)) == "throttled", "its own room has a bound, too"
            store.gate.set()

    run(work())


def test_metadata_is_asked_of_so_many_topics_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topic_requests, "TOPICS_PER_METADATA_MAX", 2)

    async def work() -> None:
        async with client_of() as (_, client, _topic):
            for names, code in ((["clicks"] * 2, ""), (["clicks"] * 3, "too-large")):
                assert code_of(await ask(client, Api.METADATA, MetadataRequest(topics=names))) == code

    run(work())


def errors_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the events that are errors; others depend on the level that an earlier test has set."""
    return [line.getMessage().partition(":")[0] for line in caplog.records if line.levelno >= logging.ERROR]


def test_an_answer_that_nobody_foresaw_to_fail_ends_its_own_connection_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with client_of() as (broker, client, _):
            other = await BareClient.connect(broker)

            async def broken(key: str, offset: int, length: int) -> bytes:
                raise ValueError("a mistake")

            broker.services.store.get_range = broken  # type: ignore[method-assign]
            client.write(read_frame(1, 1))
            assert await client.end() == b""
            assert (await other.topic()).name == "clicks"
            await other.close()

    run(work())
    assert errors_of(caplog) == ["request-failed"]


def test_a_client_that_leaves_while_it_waits_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with client_of() as (broker, client, _):
            store = broker.services.stores["main"] = Hanging()
            other = await BareClient.connect(broker)
            other.write(read_frame(1, 1))
            await until(lambda: store.reading == 1)
            await other.close()
            assert (await client.topic()).name == "clicks"

    run(work())
    assert errors_of(caplog) == []


def test_metadata_names_the_topics_that_the_coordinator_could_not_be_asked_for() -> None:
    """A client that asks for them by name asks another broker then; a list of all is what this broker has read."""

    async def work() -> None:
        async with client_of() as (broker, client, _):

            async def named(topics: list[str] | None) -> tuple[list[str], list[str]]:
                frame = await ask(client, Api.METADATA, MetadataRequest(topics=topics))
                answer = decode_message(frame.body, Metadata)
                return [found.topic.name for found in answer.topics], answer.unconfirmed

            assert await named(["clicks"]) == (["clicks"], [])
            left = failing(broker.services.coordinator, "current_topic", *[UnreachableError("not now")] * 100)
            assert await named(["clicks"]) == (["clicks"], ["clicks"])
            before = len(left)
            assert (await named(None))[1] == []
            assert len(left) == before, "a list of all asks for none of them"

    run(work())
