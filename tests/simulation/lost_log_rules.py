"""Rules of a sweep whose queue lost entries, tried on copies: no object that they named is deleted.

Three trials, each of two passes, the second of which confirms the first at once:
a log is empty, or an owner that did not look has opened it again, for both passes;
one pointer between others of its epoch is gone, for both passes;
the queue shows only the beginning of a log, with an end to match, and all of it in the second pass. The second pass
also protects the objects if the passes take objects whose records no batch has.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence

from awscrt.checksums import crc32c

from memq.broker.sweep.log_reading import keys_of
from memq.broker.sweep.sweep import Sweep
from memq.format.key import is_staged_object
from memq.format.pointer import Pointer, encode_pointer
from memq.governor import Assignment
from memq.notification import Publication
from memq.notification.memory import MemoryQueue
from memq.runtime.clock import Clock
from memq.storage_handlers.memory import MemoryHandler
from memq.topic import ReadPartition, Topic
from tests.simulation.read_log import ReadLog


class OneTopic:
    """Knows one topic, all partitions of which had owners."""

    def __init__(self, topic: Topic) -> None:
        self._topic = topic

    async def topics(self) -> Sequence[Topic]:
        """See `memq.broker.sweep.sweep.TopicDirectory`."""
        return [self._topic]

    async def assignments(self) -> Sequence[Assignment]:
        """See `memq.broker.sweep.sweep.TopicDirectory`."""
        return [
            Assignment(topic_id=self._topic.id, partition=each.partition, epoch=1) for each in self._topic.partitions
        ]


class LostLogRules:
    """Sweeps one topic of a cluster; `logs` are what it has."""

    def __init__(
        self,
        cluster: str,
        topic: Topic,
        objects: Mapping[str, bytes],
        logs: Mapping[ReadPartition, ReadLog],
        fail: Callable[[str], None],
    ) -> None:
        self._cluster = cluster
        self._topic = topic
        self._objects = {key: body for key, body in objects.items() if "/sweep/" not in key}
        self._logs = {partition: log for partition, log in logs.items() if partition.topic_id == topic.id}
        self._fail = fail

    async def check(self, clock: Clock, draw: random.Random) -> None:
        """Lose something of one log, sweep everything, whatever its age, and check what is gone."""
        if not self._logs:
            return  # nothing has landed
        lost = draw.choice(list(self._logs))
        pointers = self._left(lost)
        whole = await self._queue(clock, lost, pointers)
        anew = draw.random() < 0.5
        shown = [_opened_after(pointers[-1])] if anew and pointers else []
        empty = await self._queue(clock, lost, shown, begin=0)
        named = {key for key in _keys(pointers) if not (anew and is_staged_object(key))}
        await self._sweep(clock, (empty, empty), named, f"the lost log of {lost}")
        rows = [each for each in pointers if self._leaves_a_gap(each, pointers)]
        if rows:
            row = draw.choice(rows)
            others = [each for each in pointers if each is not row]
            holed = await self._queue(clock, lost, others)
            alone = set(keys_of(row)) - _keys(others)
            number = f"{row.epoch}.{row.batch_sequence}"
            await self._sweep(clock, (holed, holed), alone, f"the lost pointer {number} of {lost}")
        short = await self._queue(clock, lost, pointers[: draw.randint(0, len(pointers))])
        what = f"the log of {lost}, half of which it was shown,"
        await self._sweep(clock, (short, whole), _keys(pointers), what)
        await self._sweep(clock, (short, whole), _keys(pointers), what, takes_unproven=True)

    async def _sweep(
        self,
        clock: Clock,
        queues: Sequence[MemoryQueue],
        named: set[str],
        what: str,
        *,
        takes_unproven: bool = False,
    ) -> None:
        """Run a pass with each of the queues; nothing may go that is `named`."""
        store = MemoryHandler(clock)
        for key, body in self._objects.items():
            await store.put(key, [body], crc32c(body))
        for queue in queues:
            sweep = Sweep(self._cluster, store, queue, OneTopic(self._topic), clock, lambda text: None, 0)
            sweep.takes_unproven = takes_unproven
            async for _ in sweep.run(0, 0):
                pass
        gone = [key for key in named if key in self._objects and key not in store.objects]
        if gone:
            self._fail(f"a sweep takes {len(gone)} objects that {what} named, the first is '{min(gone)}'")

    def _leaves_a_gap(self, pointer: Pointer, pointers: Sequence[Pointer]) -> bool:
        """Whether the log shows that a pointer is missing: batches before and behind it, and no other of its number."""
        place = (pointer.partition, pointer.epoch)
        numbers = [each.batch_sequence for each in pointers if each.kind == "data" and _place(each) == place]
        number = pointer.batch_sequence
        return pointer.kind == "data" and numbers.count(number) == 1 and min(numbers) < number < max(numbers)

    def _left(self, partition: ReadPartition) -> list[Pointer]:
        log = self._logs[partition]
        return [entry.pointer for entry in log.entries[log.queue_begin :]]

    async def _queue(
        self, clock: Clock, changed: ReadPartition, pointers: Sequence[Pointer], begin: int | None = None
    ) -> MemoryQueue:
        """Return a queue that has all logs, one of them with other pointers, from `begin` on, else where it was."""
        queue = MemoryQueue(clock, refuse="age")
        await queue.create(list(self._logs), 1 << 53)
        for partition, log in self._logs.items():
            queue.logs[partition].begin = log.queue_begin if begin is None or partition != changed else begin
            for pointer in pointers if partition == changed else self._left(partition):
                await queue.publish(
                    Publication(partition, pointer.partition, pointer.epoch, clock.wall_ms(), encode_pointer(pointer))
                )
        return queue


def _keys(pointers: Iterable[Pointer]) -> set[str]:
    return {key for pointer in pointers for key in keys_of(pointer)}


def _place(pointer: Pointer) -> tuple[int, int]:
    return pointer.partition, pointer.epoch


def _opened_after(last: Pointer) -> Pointer:
    return Pointer(
        kind="opened",
        cluster=last.cluster,
        topic=last.topic,
        topic_id=last.topic_id,
        partition=last.partition,
        epoch=1_000_000,
        batch_sequence=0,
    )
