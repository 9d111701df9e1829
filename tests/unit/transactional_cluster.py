"""A producer's transactions with a cluster that answers as a test says, and a consumer with positions."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from memq.client.producer.fields import RecordFields
from memq.client.producer.settings import ProducerSettings
from memq.client.transactions import core as core_module
from memq.client.transactions import open_transaction
from memq.client.transactions.core import TransactionalCore
from memq.format.blocks.header import check_block, scope_of
from memq.protocol.admin_messages import AdminAnswer, AdminRequest
from memq.protocol.frames import Api
from memq.protocol.transaction_messages import AwaitTransaction, EndTransaction, HoldTransaction
from memq.runtime.clock import Clock
from memq.runtime.runtime import Runtime
from memq.topic import Committed, Position, ReadPartition, Topic, equal_slots
from tests.skipping_loop import LoopClock, run_skipping, skip

TOPIC = Topic(name="clicks", id="ab" * 16, created_ms=0, partitions=equal_slots(4))
SETTINGS = ProducerSettings(
    codec="none",
    transactional_id="pay",
    transaction_group="g",
    transaction_timeout_ms=7_000,
    delivery_timeout_s=20.0,
)
INPUT = ReadPartition("in", "cd" * 16, 0)


def set_bound(monkeypatch: pytest.MonkeyPatch, name: str, value: int) -> None:
    """Set a bound of transactions where it is used."""
    for module in (core_module, open_transaction):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, value)


class Cluster:
    """Answers requests about transactions; the next ones of a kind fail with `errors`."""

    def __init__(self, clock: Clock | None = None, **settings: Any) -> None:
        self.asked: list[Any] = []
        self.times: list[float] = []
        self.errors: dict[type, list[BaseException]] = {}
        self.committed: set[int] = set()  # the transactions that are committed already
        self.invisible = 0  # so many requests are answered before all records are visible
        self.wait_s = 0.0  # of each of them
        self.on_asked: Callable[[Any], None] = lambda ask: None
        self.clock = clock or LoopClock()
        runtime = Runtime(clock=self.clock, random=Least(1))
        self.settings = replace(SETTINGS, **settings)
        self.noted: list[tuple[int, str, int, int]] = []  # partition, stage, minute and records of reports
        self.core = TransactionalCore(self.settings, runtime, cast(Any, self.route))
        self.core.note_held = self.note

    def note(self, topic: Topic, partition: int, stage: str, minute: int, records: int) -> None:
        assert topic is TOPIC
        self.noted.append((partition, stage, minute, records))

    async def route(self, api: Api, request: AdminRequest, answer: type, *, timeout_s: float) -> AdminAnswer:
        assert (api, answer, timeout_s) == (Api.ADMIN, AdminAnswer, self.settings.open_timeout_s)
        self.asked.append(request.ask)
        self.times.append(asyncio.get_running_loop().time())
        self.on_asked(request.ask)
        await asyncio.sleep(0)
        errors = self.errors.get(type(request.ask))
        if errors:
            raise errors.pop(0)
        end = request.ask if isinstance(request.ask, EndTransaction) else None
        committed = end is not None and (end.commit or end.transaction.number in self.committed)
        if isinstance(request.ask, AwaitTransaction):
            await skip(self.wait_s)
            self.invisible -= 1
        return AdminAnswer(transactional=77, committed=committed, visible=self.invisible < 0)

    def ends(self) -> list[tuple[int, bool, int]]:
        return [
            (each.transaction.number, each.commit, each.blocks)
            for each in self.asked
            if isinstance(each, EndTransaction)
        ]

    def held(self) -> list[list[tuple[int, int]]]:
        """Return partition and size of the blocks of each request."""
        return [
            [(block.partition, len(block.block)) for block in each.blocks]
            for each in self.asked
            if isinstance(each, HoldTransaction)
        ]


class Least(random.Random):
    """Draws the least of each range, and pauses of half of their longest time."""

    def uniform(self, a: float, b: float) -> float:
        return b / 2

    def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:
        return 0 if stop is None else start


class Way:
    """A route to the partitions of the topic."""

    delivery_timeout_s = SETTINGS.delivery_timeout_s

    def __init__(self, partitions: tuple[int, ...] = (0, 1, 2, 3)) -> None:
        self.topic = TOPIC
        self.map = SimpleNamespace(index_of=partitions.index, index_of_key=lambda key: key[0] % len(partitions))
        self.buffers = [
            SimpleNamespace(partition=each, scope=scope_of(TOPIC.id_bytes, each), slots=(each, each + 5))
            for each in partitions
        ]


def fields(value: bytes, key: bytes | None = None) -> RecordFields:
    return RecordFields(value, key, None, 5, None)


def on_cluster(work: Callable[[Cluster], Awaitable[None]], **settings: Any) -> None:
    """Run a test."""

    async def run() -> None:
        await skip(1)
        await work(Cluster(**settings))

    run_skipping(run())


class Reader:
    """A consumer whose finished batches end at `offset`."""

    def __init__(self, group: str = "g", *, auto_commit: bool = False) -> None:
        self.settings = SimpleNamespace(group=group, auto_commit=auto_commit)
        self.offset = 5
        self.stored: list[Any] = []
        self.batches: list[object] = []

    async def finish(self, batch: object) -> tuple[Any, object]:
        self.batches.append(batch)
        return self, "only"

    def take(self, only: object) -> Any:
        assert only == "only"
        at = {INPUT: Committed(Position(0, self.offset))}
        self.offset += 1
        before = {INPUT: Committed(Position(0, 2))}
        return SimpleNamespace(before=before, after=at, member="m", generation=3)

    def note_stored(self, positions: Any) -> None:
        self.stored.append(positions)


def check(block: bytes, partition: int) -> Any:
    return check_block(block, scope_of(TOPIC.id_bytes, partition))
