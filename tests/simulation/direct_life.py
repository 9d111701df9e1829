"""A Spark writer with low latency: a driver and its tasks in one process, whose rows come again in any order.

A task is tried until a try of it has ended well. Tries are killed between their steps, given up, or left running while
the next one begins, as Spark does with a slow task. A new checkpoint counts its batches from 0 again.

Owners and readers know a block for the dedup window W after its first copy. A broker takes a block until D after its
making, so what a later try makes is known for W - D - 2 (S + clock error): the plan's `retry_ms`. A task that is not
written by then, over all lives of the process, is left.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from memq.client.bulk.direct_writer import DirectIdentity, DirectWriter
from memq.errors import MemqError
from memq.runtime.runtime import Runtime
from memq.simulation.world.node import SimNode
from tests.simulation.checker import Checker
from tests.simulation.plan import Plan

TASKS_MAX = 2
SIZES = (0, 10, 300, 3_000)
RETRY_S = 0.3
REORDER_RATE, NEW_CHECKPOINT_RATE = 0.6, 0.2
LEFT_RATE, KILL_RATE = 0.3, 0.1  # of tries: left running at a step, and ended with the process at one


@dataclass(slots=True)
class Checkpoint:
    """The state that outlives the process: which batches are written, and the rows of begun ones."""

    number: int = 0
    batches: int = 0  # of this checkpoint
    done: int = 0  # of all
    rows: dict[tuple[int, int, int], list[bytes]] = field(default_factory=dict)  # by checkpoint, batch, task
    begun_s: dict[tuple[int, int, int], float] = field(default_factory=dict)  # virtual time of the first try of each


class DirectLife:
    """One life of the process. `kill` ends it, and lets it start again."""

    def __init__(
        self,
        plan: Plan,
        node: SimNode,
        runtime: Runtime,
        brokers: list[str],
        checker: Checker,
        checkpoint: Checkpoint,
        kill: Callable[[], None],
    ) -> None:
        self._plan = plan
        self._node = node
        self._draw: random.Random = node.random
        self._runtime = runtime
        self._brokers = brokers
        self._checker = checker
        self._known = checkpoint
        self._kill = kill
        self._tries: list[asyncio.Task[bool]] = []

    async def run(self, batches: int) -> None:
        """Write until so many batches are done, over all lives."""
        known = self._known
        if known.done and self._draw.random() < NEW_CHECKPOINT_RATE:
            known.number, known.batches = known.number + 1, 0
        while known.done < batches:
            tasks = range(self._draw.randint(1, TASKS_MAX))
            await asyncio.gather(*[self._task(task) for task in tasks])
            known.batches, known.done = known.batches + 1, known.done + 1
            await asyncio.sleep(self._draw.uniform(0, self._plan.pace_s_max))
        for each in self._tries:
            each.cancel()
        await asyncio.gather(*self._tries, return_exceptions=True)

    async def _task(self, task: int) -> None:
        """Try until one of the tries has ended well, or it is too late for another one."""
        rows = self._rows(task)
        while self._left_s(task) > 0:
            if await self._tried(task, rows):
                return
            await asyncio.sleep(self._draw.uniform(0, RETRY_S))

    def _left_s(self, task: int) -> float:
        """Return for how long the task may make blocks; a process that is paused twice makes them later."""
        known, plan, now_s = self._known, self._plan, self._node.world.now
        begun_s = known.begun_s.setdefault((known.number, known.batches, task), now_s)
        return begun_s + plan.retry_ms / 1000 - 2 * plan.faults.chaos.pause_s_max - now_s

    def _rows(self, task: int) -> list[bytes]:
        """Return the rows of a task, the same for each of its tries."""
        number, batch = self._known.number, self._known.batches
        rows = self._known.rows.get((number, batch, task))
        if rows is None:
            rows = self._known.rows[number, batch, task] = []
            for row in range(self._draw.randint(1, 4 * self._plan.block_records_max)):
                stream = f"{self._node.name}/{number}/{batch}/{task}/{row}"
                rows.append(f"{stream} ".encode() + self._draw.randbytes(self._draw.choice(SIZES)))
                self._checker.sent(stream, 0, row, rows[-1], keyed=True, repeats=True)
        return rows

    async def _tried(self, task: int, rows: list[bytes]) -> bool:
        """Try once; the try may continue in the background."""
        rows = list(rows)
        if self._draw.random() < REORDER_RATE:
            self._draw.shuffle(rows)
        work = asyncio.create_task(self._attempt(task, rows))
        if self._draw.random() < LEFT_RATE:
            self._tries.append(work)
            await asyncio.sleep(self._draw.uniform(0, RETRY_S))
            return False
        try:
            return await work
        finally:
            work.cancel()

    async def _attempt(self, task: int, rows: list[bytes]) -> bool:
        """Write all rows; True when they are in the queue."""
        known, draw = self._known, self._draw
        identity = DirectIdentity("w", f"{self._node.name}/{known.number}", known.batches, task)
        writer = DirectWriter(self._brokers, identity, codec=draw.choice(["none", "zstd"]), runtime=self._runtime)
        last = draw.randrange(len(rows) + 1) if draw.random() < KILL_RATE else -1
        try:
            async with asyncio.timeout(max(0.0, self._left_s(task))):
                for place, row in enumerate(rows):
                    if place == last:
                        self._kill()
                    await writer.add(self._plan.shape.topic, row, partition=self._partition(row))
                    await asyncio.sleep(draw.choice([0, 0, 0.001, 0.05]))
                if last == len(rows):
                    self._kill()
                await writer.finish()
        except (MemqError, TimeoutError):
            return False
        finally:
            with suppress(MemqError):
                await writer.abandon()
        for row in rows:
            self._checker.ack(row)
        return True

    def _partition(self, row: bytes) -> int | None:
        """Return where a row goes: all tries send it there."""
        return None if self._plan.keyed else len(row) % self._plan.shape.partitions
