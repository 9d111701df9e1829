"""Brokers in memory that bare clients ask over a memory network, on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from awscrt.checksums import crc32c

from memq.broker.broker import Broker
from memq.broker.ingest.quotas import ClientLimits
from memq.errors import MemqError, UnreachableError
from memq.limits import MIB
from memq.protocol.admin_messages import AdminAnswer, AdminRequest
from memq.protocol.frames import AckLevel, Api, Frame
from memq.protocol.messages import Metadata, MetadataRequest, Nack, Open, ReadRequest, decode_message
from memq.topic import Topic, TopicSettings, equal_slots
from tests.brokers import PRODUCER, SECRET
from tests.component.cluster_rig import Rig, rig
from tests.memory_network import Client, MemoryNetwork, memory_runtime
from tests.skipping_loop import run_skipping, skip


class Calls:
    """Notes when each call of some methods came; the next ones fail, or take their time, where the test says so."""

    def __init__(self, part: Any, *names: str) -> None:
        self.at_s: dict[str, list[float]] = {name: [] for name in names}
        self.given: dict[str, list[Any]] = {name: [] for name in names}
        self.fails: dict[str, list[MemqError]] = {name: [] for name in names}
        self.takes_s: dict[str, float] = {}
        for name in names:
            setattr(part, name, self._noted(name, getattr(part, name)))

    def _noted(self, name: str, method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call(*arguments: Any, **options: Any) -> Any:
            self.at_s[name].append(asyncio.get_running_loop().time())
            self.given[name].append((*arguments, *options.values()))
            if name in self.takes_s:
                await skip(self.takes_s[name])
            if self.fails[name]:
                raise self.fails[name].pop(0)
            return await method(*arguments, **options)

        return call

    def since(self, name: str, begin_s: float) -> list[int]:
        """Return after how many whole seconds calls came."""
        return [int(at_s - begin_s) for at_s in self.at_s[name] if at_s >= begin_s]


def on_memory_network(work: Callable[[Rig, MemoryNetwork], Awaitable[None]]) -> None:
    """Run a test at a cluster on virtual time."""

    async def inside() -> None:
        runtime, network = memory_runtime()
        async with rig(runtime, timeout_s=3_000) as cluster:
            await work(cluster, network)

    run_skipping(inside())


def topic_named(name: str, number: int, partitions: int = 1) -> Topic:
    return Topic(name=name, id=f"{number:032x}", created_ms=0, partitions=equal_slots(partitions))


def away(count: int) -> list[MemqError]:
    return [UnreachableError("it is away") for _ in range(count)]


MEMORY_BYTES = 4 * MIB


class Served:
    """A broker and what its clients ask."""

    def __init__(self, cluster: Rig, broker: Broker, network: MemoryNetwork) -> None:
        self.cluster = cluster
        self.broker = broker
        self.network = network

    def call(self, client_id: str = "") -> Client:
        return self.network.call(self.broker.address).greet(client_id)

    async def topic(self, name: str = "clicks", partitions: int = 1) -> Topic:
        return await self.broker.partitions.create(name, partitions, TopicSettings(), exist_ok=True)

    async def stored(self, key: str, size: int) -> ReadRequest:
        """Put an object, and return the request that reads it."""
        await self.cluster.store.put(key, [bytes(size)], crc32c(bytes(size)))
        return ReadRequest(store="main", key=key, offset=0, length=size)

    async def answered(self, client: Client, api: Api, ask: msgspec.Struct, *, stream: int = 0) -> Frame:
        """Ask, and return the only answer."""
        client.ask(api, ask, stream=stream, number=41)
        await skip(0.01)
        (frame,) = client.heard()
        assert (frame.argument, frame.stream, frame.flags) == (41, stream, 0)
        return frame

    async def admin(self, client: Client, ask: Any) -> AdminAnswer:
        frame = await self.answered(client, Api.ADMIN, AdminRequest(ask=ask))
        return decode_message(frame.body, AdminAnswer)

    async def metadata(self, client: Client, **ask: Any) -> Metadata:
        return decode_message((await self.answered(client, Api.METADATA, MetadataRequest(**ask))).body, Metadata)

    async def error(self, client: Client, api: Api, ask: msgspec.Struct, *, stream: int = 0) -> Nack:
        frame = await self.answered(client, api, ask, stream=stream)
        assert frame.api == Api.ERROR
        return decode_message(frame.body, Nack)


def served(work: Callable[[Served], Awaitable[None]], limits: ClientLimits | None = None, **settings: Any) -> None:
    """Run a test at a broker."""

    async def inside() -> None:
        runtime, network = memory_runtime()
        async with rig(runtime, timeout_s=3_000) as cluster:
            given = {"audit": False, "memory_bytes_max": MEMORY_BYTES, **settings}
            broker = await cluster.start("one", client_limits=limits, **given)
            await skip(0.5)
            await work(Served(cluster, broker, network))

    run_skipping(inside())


def open_of(topic: Topic, **fields: Any) -> Open:
    identity = {"producer": f"{PRODUCER:016x}", "secret": SECRET if "producer" not in fields else ""}
    given = {"topic": topic.name, "topic_id": topic.id, "partition": 0, "acks": AckLevel.ALL, "sequence": 0}
    return Open(**{**given, **identity, **fields})
