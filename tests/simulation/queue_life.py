"""A producer of queue items, and workers as processes that die, pause and are too slow."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from memq.client.queue.items import QueueItem
from memq.client.queue.queue import AsyncQueue
from memq.errors import MemqError
from memq.runtime.runtime import Runtime
from memq.simulation.ports.cloud import Doors
from memq.simulation.world.node import SimNode
from tests.simulation.queue_rules import QueueRules
from tests.simulation.topic_churn import TopicChurn

QUEUES = 2  # of one life
ITEMS = 40
WORKERS = ("worker-0", "worker-1", "worker-2")
LEASES_S = (1.0, 3.0)
DELAYS_S = (0.0, 0.0, 0.5, 3.0)
KILL_RATE = 0.1  # of a worker, each second
NACK_RATE, EXTEND_RATE, SLOW_RATE, SILENT_RATE = 0.2, 0.15, 0.1, 0.05
POLL_S = 0.25


class QueueLife(TopicChurn):
    """One life of the process. Each item that is stored is acked once, whoever dies meanwhile."""

    async def run(self, topics: int) -> None:
        """Let workers work on so many queues, one after another."""
        self._cluster.end(WORKERS)  # of the life before
        for number in range(topics):
            await self._work_on(f"{self._life}.{number}")

    async def _work_on(self, name: str) -> None:
        world = self._cluster.world
        rules = QueueRules(name, self._cluster.cloud.state_logs, world.fail, lambda: world.now)
        sending = asyncio.create_task(self._enqueue(rules), name="enqueue")

        async def main(node: SimNode, runtime: Runtime, _doors: Doors) -> None:
            await _run_worker(node, runtime, self._brokers, rules)

        while not sending.done() or rules.open():
            for worker in WORKERS:
                self._cluster.keep_alive(worker, main, KILL_RATE * POLL_S, self._draw)
            await asyncio.sleep(POLL_S)
        await sending
        self._cluster.end(WORKERS)

    async def _enqueue(self, rules: QueueRules) -> None:
        draw, sent = self._draw, 0
        async with AsyncQueue(self._brokers, timeout_ms=20_000, runtime=self._runtime) as queue:
            while sent < ITEMS:
                count, after_s = draw.choice([1, 1, 5]), draw.choice(DELAYS_S)
                payloads = [f"{rules.queue} {sent + number}".encode() for number in range(count)]
                sent += count
                for payload in payloads:
                    rules.sending(payload)
                with suppress(MemqError):  # its outcome is unknown
                    await queue.enqueue_many(
                        rules.queue,
                        payloads,
                        priority=draw.randrange(10),
                        deliver_after=after_s,
                        lease=draw.choice(LEASES_S),
                    )
                    for payload in payloads:
                        rules.stored(payload)
                await asyncio.sleep(draw.uniform(0, 0.5))


async def _run_worker(node: SimNode, runtime: Runtime, brokers: list[str], rules: QueueRules) -> None:
    """Work on items until the process dies."""
    draw, clock = node.random, runtime.clock
    queue = AsyncQueue(brokers, timeout_ms=5_000, runtime=runtime)
    while True:
        try:
            items = await queue.dequeue({rules.queue: draw.choice([1, 2, 5])}, wait=draw.choice([0.0, 2.0]))
        except MemqError:
            await asyncio.sleep(draw.uniform(0.05, 0.5))
            continue
        worker = object()  # each answer is a holder of its own
        for item in items:
            rules.given(worker, item, item.until_s - clock.monotonic())
        for item in items:
            try:
                await _work_on(node, runtime, queue, rules, worker, item)
            except MemqError as error:
                node.world.trace.event(node.world.now, "item not settled", node.name, type(error).__name__)
            rules.leaves(worker, item)
        await asyncio.sleep(draw.uniform(0, 0.1))


async def _work_on(
    node: SimNode, runtime: Runtime, queue: AsyncQueue, rules: QueueRules, worker: object, item: QueueItem
) -> None:
    """Work on one item: ack it, give it back, extend its lease, or forget it."""
    draw, clock = node.random, runtime.clock
    await asyncio.sleep(draw.uniform(0, 0.2))
    if draw.random() < EXTEND_RATE and item.until_s > clock.monotonic():
        await queue.extend(item, draw.choice(LEASES_S))
        rules.extended(worker, item, item.until_s - clock.monotonic())
    if draw.random() < SLOW_RATE:
        await asyncio.sleep(draw.uniform(0, 4))
    if draw.random() < SILENT_RATE:
        return
    rules.leaves(worker, item)
    if draw.random() < NACK_RATE:
        await queue.nack(item, after=draw.choice(DELAYS_S))
        return
    await queue.ack(item)
    rules.acked(item)
