"""A producer that delays records, cancels some of them, and asks how many wait."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import UTC, datetime, timedelta

from memq.client.admin import AsyncAdmin
from memq.client.producer.delivery import AsyncDelivery
from memq.client.producer.producer import AsyncProducer
from memq.errors import MemqError, OutcomeUnknownError
from memq.format.held_object import HoldId
from memq.simulation.cluster import TOPIC_ID
from memq.simulation.world.node import EPOCH_MS, SimNode
from tests.simulation.checker import Checker
from tests.simulation.delay_rules import DelayRules
from tests.simulation.plan import Plan

DELAYS_S = (0.0, 0.3, 2.0, 8.0, 25.0, 70.0)  # the last one is longer than the safety age of a calm sweep
CANCEL_RATE = 0.3
COUNT_RATE = 0.2
IN_FLIGHT_MAX = 30  # cancels that wait included
CANCEL_S_MAX = 10.0
SIZES = (10, 300, 3_000)
_ZERO = datetime(1970, 1, 1, tzinfo=UTC)


class DelayLife:
    """One life of the process; `life` is its number."""

    def __init__(
        self,
        plan: Plan,
        node: SimNode,
        producer: AsyncProducer,
        admin: AsyncAdmin,
        checker: Checker,
        rules: DelayRules,
        life: int,
    ) -> None:
        self._plan = plan
        self._node = node
        self._producer = producer
        self._admin = admin
        self._checker = checker
        self._rules = rules
        self._life = life
        self._held = 0

    async def run(self, records: int) -> None:
        """Send records until so many are held, and return when each is held or given up, and each cancel answered.

        In a storm the service partitions may have no owner for longer than a record is tried.
        """
        watchers: list[asyncio.Task[None]] = []
        draw = self._node.random
        number = 0
        while self._held < records:
            number += 1
            open_ = [each for each in watchers if not each.done()]
            if len(open_) > IN_FLIGHT_MAX:
                await asyncio.wait(open_, return_when=asyncio.FIRST_COMPLETED)
            partition = draw.randrange(self._plan.shape.partitions)
            stream = f"{self._node.name}.{self._life}.{number}"
            value = f"{stream} {partition} 1 ".encode() + draw.randbytes(draw.choice(SIZES))
            due_ms = EPOCH_MS + int((self._now_s() + draw.choice(DELAYS_S) * draw.random()) * 1_000)
            self._checker.sent(stream, partition, 1, value)
            self._checker.give_up(value)  # of the log's promises only that it is there once, at most
            self._rules.sent(value, due_ms)
            at = _ZERO + timedelta(milliseconds=due_ms)
            try:
                delivery = await self._producer.send(self._plan.shape.topic, value, partition=partition, deliver_at=at)
            except MemqError:
                await asyncio.sleep(1.0)
                continue
            watchers.append(asyncio.create_task(self._watch(value, delivery, cancels=draw.random() < CANCEL_RATE)))
            if draw.random() < COUNT_RATE:
                watchers.append(asyncio.create_task(self._count()))
            await asyncio.sleep(draw.uniform(0, self._plan.pace_s_max))
        await asyncio.gather(*watchers)
        with contextlib.suppress(MemqError):
            await self._producer.close()
            await self._admin.close()

    async def _count(self) -> None:
        question, found = self._rules.ask_counts(), None
        with contextlib.suppress(MemqError):
            delayed = await self._admin.delayed(self._plan.shape.topic)
            found = {partition: each.records for partition, each in delayed.items()}
        self._rules.counted(question, TOPIC_ID, found)

    async def _watch(self, value: bytes, delivery: AsyncDelivery, *, cancels: bool) -> None:
        try:
            ack = await delivery
        except MemqError:
            return  # its outcome is unknown
        self._held += 1
        self._rules.held(value, HoldId(ack.producer_id, ack.first_sequence))
        if not cancels:
            return
        await asyncio.sleep(self._node.random.uniform(0, CANCEL_S_MAX))
        self._rules.cancelling(value)
        for _ in range(self._node.random.randint(1, 2)):
            with contextlib.suppress(OutcomeUnknownError, MemqError):
                self._rules.cancelled(value, await self._producer.cancel(ack))

    def _now_s(self) -> float:
        """Return the true time."""
        clock = self._node.clock
        return (clock.wall_ms() - clock.offset_ms - EPOCH_MS) / 1_000
