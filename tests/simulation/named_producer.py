"""A process with a named producer: each instance continues where the one before it ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from memq.client.producer.delivery import Ack
from memq.client.producer.producer import AsyncProducer
from memq.errors import MemqError
from memq.simulation.world.node import SimNode
from tests.simulation.checker import Checker
from tests.simulation.named_rules import NamedRules
from tests.simulation.plan import Plan

SIZES = (0, 10, 300)
LEFT_RUNNING_RATE = 0.5  # how often an instance is not closed: it is fenced with blocks under way
GOES_ON_RATE = 0.3  # how often an instance sends on next to its successor
RESTS_MAX = 1  # of one life
REST_RATE = 0.4
REST_SHARES = (0.1, 1.0, 1.0)
RETRY_S = 0.5


class NamedLife:
    """One life of the process; `blocks` is how many it sends, over all its instances."""

    def __init__(
        self,
        plan: Plan,
        node: SimNode,
        checker: Checker,
        rules: NamedRules,
        make: Callable[[str], AsyncProducer],
        life: int,
    ) -> None:
        self._plan = plan
        self._node = node
        self._checker = checker
        self._rules = rules
        self._make = make
        self._life = f"{life}"
        self._instances = 0
        self._watchers: list[asyncio.Task[None]] = []

    async def run(self, blocks: int) -> None:
        """Send `blocks` blocks, and return when each is acked or given up."""
        left, rests, old = blocks, 0, list[AsyncProducer]()
        while left > 0:
            producer = self._make(self._node.name)
            self._instances += 1
            old.append(producer)
            cuts = self._rules.cuts()
            try:
                points = await producer.resume_points(self._plan.shape.topic)
            except MemqError:  # the world is sick: the next one may come through
                await asyncio.sleep(RETRY_S)
                continue
            self._rules.began(self._node.name, points, cuts)
            numbers, tag, draw = dict(points), f"{self._life}.{self._instances}", self._node.random
            left -= await self._send(producer, numbers, min(left, draw.randint(3, 25)), tag)
            if draw.random() < GOES_ON_RATE:
                self._watchers.append(asyncio.create_task(self._go_on(producer, numbers, tag)))
                await asyncio.sleep(draw.uniform(0, 0.5))
            elif self._node.random.random() > LEFT_RUNNING_RATE:
                with suppress(MemqError):
                    await producer.close()
            if rests < RESTS_MAX and self._node.random.random() < REST_RATE:
                rests += 1
                await asyncio.sleep(self._plan.named_rest_s_max * self._node.random.choice(REST_SHARES))
        await asyncio.gather(*self._watchers)
        for producer in old:
            with suppress(MemqError):
                await producer.close()

    async def _go_on(self, producer: AsyncProducer, numbers: dict[int, int], tag: str) -> None:
        """Send more, whatever instance begins meanwhile."""
        await self._send(producer, numbers, 10, tag)

    async def _send(self, producer: AsyncProducer, next_numbers: dict[int, int], blocks: int, tag: str) -> int:
        """Send blocks until the instance ends, and return how many."""
        draw = self._node.random
        for count in range(blocks):
            partition = draw.choice(list(next_numbers))
            for _ in range(draw.randint(1, self._plan.block_records_max)):
                number, next_numbers[partition] = next_numbers[partition], next_numbers[partition] + 1
                words = f"{self._node.name} {partition} {number} {tag} "
                value = words.encode() + draw.randbytes(draw.choice(SIZES))
                self._checker.sent(self._node.name, partition, number, value)
                try:
                    delivery = await producer.send(self._plan.shape.topic, value, partition=partition)
                except MemqError:
                    self._checker.give_up(value)
                    return count + 1
                self._watchers.append(asyncio.create_task(self._watch(delivery, value)))
            await asyncio.sleep(draw.uniform(0, self._plan.pace_s_max))
        return blocks

    async def _watch(self, delivery: Awaitable[Ack], value: bytes) -> None:
        try:
            ack = await delivery
        except MemqError:
            self._checker.give_up(value)
        else:
            self._checker.ack(value, ack)
