"""A disk that is full for all but small files: the broker is not ready, and producers get the disk's name."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from memq.broker.broker import Broker
from memq.client.producer.producer import AsyncProducer
from memq.errors import MemqError, StoreError
from memq.format.blocks.header import Buffer
from memq.governor.memory import MemoryCluster, MemoryCoordinator
from memq.notification.memory import MemoryQueue
from memq.settings import BrokerSettings
from memq.storage_handlers import files
from memq.storage_handlers.filesystem import FilesystemHandler
from tests.brokers import log_lines, run
from tests.stepped_time import SteppedLoop, step, stepped_runtime

ROOM_BYTES = 2_000  # enough for the probe of a broker's readiness


async def until_ready(broker: Broker, *, ready: bool) -> MemqError | None:
    """Let time pass until the broker is ready, or is not; return why."""
    while True:
        error: MemqError | None = None
        try:
            await broker.check()
        except MemqError as found:
            error = found
        if (error is None) == ready:
            return error
        step(0.5)


def test_a_broker_whose_objects_do_not_fit_is_not_ready_and_producers_name_its_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_all = files.write_all

    def full(handle: int, buffers: Sequence[Buffer]) -> int:
        if sum(memoryview(buffer).nbytes for buffer in buffers) > ROOM_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_all(handle, buffers)

    async def work() -> None:
        runtime = stepped_runtime()
        for folder in ("objects", "tmp"):
            (tmp_path / folder).mkdir()
        store = FilesystemHandler(tmp_path / "objects", tmp_path / "tmp")
        settings = BrokerSettings(port=0, audit=False)
        coordinator = MemoryCoordinator(MemoryCluster())
        broker = Broker(settings, runtime, {"main": store}, MemoryQueue(runtime.clock), coordinator)
        await broker.start()
        await broker.check()
        async with AsyncProducer(broker.address, runtime=runtime, codec="none", audit=False) as producer:
            monkeypatch.setattr(files, "write_all", full)
            delivery = await producer.send("clicks", b"v" * 2 * ROOM_BYTES)
            error = await until_ready(broker, ready=False)
            assert isinstance(error, StoreError)
            assert str(error).startswith(f"store 'main' at {store.url} fails since 20")
            assert "topic 'clicks' partition 0 batch 0" in str(error)
            assert "no space left on device" in str(error)
            while not (said := [line for line in log_lines(caplog) if line.startswith("client.waits: ")]):
                step(0.5)
                await until_ready(broker, ready=False)
            assert f"client.waits: broker {broker.address} owes acks since 20" in said[0]
            assert f"store 'main' at {store.url} fails since 20" in said[0]
            assert "no space left on device" in said[0]
            monkeypatch.setattr(files, "write_all", write_all)
            assert await until_ready(broker, ready=True) is None
            assert (await delivery).records == 1
        await broker.close()
        await store.close()

    run(work(), SteppedLoop)
