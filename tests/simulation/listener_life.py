"""Listeners as processes that die, pause and leave, on a topic whose records fail in known ways."""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress

import msgspec

import memq
from memq.client.admin import AsyncAdmin
from memq.client.listener.listener import AsyncListener
from memq.client.listener.retry_records import LANES
from memq.client.producer.delivery import AsyncDelivery
from memq.client.producer.producer import AsyncProducer
from memq.errors import MemqError
from memq.runtime.runtime import Runtime
from memq.simulation.ports.cloud import Doors
from memq.simulation.world.node import SimNode
from memq.topic import Topic
from tests.simulation.observers import LISTENERS
from tests.simulation.retry_rules import DELAYS_S, LETTERS, RETRIES, HandlerError, ProcessEnd, RetryRules
from tests.simulation.topic_churn import TopicChurn

NAME = "listened"
LISTENED = 2  # topics of one life
BLOCKS = 25
KEYS = 4
MEMBERS = ("listener-0", "listener-1")
KILL_RATE = 0.1  # of a member, each second
LEAVE_RATE = 0.3  # of the lives of a listener that end by themselves
WAITS_RATE = 0.6  # of the topics: retention waits for the group; else listeners skip what is gone
WAITS_MS = 30 * 86_400_000  # as much as any other time of the settings
POLL_S = 0.25


class ListenerLife(TopicChurn):
    """One life of the process. Each record of its topic is handled, or becomes a dead letter with its cause."""

    async def run(self, topics: int) -> None:
        """Let listeners work on so many topics, one after another."""
        self._cluster.end(MEMBERS)  # of the life before
        async with AsyncAdmin(self._brokers, runtime=self._runtime) as admin:
            for _ in range(topics):
                await self._live(admin, self._named(NAME))

    async def _live(self, admin: AsyncAdmin, name: str) -> None:
        self._topics += 1
        group = self._named(f"{LISTENERS}-{self._draw.randbytes(6).hex()}")
        waits: dict[str, str | int] = {"retention_groups": group, "retention_groups_ms_max": WAITS_MS}
        topic = await self._made(admin, name, waits if self._draw.random() < WAITS_RATE else {})
        for suffix, partitions in ((RETRIES, LANES), (LETTERS, 1)):
            await self._make_retry_topic(admin, group + suffix, partitions)
        ordered = self._draw.random() < 0.5
        rules = RetryRules(
            topic,
            group,
            self._checker.logs,
            self._cluster.world.fail,
            ordered=ordered,
            blocks=ordered and self._draw.random() < 0.5,
        )
        self._cluster.listen(rules)
        producer = AsyncProducer(
            self._brokers, delivery_timeout_ms=topic.settings.delivery_timeout_ms, runtime=self._runtime
        )
        writing = asyncio.create_task(self._write_keyed(producer, topic), name="write")

        async def main(node: SimNode, runtime: Runtime, _doors: Doors) -> None:
            await _run_member(node, runtime, self._brokers, rules)

        while not writing.done() or rules.open_records:
            for member in MEMBERS:
                self._cluster.keep_alive(member, main, KILL_RATE * POLL_S, self._draw)
            await asyncio.sleep(POLL_S)
        await writing
        self._cluster.end(MEMBERS)
        self._leaving[topic.id] = None
        with suppress(MemqError):  # what failed was counted by its delivery
            await producer.close()
        await self._delete(admin, name)

    async def _make_retry_topic(self, admin: AsyncAdmin, name: str, partitions: int) -> None:
        """Make a topic as listeners do, with the times of this run."""
        settings = msgspec.structs.asdict(self._cluster.shape.settings) | {"retention_ms": 0, "retention_bytes": 0}
        settings |= {"retention_groups": name, "retention_groups_ms_max": WAITS_MS}
        while True:
            try:
                made = await admin.create_topic(name, partitions=partitions, settings=settings, exist_ok=True)
            except MemqError:
                await self._rest()
            else:
                self._cluster.watch(made)
                return

    async def _write_keyed(self, producer: AsyncProducer, topic: Topic) -> None:
        """Send blocks of records with keys and wait for what becomes of each."""
        pending: list[tuple[bytes, AsyncDelivery]] = []
        for _ in range(BLOCKS):
            key, stream = self._draw.randrange(KEYS), f"{self._life}.{self._topics}"
            for _ in range(self._draw.randint(1, 3)):
                self._sent += 1
                value = f"{stream} {key} {self._sent} ".encode() + self._draw.randbytes(self._draw.choice([0, 10]))
                self._checker.sent(stream, key, self._sent, value, keyed=True)
                try:
                    pending.append((value, await producer.send(topic.name, value, key=str(key))))
                except MemqError as error:
                    self._check_exists(error, topic)
                    self._checker.give_up(value)
            await asyncio.sleep(self._draw.uniform(0, 0.3))
        for value, delivery in pending:
            try:
                ack = await delivery
            except MemqError as error:
                self._check_exists(error, topic)
                self._checker.give_up(value)
            else:
                self.acked(topic, value, ack)

    # ---- members --------------------------------------------------------------------------------


async def _run_member(node: SimNode, runtime: Runtime, brokers: list[str], rules: RetryRules) -> None:
    """Listen until the process dies; some lives of the listener end by a stop."""
    draw = node.random

    async def handle(message: memq.Message) -> object:
        rules.begin(message, runtime.clock.wall_ms())
        await asyncio.sleep(draw.choice([0, 0, 0.01, 0.3]))
        try:
            answer = rules.answer(message, runtime.clock.wall_ms())
        except ProcessEnd:
            node.kill()
            await asyncio.sleep(math.inf)
            raise
        if isinstance(answer, HandlerError):
            raise answer
        return answer

    while True:
        listener = AsyncListener(
            brokers,
            rules.topic.name,
            rules.group,
            handle,
            concurrency=draw.choice([1, 3, 8]),
            ordered=rules.ordered,
            when_failing="block" if rules.blocks else "dead-letter",
            retry_delays_s=DELAYS_S,
            drain_s=draw.choice([0, 2]),
            session_timeout_ms=draw.choice([1_000, 3_000]),
            commit_interval_ms=draw.choice([50, 500]),
            prefetch_bytes_max=draw.choice([8 << 10, 1 << 20]),
            on_expired="skip",
            audit=False,
            runtime=runtime,
        )
        try:
            async with listener, asyncio.TaskGroup() as group:
                group.create_task(listener.run())
                if draw.random() < LEAVE_RATE:
                    await asyncio.sleep(draw.uniform(1, 8))
                    listener.stop()
        except* MemqError as errors:
            node.world.trace.event(node.world.now, "listener failed", node.name, type(errors.exceptions[0]).__name__)
        await asyncio.sleep(draw.uniform(0.05, 0.5))
