"""A proxy before a real Kafka that cuts, delays and falsifies requests of one kind, each at a phase of its way."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from localstack.ports import HOST, free_ports
from localstack.servers import Server
from tests.integration.kafka import running_kafka

HANG_S = 120.0
LATE_S = 2.5  # longer than a request of the tests may take


class ApiKey(Enum):
    """The kinds of requests that memq makes of Kafka, by Kafka's numbers."""

    PRODUCE = 0
    FETCH = 1
    LIST_OFFSETS = 2
    METADATA = 3
    OFFSET_COMMIT = 8
    OFFSET_FETCH = 9
    FIND_COORDINATOR = 10
    JOIN_GROUP = 11
    HEARTBEAT = 12
    LEAVE_GROUP = 13
    SYNC_GROUP = 14
    DESCRIBE_GROUPS = 15
    LIST_GROUPS = 16
    API_VERSIONS = 18
    CREATE_TOPICS = 19
    DELETE_TOPICS = 20
    DELETE_RECORDS = 21
    INIT_PRODUCER_ID = 22
    DESCRIBE_CONFIGS = 32
    CREATE_PARTITIONS = 37
    DELETE_GROUPS = 42
    INCREMENTAL_ALTER_CONFIGS = 44


class Phase(Enum):
    """Where a request goes wrong."""

    BEFORE = "the connection ends before the request reaches Kafka"
    AFTER = "the connection ends when Kafka has done it, before its answer"
    MIDDLE = "the connection ends in the middle of the answer"
    LATE = "the answer comes after the request has timed out"
    SHORT = "the answer is well framed, and its second half is missing"


@dataclass
class Fault:
    """What befalls the next `times` requests of a kind."""

    key: ApiKey
    phase: Phase
    times: int


class KafkaProxy:
    """Hands on what clients say to a listener of Kafka, request by request, and what it answers."""

    def __init__(self, target: int) -> None:
        self.port = 0
        self.met: Counter[int] = Counter()  # faults by the number of their kind
        self.seen: Counter[int] = Counter()  # requests by the number of their kind
        self._target = target
        self._fault: Fault | None = None
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._ready = threading.Event()
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._let_in: list[asyncio.StreamWriter] = []
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=[self._serve()], name="kafka-proxy")
        self._thread.start()
        assert self._ready.wait(HANG_S)

    @property
    def address(self) -> str:
        """Where clients come in."""
        return f"{HOST}:{self.port}"

    def arm(self, fault: Fault | None) -> None:
        """Have this befall requests from now on, in place of what was to befall them before."""
        self.met.clear()
        self.seen.clear()
        self._fault = fault

    def close(self) -> None:
        """End it and its connections."""
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()
        self._loop.close()

    # ---- in the thread ---------------------------------------------------------------------------

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._accept, HOST, 0)  # noqa: TID251 - not memq's own traffic
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._ended.wait()
        server.close()
        await asyncio.sleep(0)  # who was let in before it closed has a task then
        while others := [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]:
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
        for writer in self._let_in:  # a task that is cancelled before its first step ends nothing
            await _end(writer)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._let_in.append(writer)
        task = self._loop.create_task(self._connected(reader, writer))
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            answers, requests = await asyncio.open_connection(HOST, self._target)  # noqa: TID251 - as above
        except OSError:
            await _end(writer)
            return
        under_way: dict[bytes, Phase] = {}  # by the id of a request: what befalls its answer
        ways = [
            asyncio.create_task(self._hand_on(reader, requests, under_way)),
            asyncio.create_task(self._answer(answers, writer, under_way)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.wait(ways)
            await _end(requests)
            await _end(writer)

    async def _hand_on(
        self, reader: asyncio.StreamReader, requests: asyncio.StreamWriter, under_way: dict[bytes, Phase]
    ) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            while True:
                size = await reader.readexactly(4)
                body = await reader.readexactly(int.from_bytes(size))
                phase = self._phase_of(int.from_bytes(body[:2]))
                if phase is Phase.BEFORE:
                    return
                if phase is not None:
                    under_way[body[4:8]] = phase
                requests.write(size + body)
                await requests.drain()

    def _phase_of(self, key: int) -> Phase | None:
        """Return what befalls a request, and count it."""
        self.seen[key] += 1
        fault = self._fault
        if fault is None or fault.key.value != key or fault.times <= 0:
            return None
        fault.times -= 1
        self.met[key] += 1
        return fault.phase

    async def _answer(
        self, answers: asyncio.StreamReader, writer: asyncio.StreamWriter, under_way: dict[bytes, Phase]
    ) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            while True:
                size = await answers.readexactly(4)
                body = await answers.readexactly(int.from_bytes(size))
                phase = under_way.pop(body[:4], None)
                if phase is Phase.AFTER:
                    return
                if phase is Phase.MIDDLE:
                    writer.write(size + body[: len(body) // 2])
                    await writer.drain()
                    return
                if phase is Phase.LATE:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(LATE_S):
                            await self._ended.wait()
                if phase is Phase.SHORT:
                    body = body[: max(4, len(body) // 2)]
                    size = len(body).to_bytes(4)
                writer.write(size + body)
                await writer.drain()


async def _end(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()
    with suppress(OSError):
        await writer.wait_closed()


@contextmanager
def kafka_behind_proxy(folder: Path) -> Iterator[tuple[Server, KafkaProxy]]:
    """Run a Kafka that sends clients who come through the proxy there again; its own door is a sound one."""
    (inner,) = free_ports(1)
    proxy = KafkaProxy(inner)
    settings = {
        "listeners": f"PLAINTEXT://{HOST}:{{port}},PROXY://{HOST}:{inner},CONTROLLER://{HOST}:{{controller_port}}",
        "advertised.listeners": f"PLAINTEXT://{HOST}:{{port}},PROXY://{proxy.address}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,PROXY:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "inter.broker.listener.name": "PLAINTEXT",
    }
    try:
        with running_kafka(folder, **settings) as server:
            yield server, proxy
    finally:
        proxy.close()
