"""State logs over a queue and a store in memory whose calls fail, hang and answer wrongly. On virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, cast

from memq.errors import MemqError, QueueError
from memq.format.blocks.header import Buffer
from memq.format.state_log.entry import (
    StateEntry,
    StateSnapshot,
    decode_state_entry,
    encode_state_entry,
)
from memq.notification import Entries, Entry, Publication, Span
from memq.notification.memory import MemoryQueue
from memq.runtime.runtime import Runtime
from memq.state_log import Machines
from memq.state_log.state_log import BACKOFF_S_MAX, StateLog, StateLogSettings
from memq.storage_handlers.memory import MemoryHandler
from memq.topic import ReadPartition
from tests.model.state_log import machines
from tests.skipping_loop import LongestWait, LoopClock, now_s, run_skipping, skip

LOG = ReadPartition("_memq_state", "ab" * 16, 3)
ANSWER_S, SNAPSHOT_S, KEY_S, DRAIN_S = 5.0, 60.0, 100.0, 3.0
SETTINGS = StateLogSettings(
    "memq", "b1", answer_s=ANSWER_S, snapshot_s=SNAPSHOT_S, key_valid_s=KEY_S, drain_s=DRAIN_S, callers_max=3
)
NAME = "state log 3 of topic '_memq_state'"


class Queue(MemoryQueue):
    """Notes the time of each call. The next calls of a kind fail with `errors`, hang, or get another answer."""

    def __init__(self) -> None:
        super().__init__(LoopClock())
        self.errors: dict[str, list[Exception]] = {}
        self.calls: list[tuple[str, float]] = []
        self.hangs: set[str] = set()
        self.changes: list[Callable[[Any], Any]] = []  # of answers to reads
        self.span_ends: list[int] = []
        self.lands = False  # whether a publish lands, and fails
        self.delays_s: list[float] = []  # of the next publishes

    async def _call(self, kind: str) -> None:
        self.calls.append((kind, now_s()))
        if kind in self.hangs:
            await asyncio.get_running_loop().create_future()
        if self.errors.get(kind):
            raise self.errors[kind].pop(0)

    def times(self, kind: str) -> list[float]:
        return [at_s for each, at_s in self.calls if each == kind]

    async def publish(self, publication: Publication) -> int:
        await self._call("publish")
        await skip(self.delays_s.pop(0) if self.delays_s else 0)
        offset = await super().publish(publication)
        if self.lands:
            raise QueueError("no answer")
        return offset

    async def read(self, partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
        await self._call("read")
        found = await super().read(partition, offset, bytes_max)
        return self.changes.pop(0)(found) if self.changes else found

    async def span(self, partition: ReadPartition) -> Span:
        await self._call("span")
        found = await super().span(partition)
        return Span(found.begin, self.span_ends.pop(0)) if self.span_ends else found

    async def trim(self, partition: ReadPartition, before: int) -> None:
        await self._call("trim")
        await super().trim(partition, before)


class Store(MemoryHandler):
    """Notes the keys of puts; the next calls of a kind fail with `errors`, or take `delay_s`."""

    def __init__(self) -> None:
        super().__init__(LoopClock())
        self.puts: list[tuple[str, float]] = []
        self.errors: dict[str, list[Exception]] = {}
        self.delay_s = 0.0

    async def put(self, key: str, buffers: Sequence[Buffer], checksum: int) -> None:
        self.puts.append((key, now_s()))
        await skip(self.delay_s)
        self._fail("put")
        await super().put(key, buffers, checksum)

    async def get(self, key: str, *, checked: bool = True) -> bytes:
        self._fail("get")
        return await super().get(key, checked=checked)

    async def delete(self, key: str) -> None:
        self._fail("delete")
        await super().delete(key)

    def _fail(self, kind: str) -> None:
        if self.errors.get(kind):
            raise self.errors[kind].pop(0)


class Rig:
    """State logs over one queue and one store."""

    def __init__(self) -> None:
        self.queue, self.store = Queue(), Store()
        self.events: list[tuple[str, str]] = []
        self.lost: list[MemqError] = []
        self.logs: list[StateLog] = []

    def warning(self, event: str, text: str, *_: object) -> None:
        """See `EventLog.warning`."""
        self.events.append((event, text))

    error = info = warning

    def names(self) -> list[str]:
        return [event for event, _ in self.events]

    def log(self, made: Machines = machines, **settings: Any) -> StateLog:
        """Return a log that is not open. It pauses for the longest time of each back-off."""
        runtime = Runtime(clock=LoopClock(), random=LongestWait(1))
        chosen = replace(SETTINGS, **settings)
        log = StateLog(
            self.queue,
            self.store,
            runtime,
            cast(Any, self),
            LOG,
            chosen,
            made,
            self.lost.append,
        )
        self.logs.append(log)
        return log

    async def opened(self, epoch: int = 1, made: Machines = machines, **settings: Any) -> StateLog:
        log = self.log(made, **settings)
        await log.open(epoch)
        return log

    async def put(self, epoch: int, number: int, content: Any) -> int:
        """Publish an entry of another owner."""
        body = encode_state_entry(StateEntry(epoch, number, content))
        return await MemoryQueue.publish(self.queue, Publication(LOG, 3, epoch, LoopClock().wall_ms(), body))

    def contents(self) -> list[Any]:
        return [decode_state_entry(entry.body).content for entry in self.queue.logs[LOG].entries]

    def snapshots(self) -> list[StateSnapshot]:
        return [each for each in self.contents() if isinstance(each, StateSnapshot)]

    def damage(self, at: int, body: bytes = b"") -> None:
        entries = self.queue.logs[LOG].entries
        entries[at] = Entry(entries[at].offset, entries[at].time_ms, body)


def on_rig(work: Callable[[Rig], Awaitable[None]]) -> None:
    """Run a test, and close its logs."""

    async def run() -> None:
        rig = Rig()
        await rig.queue.create([LOG], 30_000)
        await skip(10)
        try:
            await work(rig)
        finally:
            for log in rig.logs:
                await log.close()

    run_skipping(run())


def claim(slot: int, request: int) -> bytes:
    return bytes((slot, request))


def pauses(count: int) -> list[float]:
    """Return the times of tries after the first, in seconds after it."""
    ends, at_s = [], 0.0
    for tries in range(1, count + 1):
        at_s += min(BACKOFF_S_MAX, 0.05 * 2**tries)
        ends.append(at_s)
    return ends
