"""Pop groups, and workers as processes that die, pause and are too slow: on topics that go, and on the lasting one."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from memq.client.admin import AsyncAdmin
from memq.client.producer.producer import AsyncProducer
from memq.client.queue.items import QueueItem
from memq.client.queue.queue import AsyncQueue
from memq.errors import MemqError, NotFoundError
from memq.queues.decisions import ItemOutcome, NackKind
from memq.runtime.runtime import Runtime
from memq.simulation.ports.cloud import Doors
from memq.simulation.world.node import SimNode
from memq.topic import Topic
from tests.simulation.checker import Checker
from tests.simulation.pop_rules import PopRules
from tests.simulation.queue_life import LEASES_S, REDRIVE_S
from tests.simulation.queue_rules import ATTEMPTS_MAX, QueueKind
from tests.simulation.topic_churn import TopicChurn

NAME = "popped"
GROUPS = 2  # of one life
BLOCKS = 25
POPPERS = ("popper-0", "popper-1", "popper-2")
LASTING_RATE = 0.5  # of the groups that read the lasting topic, so long:
LASTING_S_MAX = 60.0
STAYS_RATE = 0.5  # of the other topics: retention takes nothing
KILL_RATE = 0.1  # of a worker, each second
NACK_RATE, EXTEND_RATE, SLOW_RATE, SILENT_RATE, UNUSED_RATE = 0.15, 0.1, 0.05, 0.03, 0.05
DELAYS_S = (0.0, 0.0, 0.5, 3.0)
POLL_S = 0.25


class PopLife(TopicChurn):
    """One life of the process. Each record of a topic is acked once, or retention took it, whoever dies meanwhile."""

    async def run(self, topics: int) -> None:
        """Let workers work on so many groups, one after another."""
        self._cluster.end(POPPERS)  # of the life before
        async with AsyncAdmin(self._brokers, runtime=self._runtime) as admin:
            for _ in range(topics):
                self._topics += 1
                if self._draw.random() < LASTING_RATE:
                    await self._share()
                else:
                    await self._live(admin, self._named(NAME))

    async def _share(self) -> None:
        """Read the lasting topic, next to its consumers."""
        rules = self._rules(self._cluster.topic, self._cluster.checker)

        async def stop() -> None:
            await asyncio.sleep(self._draw.uniform(0, LASTING_S_MAX))
            rules.stop()

        await self._pop(rules, asyncio.create_task(stop(), name="stop"))
        async with AsyncAdmin(self._brokers, runtime=self._runtime) as admin:
            await self._remove(admin, rules.queue)

    async def _live(self, admin: AsyncAdmin, name: str) -> None:
        """Make a topic, read it, and delete it before its group, or after."""
        stays = self._draw.random() < STAYS_RATE
        topic = await self._made(admin, name, {"retention_ms": 0, "retention_bytes": 0} if stays else {})
        producer = AsyncProducer(
            self._brokers,
            linger_ms=self._draw.choice([0, 5, 100]),
            delivery_timeout_ms=topic.settings.delivery_timeout_ms,
            runtime=self._runtime,
        )
        rules = self._rules(topic, self._checker)
        await self._pop(rules, asyncio.create_task(self._write(producer, topic, BLOCKS), name="write"))
        if self._draw.random() < 0.5:
            await self._remove(admin, rules.queue)
        self._leaving[topic.id] = None
        with suppress(MemqError):  # what failed was counted by its delivery
            await producer.close()
        await self._delete(admin, name)

    def _rules(self, topic: Topic, checker: Checker) -> PopRules:
        world, kind = self._cluster.world, self._draw.choice([QueueKind.PLAIN, QueueKind.DYING])
        queue = f"{topic.name}@{self._life}.{self._topics}"
        states = self._cluster.cloud.state_logs
        return PopRules(topic, queue, kind, checker, states, world.fail, lambda: world.now)

    async def _pop(self, rules: PopRules, producing: asyncio.Task[None]) -> None:
        """Begin a group, and let workers work until `producing` is done and all records are over."""
        await asyncio.sleep(self._draw.choice([0.0, 0.0, 1.0, 5.0]))
        await self._begin(rules)
        operating = asyncio.create_task(self._redrive(rules), name="redrive")

        async def main(node: SimNode, runtime: Runtime, _doors: Doors) -> None:
            await _run_popper(node, runtime, self._brokers, rules)

        while not producing.done() or rules.open():
            for popper in POPPERS:
                self._cluster.keep_alive(popper, main, KILL_RATE * POLL_S, self._draw)
            await asyncio.sleep(POLL_S)
        await producing
        await self._no_lag(rules)
        operating.cancel()
        await asyncio.gather(operating, return_exceptions=True)
        self._cluster.end(POPPERS)

    async def _no_lag(self, rules: PopRules) -> None:
        """Wait until the group says that no record of its own topic is left; the lasting one gets more of them."""
        while rules.ends is None:
            with suppress(MemqError):
                async with AsyncAdmin(self._brokers, runtime=self._runtime) as admin:
                    groups = {each.queue: each for each in await admin.pop_groups()}
                    if not groups[rules.queue].items and not groups[rules.queue].records:
                        return
            await self._rest()

    async def _begin(self, rules: PopRules) -> None:
        topic, group = rules.queue.split("@")
        terms = self._draw.choice(LEASES_S), ATTEMPTS_MAX if rules.kind is QueueKind.DYING else 0
        while True:
            try:
                async with AsyncQueue(self._brokers, timeout_ms=20_000, runtime=self._runtime) as queue:
                    await queue.begin_pop(topic, group, lease=terms[0], attempts_max=terms[1])
            except MemqError:
                await self._rest()
            else:
                return

    async def _redrive(self, rules: PopRules) -> None:
        """Send dead records back, as an operator does."""
        async with AsyncQueue(self._brokers, timeout_ms=20_000, runtime=self._runtime) as queue:
            while rules.kind is QueueKind.DYING:
                await asyncio.sleep(REDRIVE_S)
                with suppress(MemqError):  # the next one tries again
                    await queue.redrive(rules.queue)

    async def _remove(self, admin: AsyncAdmin, queue: str) -> None:
        while True:
            try:
                await admin.delete_pop(queue)
            except NotFoundError:
                return  # a try landed that was answered with an error
            except MemqError:
                await self._rest()


async def _run_popper(node: SimNode, runtime: Runtime, brokers: list[str], rules: PopRules) -> None:
    """Work on records until the process dies."""
    draw, clock = node.random, runtime.clock
    queue = AsyncQueue(brokers, timeout_ms=5_000, runtime=runtime)
    while True:
        try:
            items = await queue.dequeue({rules.queue: draw.choice([1, 5, 50])}, wait=draw.choice([0.0, 2.0]))
        except MemqError:
            await asyncio.sleep(draw.uniform(0.05, 0.5))
            continue
        worker = object()  # each answer is a holder of its own
        for item in items:
            rules.given(worker, item, item.until_s - clock.monotonic())
        try:
            await _work_on(node, runtime, queue, rules, worker, items)
        except MemqError as error:
            node.world.trace.event(node.world.now, "records not settled", node.name, type(error).__name__)
        for item in items:
            rules.leaves(worker, item)
        await asyncio.sleep(draw.uniform(0, 0.1))


async def _work_on(
    node: SimNode, runtime: Runtime, queue: AsyncQueue, rules: PopRules, worker: object, items: list[QueueItem]
) -> None:
    """Work on records together: extend leases, forget some, give some back, ack the others."""
    draw, clock = node.random, runtime.clock
    await asyncio.sleep(draw.uniform(0, 0.2))
    if items and draw.random() < EXTEND_RATE:
        held = [item for item in items if item.until_s > clock.monotonic()]
        outcomes = await queue.extend_many(held, draw.choice(LEASES_S))
        for item, outcome in zip(held, outcomes, strict=True):
            if outcome is ItemOutcome.EXTENDED:
                rules.extended(worker, item, item.until_s - clock.monotonic())
    if draw.random() < SLOW_RATE:
        await asyncio.sleep(draw.uniform(0, 4))
    handled = [item for item in items if draw.random() >= SILENT_RATE]
    back = [item for item in handled if draw.random() < NACK_RATE]
    done = [item for item in handled if item not in back]
    for item in handled:
        rules.leaves(worker, item)
    if back:
        kind = NackKind.UNUSED if draw.random() < UNUSED_RATE else NackKind.FAILED
        await queue.nack_many(back, after=draw.choice(DELAYS_S), kind=kind)
    if done:
        for item, outcome in zip(done, await queue.ack_many(done), strict=True):
            if outcome is ItemOutcome.ACKED:
                rules.acked(item)
