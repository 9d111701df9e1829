"""A producer of queue items, and workers as processes that die, pause and are too slow."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from memq.client.queue.items import QueueItem
from memq.client.queue.queue import AsyncQueue
from memq.errors import FencedError, InvalidRequestError, MemqError
from memq.queues.decisions import ItemOutcome
from memq.runtime.clock import Clock
from memq.runtime.runtime import Runtime
from memq.simulation.ports.cloud import Doors
from memq.simulation.world.node import SimNode
from tests.simulation.queue_rules import ATTEMPTS_MAX, QueueKind, QueueRules
from tests.simulation.topic_churn import TopicChurn

QUEUES = 2  # of one life
ITEMS = 40
WORKERS = ("worker-0", "worker-1", "worker-2")
LEASES_S = (1.0, 3.0)
DELAYS_S = (0.0, 0.0, 0.5, 3.0)
KILL_RATE = 0.1  # of a worker, each second
JOINT_RATE = 0.5  # of acks that go with the next request for items
NACK_RATE, EXTEND_RATE, SLOW_RATE, SILENT_RATE = 0.2, 0.15, 0.1, 0.05
POLL_S = 0.25
REDRIVE_S = 1.0
KEYS = ("a", "b", "c")


class QueueLife(TopicChurn):
    """One life of the process. Each item that is stored is acked once, whoever dies meanwhile."""

    async def run(self, topics: int) -> None:
        """Let workers work on so many queues, one after another."""
        self._cluster.end(WORKERS)  # of the life before
        for number in range(topics):
            await self._work_on(self._named(f"{self._life}.{number}"))

    async def _work_on(self, name: str) -> None:
        world = self._cluster.world
        kind = self._draw.choice(list(QueueKind))
        rules = QueueRules(name, kind, self._cluster.cloud.state_logs, world.fail, lambda: world.now)
        sending = asyncio.create_task(self._enqueue(rules), name="enqueue")
        operating = asyncio.create_task(self._redrive(rules), name="redrive")

        async def main(node: SimNode, runtime: Runtime, _doors: Doors) -> None:
            await _run_worker(node, runtime, self._brokers, rules)

        while not sending.done() or rules.open():
            for worker in WORKERS:
                self._cluster.keep_alive(worker, main, KILL_RATE * POLL_S, self._draw)
            await asyncio.sleep(POLL_S)
        await sending
        operating.cancel()
        await asyncio.gather(operating, return_exceptions=True)
        self._cluster.end(WORKERS)

    def _queue(self) -> AsyncQueue:
        return AsyncQueue(self._brokers, timeout_ms=20_000, connect_timeout_ms=20_000, runtime=self._runtime)

    async def _redrive(self, rules: QueueRules) -> None:
        """Send dead items back, as an operator does."""
        async with self._queue() as queue:
            while rules.kind is QueueKind.DYING:
                await asyncio.sleep(REDRIVE_S)
                with suppress(MemqError):  # the next one tries again
                    await queue.redrive(rules.queue)

    async def _enqueue(self, rules: QueueRules) -> None:
        draw, sent = self._draw, 0
        async with self._queue() as queue:
            while sent < ITEMS:
                count = draw.choice([1, 1, 5]) if rules.kind is not QueueKind.DEDUPED else 1
                key = draw.choice(KEYS) if rules.kind is QueueKind.ORDERED else f"d{sent // 3}"
                payloads = [f"{rules.queue} {sent + number}".encode() for number in range(count)]
                sent += count
                for payload in payloads:
                    rules.sending(payload, key)
                with suppress(MemqError):  # its outcome is unknown
                    ids = await self._send(queue, rules, payloads, key)
                    for payload, id_ in zip(payloads, ids, strict=True):
                        rules.stored(payload, id_)
                await asyncio.sleep(draw.uniform(0, 0.5))

    async def _send(self, queue: AsyncQueue, rules: QueueRules, payloads: list[bytes], key: str) -> list[str]:
        draw, kind = self._draw, rules.kind
        terms: dict[str, Any] = {"priority": draw.randrange(10), "lease": draw.choice(LEASES_S)}
        if kind is QueueKind.ORDERED:
            return await queue.enqueue_many(rules.queue, payloads, key=key, ordered=True, **terms)
        terms |= {
            "deliver_after": draw.choice(DELAYS_S),
            "attempts_max": ATTEMPTS_MAX if kind is QueueKind.DYING else 0,
        }
        if kind is QueueKind.DEDUPED:
            return [await queue.enqueue(rules.queue, payloads[0], dedupe_key=key, dedupe_window=3_600, **terms)]
        return await queue.enqueue_many(rules.queue, payloads, **terms)


async def _run_worker(node: SimNode, runtime: Runtime, brokers: list[str], rules: QueueRules) -> None:
    """Work on items until the process dies."""
    draw, clock = node.random, runtime.clock
    queue = AsyncQueue(brokers, timeout_ms=5_000, runtime=runtime)
    done: list[QueueItem] = []
    while True:
        try:
            wanted, wait_s = {rules.queue: draw.choice([1, 2, 5])}, draw.choice([0.0, 2.0])
            outcomes, items = await queue.ack_and_dequeue(done, wanted, wait=wait_s)
            _note_acks(rules, clock, done, outcomes)
            done = []
        except MemqError:
            done = []  # the outcomes are unknown
            await asyncio.sleep(draw.uniform(0.05, 0.5))
            continue
        worker = object()  # each answer is a holder of its own
        for item in items:
            rules.given(worker, item, item.until_s - clock.monotonic())
        for item in items:
            try:
                done += await _work_on(node, runtime, queue, rules, worker, item)
            except MemqError as error:
                node.world.trace.event(node.world.now, "item not settled", node.name, type(error).__name__)
            rules.leaves(worker, item)
        await asyncio.sleep(draw.uniform(0, 0.1))


def _note_acks(rules: QueueRules, clock: Clock, items: list[QueueItem], outcomes: list[ItemOutcome]) -> None:
    for item, outcome in zip(items, outcomes, strict=True):
        if outcome is ItemOutcome.ACKED:
            rules.acked(item)
        else:
            rules.refused(item, outcome, item.until_s - clock.monotonic())


async def _work_on(
    node: SimNode, runtime: Runtime, queue: AsyncQueue, rules: QueueRules, worker: object, item: QueueItem
) -> list[QueueItem]:
    """Work on one item: ack it, give it back, extend its lease, or forget it.

    Return the item if the next request for items acks it.
    """
    draw, clock = node.random, runtime.clock
    await asyncio.sleep(draw.uniform(0, 0.2))
    if draw.random() < EXTEND_RATE and item.until_s > clock.monotonic():
        await queue.extend(item, draw.choice(LEASES_S))
        rules.extended(worker, item, item.until_s - clock.monotonic())
    if draw.random() < SLOW_RATE:
        await asyncio.sleep(draw.uniform(0, 4))
    if draw.random() < SILENT_RATE:
        return []
    rules.leaves(worker, item)
    is_nack = draw.random() < NACK_RATE
    if not is_nack and draw.random() < JOINT_RATE:
        return [item]
    try:
        if is_nack:
            await queue.nack(item, after=draw.choice(DELAYS_S))
        else:
            await queue.ack(item)
            rules.acked(item)
    except (FencedError, InvalidRequestError) as error:  # an answer
        rules.refused(item, type(error).__name__, item.until_s - clock.monotonic())
        raise
    return []
