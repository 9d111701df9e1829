"""One of three real Kafka nodes does not answer: logs of the other leaders are written and read."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient

import memq
from memq.broker.broker import Broker
from memq.governor.memory import MemoryCluster, MemoryCoordinator
from memq.runtime.runtime import Runtime
from memq.settings import BrokerSettings
from memq.storage_handlers.memory import MemoryHandler
from tests.chaos.stack import Stack
from tests.integration.kafka import kafka_queue
from tests.soak import SOAKING

pytestmark = [pytest.mark.soak, pytest.mark.skipif(not SOAKING, reason="it starts three nodes: make soak")]

HANG_S = 240.0
PARTITIONS = 6
ROUNDS = 3


@pytest.fixture
def kafkas(tmp_path: Path) -> Iterator[Stack]:
    """Three nodes, each behind a link."""
    stack = Stack(tmp_path / "kafkas", 1, Path.cwd())
    stack.links.start()
    with ThreadPoolExecutor(3) as pool:
        starting = stack.launch_kafkas(pool)
    try:
        stack.kafkas = {name: future.result() for name, future in starting.items()}
        yield stack
    finally:
        for future in starting.values():
            if future.exception() is None:
                future.result().stop()
        stack.links.close()


def leaders(stack: Stack, prefix: str) -> dict[int, int]:
    """Return the node that leads each partition of the topic."""
    with_prefix = [
        topic
        for name, topic in AdminClient({"bootstrap.servers": stack.bootstrap}).list_topics(timeout=30).topics.items()
        if name.startswith(f"{prefix}clicks.")
    ]
    return {number: part.leader for number, part in with_prefix[0].partitions.items()}


def test_one_leader_that_does_not_answer_stops_its_own_partitions_alone(kafkas: Stack) -> None:
    async def run() -> None:
        runtime, prefix = Runtime(), "sick."
        settings = dataclasses.replace(BrokerSettings(port=0, audit=False), cluster="sick-log")
        queue = kafka_queue(kafkas.bootstrap, prefix=prefix, request_timeout_ms=2_000)
        store = MemoryHandler(runtime.clock)
        broker = Broker(settings, runtime, {"main": store}, queue, MemoryCoordinator(MemoryCluster()))
        await broker.start()
        try:
            async with asyncio.timeout(HANG_S):
                await sick_leader(broker, kafkas, prefix)
        finally:
            for link in kafkas.links:
                link.set("pass")
            await broker.close()
            await queue.close()

    asyncio.run(run())


async def sick_leader(broker: Broker, kafkas: Stack, prefix: str) -> None:
    async with memq.aio.Admin(broker.address) as admin:
        await admin.create_topic("clicks", partitions=PARTITIONS)
    async with (
        memq.aio.Producer(broker.address, linger_ms=0, audit=False) as producer,
        memq.aio.Producer(broker.address, linger_ms=0, audit=False) as patient,
        memq.aio.Consumer(broker.address, ["clicks"], audit=False) as consumer,
    ):
        seen: set[bytes | None] = set()

        async def deliver(partitions: list[int], name: str) -> None:
            """Send a record to each, one after another, and read them all: the time limit of the test ends it."""
            values = {b"%s %d" % (name.encode(), number) for number in partitions}
            for number in partitions:
                await (await producer.send("clicks", b"%s %d" % (name.encode(), number), partition=number))
            while not values <= seen:
                seen.update((await anext(batches)).values())

        batches = aiter(consumer)
        await deliver(list(range(PARTITIONS)), "before")
        leader = await asyncio.to_thread(leaders, kafkas, prefix)
        sick = [number for number, node in leader.items() if node == leader[0]]
        sound = [number for number in leader if number not in sick]
        assert sound
        link = kafkas.links[f"kafka-{leader[0]}"]
        link.set("silent")
        waiting = await patient.send("clicks", b"waited", partition=0)
        for number in range(ROUNDS):
            await deliver(sound, f"meanwhile {number}")
        assert not waiting.done()
        assert link.met["silent"]
        link.set("pass")
        await waiting
        await deliver(list(leader), "after")
        assert b"waited" in seen
