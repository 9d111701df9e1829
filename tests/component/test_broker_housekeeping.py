"""Work of a broker in each second, on virtual time: overdue connections, those that read slowly, spare memory."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from memq.broker import broker as broker_module
from memq.broker.broker import UNSENT_SHARE, Broker
from memq.broker.ingest.connection import Connection
from memq.broker.partition.topic_processor import TopicProcessor
from memq.limits import KIB
from memq.protocol.frames import PREFIX, Api
from memq.protocol.messages import Draining, decode_message
from memq.topic import TopicSettings
from tests.component.cluster_rig import rig
from tests.memory_network import FULL_BYTES, Client, MemoryNetwork, memory_runtime
from tests.skipping_loop import run_skipping, skip

TIMEOUT_S = 30  # of a HELLO, a frame, and an answer that is not read
HALF = PREFIX.pack(1_000, Api.METADATA, 0, 0, 1) + b"half"


class Port:
    """A broker that has been at work for a while, and its port."""

    def __init__(self, broker: Broker, network: MemoryNetwork) -> None:
        self.broker = broker
        self.network = network

    def call(self) -> Client:
        return self.network.call(self.broker.address)

    def deaf(self, size: int) -> Client:
        """Return a client for which so many bytes wait, which it does not read."""
        client = self.call().greet()
        client.wire.deaf = True
        connection = client.wire.protocol
        assert isinstance(connection, Connection)
        connection.outbox.write(bytes(size))
        assert len(client.wire.waiting) == size
        return client


def at_work(work: Callable[[Port], Awaitable[None]], **settings: Any) -> None:
    """Run a test at a broker that began 20.5 s ago: times since its start and times since an event differ."""

    async def inside() -> None:
        runtime, network = memory_runtime()
        timeouts: dict[str, Any] = {"hello_timeout_ms": TIMEOUT_S * 1_000, "frame_timeout_ms": TIMEOUT_S * 1_000}
        async with rig(runtime, timeout_s=3_000) as cluster:
            broker = await cluster.start("one", audit=False, **timeouts, **settings)
            await skip(20.5)  # between two turns
            await work(Port(broker, network))

    run_skipping(inside())


def test_connection_without_hello_is_closed_after_its_time() -> None:
    async def work(port: Port) -> None:
        silent, known = port.call(), port.call().greet()
        await skip(TIMEOUT_S - 1)
        late = port.call()
        assert not silent.is_gone()
        await skip(2)
        assert silent.error().text == "no HELLO within 30000 ms"
        assert silent.is_gone()
        assert not known.is_gone()
        assert not late.is_gone()
        await skip(10 * TIMEOUT_S)
        assert late.is_gone()
        assert not known.is_gone()

    at_work(work)


def test_a_frame_has_its_time_to_become_whole() -> None:
    async def work(port: Port) -> None:
        half, idle = port.call().greet(), port.call().greet()
        await skip(5)
        half.say(HALF)
        await skip(TIMEOUT_S - 1)
        assert not half.is_gone()
        await skip(2)
        assert half.error().text == "a frame was not complete within 30000 ms"
        assert half.is_gone()
        await skip(10 * TIMEOUT_S)
        assert not idle.is_gone()

    at_work(work)


def test_a_frame_that_the_broker_does_not_read_on_has_its_time_when_it_does() -> None:
    async def work(port: Port) -> None:
        half = port.call().greet()
        half.say(HALF)
        connection = half.wire.protocol
        assert isinstance(connection, Connection)
        connection.pause()
        await skip(10 * TIMEOUT_S)
        assert not half.is_gone()
        connection.resume()
        await skip(TIMEOUT_S - 1)
        assert not half.is_gone()
        await skip(2)
        assert half.is_gone()

    at_work(work)


def test_client_that_reads_no_answers_is_closed_and_a_slow_one_is_not() -> None:
    async def work(port: Port) -> None:
        client = port.deaf(2 * FULL_BYTES)
        await skip(TIMEOUT_S - 1)
        client.wire.take(1)
        await skip(TIMEOUT_S - 1)
        assert not client.is_gone()
        await skip(3)
        assert client.is_aborted()
        assert list(port.broker.intake.readers) == []

    at_work(work)


def test_refused_client_is_closed_even_if_it_does_not_read_the_reason() -> None:
    async def work(port: Port) -> None:
        client = port.call()
        client.wire.deaf = True
        client.say(b"GET / HTTP/1.1\r\n\r\n")
        await skip(TIMEOUT_S - 1)
        assert client.wire.waiting
        assert not client.is_aborted()
        await skip(2)
        assert client.is_aborted()

    at_work(work)


def test_of_those_who_read_slowly_the_slowest_are_closed_while_more_waits_than_an_eighth_of_the_memory() -> None:
    size = 2 * FULL_BYTES

    async def work(port: Port) -> None:
        first, reader = port.deaf(size), port.call().greet()
        second = port.deaf(size)
        await skip(2)
        assert not first.is_aborted()
        assert not second.is_aborted(), "an eighth is allowed"
        first.wire.take(1)
        await skip(2)
        third = port.deaf(size + 1)
        await skip(2)
        assert [each.is_aborted() for each in (first, second, third, reader)] == [False, True, False, False]
        assert len(first.wire.waiting) + len(third.wire.waiting) == 2 * size, "which is an eighth again"

    at_work(work, memory_bytes_max=UNSENT_SHARE * 2 * size)


def test_unsent_bytes_of_reading_clients_are_not_counted() -> None:
    async def work(port: Port) -> None:
        slow = port.deaf(2 * FULL_BYTES)
        busy = port.deaf(FULL_BYTES)  # not more than a socket takes
        await skip(2)
        assert not slow.is_aborted()
        assert not busy.is_aborted()

    at_work(work, memory_bytes_max=UNSENT_SHARE * 2 * FULL_BYTES)


def test_as_many_clients_as_the_bound_says_are_let_in_and_the_next_one_when_one_has_left() -> None:
    async def work(port: Port) -> None:
        first, second = port.call().greet(), port.call().greet()
        refused = port.call()
        assert refused.error().code == "throttled"
        assert refused.is_gone()
        await skip(1)
        first.wire.abort()
        await skip(1)
        third = port.call().greet()
        assert not second.is_gone()
        assert not third.is_gone()

    at_work(work, connections_max=2)


def test_spare_memory_goes_back_to_the_system_but_for_four_slabs() -> None:
    async def work(port: Port) -> None:
        pool = port.broker.services.pool
        for slab in [pool.lease(1) for _ in range(12)]:
            assert slab is not None
            pool.release(slab)
        assert pool.held_bytes - pool.leased_bytes == 12 * pool.slab_bytes
        await skip(60)
        assert pool.held_bytes - pool.leased_bytes == 4 * pool.slab_bytes

    at_work(work)


@pytest.mark.parametrize(("partitions", "turns"), [(7, [3, 3, 1]), (6, [3, 3])])
def test_a_broker_checks_some_partitions_each_second_and_each_of_them_once_in_a_round(
    partitions: int, turns: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_module, "KEPT_PARTITIONS_MAX", 3)
    looked: list[int] = []
    monkeypatch.setattr(TopicProcessor, "forget_silent", lambda self, now_ms: looked.append(self.partition))

    async def inside() -> None:
        runtime, _ = memory_runtime()
        async with rig(runtime, timeout_s=3_000) as cluster:
            broker = await cluster.start("one", audit=False)
            topic = await broker.partitions.create("clicks", partitions, TopicSettings(), exist_ok=False)
            for number in range(partitions):
                await broker.partitions.processor(topic, number).ready()
            await skip(0.5)  # between two turns
            for _ in range(3):
                at = 0
                for count in turns:
                    looked.clear()
                    await skip(1)
                    assert looked == list(range(at, at + count))
                    at += count

    run_skipping(inside())


def test_a_drain_closes_the_port_and_says_so_to_all_that_are_ready() -> None:
    async def work(port: Port) -> None:
        ready, early = port.call().greet(), port.call()
        await port.broker.drain()
        (frame,) = ready.heard()
        assert (frame.api, frame.stream, frame.argument) == (Api.DRAINING, 0, 0)
        assert decode_message(frame.body, Draining).retry_after_ms == 500
        assert early.heard() == []
        assert port.network.listeners == {}
        assert not ready.is_gone(), "connections stay until the close"
        await port.broker.close()
        assert ready.is_gone()
        assert early.is_gone()

    at_work(work)


def test_a_close_ends_the_port_and_its_connections() -> None:
    async def work(port: Port) -> None:
        client = port.call().greet()
        await port.broker.close()
        assert port.network.listeners == {}
        assert client.is_gone()

    at_work(work, memory_bytes_max=1_024 * KIB)
