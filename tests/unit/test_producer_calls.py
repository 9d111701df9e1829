"""Records of every kind through both producer classes and every call arrive unchanged."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from memq.client.io_thread import io_thread
from memq.client.producer.delivery import Ack, Delivery
from memq.client.producer.producer import AsyncProducer, Producer
from memq.errors import BufferFullError, MemqError
from memq.topic import slot_of_key
from tests.unit.toy_broker import Server, ToyBroker, run, toy_topic

Row = dict[str, Any]


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def rows(seed: int, partitions: int) -> list[Row]:
    """Records that have each field or not, in runs of the same shape, so that every fast path opens and closes."""
    rng = random.Random(seed)
    found: list[Row] = []
    while len(found) < 200:
        shape = {
            "key": rng.random() < 0.5,
            "timestamp_ms": rng.random() < 0.4,
            "headers": rng.random() < 0.15,
            "tag": rng.random() < 0.15,
            "partition": rng.random() < 0.15,
        }
        for _ in range(rng.randrange(1, 8)):
            number = len(found)
            row: Row = {"value": rng.choice((b"%d", b"%d", b"%d" + bytes(3_000))) % number}
            if rng.random() < 0.05:
                row["value"] = row["value"].decode()
            if shape["key"]:
                row["key"] = b"key %d" % rng.randrange(20)
            if shape["timestamp_ms"]:
                row["timestamp_ms"] = 1_000_000 + number
            if shape["headers"]:
                row["headers"] = (("h", b"%d" % number),)
            if shape["tag"]:
                row["tag"] = "tag"
            if shape["partition"]:
                row["partition"] = rng.randrange(partitions)
            found.append(row)
    return found


def check(sent: list[Row], broker: ToyBroker, partitions: int) -> None:
    """Each record is there once, with all that it had, in the partition of its key or its choice, in order."""
    places = {
        part.partition: range(part.slot_first, part.slot_last + 1)
        for part in toy_topic(partitions=partitions).partitions
    }
    got: dict[bytes, tuple[int, Any]] = {}
    for partition in range(partitions):
        numbers: dict[object, int] = {}
        for reader in broker.readers("clicks", partition):
            for record in reader.records():
                value = record[0] or b""
                assert value not in got
                got[value] = (partition, record)
                number = int(value.rstrip(b"\x00"))
                assert numbers.get(record[1], -1) < number, "records of a key stay in order"
                numbers[record[1]] = number
    assert len(got) == len(sent)
    for row in sent:
        value = row["value"].encode() if isinstance(row["value"], str) else row["value"]
        partition, record = got[value]
        assert record[1] == row.get("key")
        assert tuple(record[2] or ()) == row.get("headers", ())
        assert record[4] == row.get("tag")
        if "timestamp_ms" in row:
            assert record[3] == row["timestamp_ms"]
        if "partition" in row:
            assert partition == row["partition"]
        elif "key" in row:
            assert slot_of_key(row["key"]) in places[partition]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("partitions", [1, 3])
def test_the_blocking_face(server: Server, seed: int, partitions: int) -> None:
    server.broker.topics["clicks"] = toy_topic(partitions=partitions)
    sent = rows(seed, partitions)
    with Producer(server.broker.address, block_bytes=8_192, codec="none", audit=False) as producer:
        for row in sent:
            producer.send("clicks", **row)
    check(sent, server.broker, partitions)


@pytest.mark.parametrize("wrong", [1_000.5, True, "1000"])
def test_a_time_of_another_type_is_refused_and_spoils_no_block(server: Server, wrong: Any) -> None:
    with Producer(server.broker.address, linger_ms=1_000, codec="none", audit=False) as producer:
        for _ in range(3):  # also while records with times go the fast way
            producer.send("clicks", b"v", b"k", timestamp_ms=1_000)
            with pytest.raises(TypeError, match=f"timestamp_ms must be int, not {type(wrong).__name__}"):
                producer.send("clicks", b"v", b"k", timestamp_ms=wrong)
    assert [reader.count for reader in server.broker.readers("clicks", 0)] == [3]


def test_a_subclass_that_extends_send_sends_records_of_every_kind(server: Server) -> None:
    class Counting(Producer):
        calls = 0

        def send(self, *args: Any, **fields: Any) -> Delivery:
            self.calls += 1
            return super().send(*args, **fields)

    server.broker.topics["clicks"] = toy_topic(partitions=3)
    sent = rows(5, 3)
    with Counting(server.broker.address, block_bytes=8_192, codec="none", audit=False) as producer:
        for row in sent:
            producer.send("clicks", **row)
    assert producer.calls == len(sent)
    check(sent, server.broker, 3)


def test_a_wrapper_in_the_place_of_send_sees_each_record(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """As tracing libraries put one there, and `unittest.mock.patch`: also while a producer is open."""
    own, seen = Producer.send, []

    def wrapper(producer: Producer, *args: Any, **fields: Any) -> Delivery:
        seen.append(fields["value"])
        return own(producer, *args, **fields)

    sent = rows(6, 1)
    with Producer(server.broker.address, block_bytes=8_192, codec="none", audit=False) as producer:
        producer.send("clicks", **sent[0])
        monkeypatch.setattr(Producer, "send", wrapper)
        for row in sent[1:]:
            producer.send("clicks", **row)
    assert seen == [row["value"] for row in sent[1:]]
    check(sent, server.broker, 1)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("partitions", [1, 3])
def test_the_asyncio_face(seed: int, partitions: int) -> None:
    sent = rows(seed, partitions)

    async def test(broker: ToyBroker) -> None:
        async with AsyncProducer(broker.address, block_bytes=8_192, codec="none", audit=False) as producer:
            for row in sent:
                await producer.send("clicks", **row)

    check(sent, run(test, ToyBroker(toy_topic(partitions=partitions))), partitions)


def test_a_full_buffer_raises_after_the_seconds_that_were_asked_for_and_at_once_in_a_callback(server: Server) -> None:
    server.broker.acking = False
    small: dict[str, Any] = {"pending_bytes_max": 40_000, "block_bytes": 10_000, "codec": "none", "audit": False}
    raised: list[BaseException] = []
    called = threading.Event()

    def on_ack(outcome: Ack | MemqError) -> None:
        if not called.is_set():
            try:
                for _ in range(100):
                    patient.send("clicks", bytes(1_000))
            except MemqError as error:
                raised.append(error)
            called.set()

    patient = Producer(server.broker.address, on_ack=on_ack, when_full="block", **small)
    patient.send("clicks", b"first")
    server.until(lambda: len(server.broker.blocks) == 1)
    server.call(server.ack_all)
    assert called.wait(20)
    assert [type(error) for error in raised] == [BufferFullError], "it would wait for itself"
    server.broker.acking = True
    server.call(server.ack_all)
    patient.flush(20)
    server.broker.acking = False
    with Producer(server.broker.address, when_full=0.05, **small) as impatient:
        with pytest.raises(BufferFullError, match="of 40000 bytes are pending"):
            impatient.send_many("clicks", [bytes(1_000)] * 100)
        server.broker.acking = True
        server.call(server.ack_all)
        delivery: Delivery = impatient.send("clicks", b"v")
        server.call(server.ack_all)
        assert delivery.result(20).records >= 1
    patient.close(20)


def test_the_io_thread_knows_the_clients_that_are_open(server: Server) -> None:
    thread = io_thread()
    before = thread.clients()
    first, second = (Producer(server.broker.address, audit=False) for _ in range(2))
    assert len(thread.clients()) == len(before) + 2
    first.close()
    assert len(thread.clients()) == len(before) + 1
    second.close()
    second.close()
    assert thread.clients() == before
