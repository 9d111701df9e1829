"""A broker or a store that hangs with its connections open: clients name it after 3 s, and in their last error."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from memq.client.metadata import ClusterMetadata
from memq.client.producer.producer import AsyncProducer
from memq.client.stores import OpenStores
from memq.errors import BufferFullError, MemqError, TimedOutError, UnreachableError
from memq.protocol.frames import Api, Frame
from memq.protocol.messages import Metadata, MetadataRequest, StoreMetadata
from memq.runtime.logs import EventLog
from memq.runtime.waits import ANSWER_S, Waits
from memq.storage_handlers.filesystem import FilesystemHandler
from tests.brokers import log_lines
from tests.skipping_loop import run_skipping, skip, skipping_runtime
from tests.stepped_time import step, stepped_runtime
from tests.unit.toy_broker import ToyBroker, ToyConnection, address_of, pool_of, run, turns

DISK = "store 'main' at file:///data fails since 2026-01-01T00:00:00Z: no space left on device"


def producer_on(broker: ToyBroker, **settings: Any) -> AsyncProducer:
    return AsyncProducer(broker.address, runtime=stepped_runtime(), audit=False, **settings)


async def pass_time(seconds: float) -> None:
    for _ in range(round(2 * seconds)):
        step(0.5)
        await turns()


async def fill(producer: AsyncProducer) -> None:
    while True:
        await producer.send("clicks", b"w" * 900)


def waits_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in log_lines(caplog, logging.INFO) if line.startswith(("client.waits", "client.answered"))]


def test_a_request_that_a_silent_broker_owes_is_logged_and_its_error_says_since_when(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(broker: ToyBroker) -> None:
        pool = pool_of(broker)
        session = await pool.session(address_of(broker))
        broker.script = lambda connection, frame: True
        asked = asyncio.create_task(session.link.request(Api.METADATA, MetadataRequest(), Metadata, timeout_s=9.0))
        await turns()
        await pass_time(3)
        assert waits_in(caplog) == []
        await pass_time(1)
        (line,) = waits_in(caplog)
        assert line.startswith(f"client.waits: broker {broker.address} has not answered since 20")
        assert line.endswith("Z (METADATA)")
        await pass_time(6)
        with pytest.raises(TimedOutError, match=rf"{broker.address} did not answer METADATA in 9 s, silent since 20"):
            await asked
        assert pool.waits.describe().startswith(f"broker {broker.address} fails since 20")
        broker.script = lambda connection, frame: False
        await session.link.request(Api.METADATA, MetadataRequest(), Metadata)
        assert waits_in(caplog)[1:] == [f"client.answered: broker {broker.address} answers again"]
        await pool.close()

    with caplog.at_level(logging.INFO, "memq"):
        run(test)


def test_a_connection_that_is_not_answered_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def test(broker: ToyBroker) -> None:
        broker.script = lambda connection, frame: True
        pool = pool_of(broker)
        asked = asyncio.create_task(pool.session(address_of(broker)))
        await broker.until(lambda: bool(broker.connections))
        await pass_time(4)
        assert [line.partition(" since ")[0] for line in waits_in(caplog)] == [
            f"client.waits: broker {broker.address} has not answered"
        ]
        await pass_time(7)
        with pytest.raises(TimedOutError):
            await asked
        await pool.close()

    run(test)


def test_a_producer_says_who_owes_acks_and_its_last_error_says_since_when(caplog: pytest.LogCaptureFixture) -> None:
    async def test(broker: ToyBroker) -> None:
        async with producer_on(broker, delivery_timeout_ms=60_000) as producer:
            await (await producer.send("clicks", b"v"))
            broker.script = lambda connection, frame: True
            delivery = await producer.send("clicks", b"w")
            await turns()
            await pass_time(5)
            (line,) = waits_in(caplog)
            assert line.startswith(f"client.waits: broker {broker.address} has not answered since 20")
            assert line.endswith(" (acks)")
            with pytest.raises(TimedOutError, match=rf"1 record is still pending .*: broker {broker.address} has not"):
                await asyncio.gather(producer.flush(0.5), pass_time(1))
            await pass_time(60)
            with pytest.raises(MemqError, match=rf"delivery timeout: .*broker {broker.address} fails since 20"):
                await delivery
            assert len(waits_in(caplog)) <= 2, "one line a minute"

    with caplog.at_level(logging.INFO, "memq"):
        run(test)


def test_a_producer_says_what_its_broker_waits_for(caplog: pytest.LogCaptureFixture) -> None:
    async def test(broker: ToyBroker) -> None:
        def serve(connection: ToyConnection, frame: Frame) -> bool:
            if frame.api == Api.METADATA:
                connection.answer(frame, Metadata(cluster="toy", brokers=[broker.address], waits=DISK))
                return True
            return False

        settings: dict[str, Any] = {"block_bytes": 1024, "pending_bytes_max": 16_384, "when_full": "raise"}
        producer = producer_on(broker, delivery_timeout_ms=60_000, **settings)
        await (await producer.send("clicks", b"v"))
        broker.script, broker.acking = serve, False
        delivery = await producer.send("clicks", b"w" * 900)
        await turns()
        await pass_time(30)
        (line,) = waits_in(caplog)
        assert line.startswith(f"client.waits: broker {broker.address} owes acks since 20")
        assert line.endswith(DISK)
        with pytest.raises(TimedOutError, match=r"1 record is still pending .*no space left on device"):
            await asyncio.gather(producer.flush(0.5), pass_time(1))
        with pytest.raises(BufferFullError, match=r"bytes are pending: .*file:///data.*no space left on device"):
            await fill(producer)
        await pass_time(40)
        with pytest.raises(MemqError, match=r"file:///data fails since .*no space left on device"):
            await delivery
        assert broker.connections, "it answers: so it lives"
        with pytest.raises(MemqError, match="no space left on device"):
            await asyncio.gather(producer.close(), pass_time(30))  # until the last block's time is over

    with caplog.at_level(logging.INFO, "memq"):
        run(test)


def test_a_broker_that_answers_when_it_is_asked_for_late_acks_is_not_called_silent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A producer's lines alternated: the broker has not answered, and what the broker waits for."""

    async def work() -> None:
        clock = skipping_runtime().clock
        waits = Waits(clock, EventLog(clock))
        with waits.on("broker h:1", "acks", clock.monotonic() - 10):
            await skip(ANSWER_S / 2)
        assert waits_in(caplog) == []
        with waits.on("broker h:1", "acks", clock.monotonic() - 10):
            await skip(ANSWER_S + 0.1)
        assert [line.split(" since")[0] for line in waits_in(caplog)[:1]] == [
            "client.waits: broker h:1 has not answered"
        ]

    with caplog.at_level(logging.INFO, "memq"):
        run_skipping(work())


def test_a_store_that_stalls_is_logged(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    async def test(broker: ToyBroker) -> None:
        pool, gate = pool_of(broker), asyncio.Event()
        metadata = ClusterMetadata(stepped_runtime(), pool)
        metadata.stores = (StoreMetadata(name="main", url=tmp_path.as_uri()),)
        stores = OpenStores(metadata, stepped_runtime())

        async def stall(handler: FilesystemHandler, key: str, offset: int, length: int) -> bytes:
            await gate.wait()
            return b"bytes"

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FilesystemHandler, "get_range", stall)
            reader = stores.reader("main", pool.waits)
            assert reader is not None
            read = asyncio.create_task(reader.get_range("a/key", 0, 5))
            await turns()
            await pass_time(4)
            (line,) = waits_in(caplog)
            assert line.startswith(f"client.waits: store 'main' at {tmp_path.as_uri()} has not answered since 20")
            assert line.endswith("Z (object 'a/key')")
            gate.set()
            assert await read == b"bytes"
        assert waits_in(caplog)[1:] == [f"client.answered: store 'main' at {tmp_path.as_uri()} answers again"]
        assert stores.reader("other", pool.waits) is None
        await stores.close()
        await pool.close()

    with caplog.at_level(logging.INFO, "memq"):
        run(test)


def test_a_broker_that_is_refused_has_its_own_line(caplog: pytest.LogCaptureFixture) -> None:
    async def test(broker: ToyBroker) -> None:
        pool = pool_of(broker)
        for _ in range(8):
            with pytest.raises(UnreachableError):
                await pool.session(("127.0.0.1", 1))
            step(1)
        assert waits_in(caplog) == []
        assert "can't reach 127.0.0.1:1: Connection refused" in pool.waits.describe()
        await pool.close()

    run(test)
