"""A real broker on chosen parts: store `discard`, `memory`, `recent` or `files`; commands stall or free `discard`."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import uvloop

from benchmarks.children.commands import answer, commands_async, options, use_cubic
from memq.broker.broker import Broker
from memq.broker.identity.networks import broker_networks
from memq.broker.process import calm_collector
from memq.governor.memory import MemoryCluster, MemoryCoordinator
from memq.limits import MIB
from memq.notification.memory import MemoryQueue
from memq.runtime.clock import SystemClock
from memq.runtime.logs import EventLog
from memq.runtime.network import ProtocolFactory, SocketListener, SocketNetwork
from memq.runtime.runtime import Runtime
from memq.settings import BrokerSettings
from memq.storage_handlers import Buffer, StorageHandler
from memq.storage_handlers.filesystem import FilesystemHandler
from memq.storage_handlers.memory import MemoryHandler

RECENT_BYTES = 128 * MIB


class DiscardHandler(MemoryHandler):
    """Keeps nothing: what is measured is the broker. While `stalled`, no put ends."""

    def __init__(self) -> None:
        super().__init__(SystemClock())
        self.running = asyncio.Event()
        self.running.set()

    async def put(self, key: str, buffers: Sequence[Buffer], checksum: int) -> None:
        await self.running.wait()


class RecentHandler(MemoryHandler):
    """Keeps the last objects, as the peer's mock does its last 5 MiB: with all of them fresh pages cost the most."""

    def __init__(self) -> None:
        super().__init__(SystemClock())
        self._bytes = 0

    async def put(self, key: str, buffers: Sequence[Buffer], checksum: int) -> None:
        await super().put(key, buffers, checksum)
        self._bytes += len(self.objects[key])
        while self._bytes > RECENT_BYTES:
            oldest = next(iter(self.objects))
            self._bytes -= len(self.objects[oldest])
            await self.delete(oldest)


class CubicNetwork(SocketNetwork):
    """TCP whose accepted connections use cubic: they inherit it from the listener."""

    async def listen(self, host: str, port: int, factory: ProtocolFactory) -> SocketListener:
        listener = await super().listen(host, port, factory)
        for listening in listener.sockets:
            use_cubic(listening)
        return listener


def make_store(kind: str, folder: Path) -> StorageHandler:
    if kind == "files":
        for name in ("objects", "tmp"):
            (folder / name).mkdir()
        return FilesystemHandler(folder / "objects", folder / "tmp")
    if kind == "recent":
        return RecentHandler()
    return DiscardHandler() if kind == "discard" else MemoryHandler(SystemClock())


async def main() -> None:
    params = options()
    calm_collector()  # as `memq dev` does
    section = {name: (value, "benchmark") for name, value in (params.get("tls") or {}).items()}
    secure = broker_networks(section, EventLog(SystemClock())).data
    network = CubicNetwork() if params.get("cubic") else secure
    runtime = Runtime(random=random.Random(1), network=network)
    settings = replace(BrokerSettings(port=0, http_port=-1), **params.get("settings", {}))
    with tempfile.TemporaryDirectory(prefix="memq-bench-") as folder:
        store = make_store(params["store"], Path(folder))
        queue = MemoryQueue(runtime.clock)
        broker = Broker(settings, runtime, {"main": store}, queue, MemoryCoordinator(MemoryCluster()))
        await broker.start()
        answer(address=broker.address)
        async for command in commands_async():
            if isinstance(store, DiscardHandler):
                (store.running.clear if command["command"] == "stall" else store.running.set)()
            counters = broker.services.counters
            answer(leased_bytes=broker.services.pool.leased_bytes, received_bytes=counters.received_bytes)
        await broker.close()
        await store.close()


if __name__ == "__main__":
    uvloop.run(main())
