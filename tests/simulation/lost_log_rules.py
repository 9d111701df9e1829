"""What a sweep is promised whose queue has lost a log, tried on copies of store and queue: nothing goes that it named.

The log is empty, or an owner that did not look has opened it anew.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from awscrt.checksums import crc32c

from memq.broker.pointers import keys_of
from memq.broker.sweep import Sweep
from memq.clock import Clock
from memq.format.key import is_staged_object
from memq.format.pointer import Pointer, encode_pointer
from memq.governor import Assignment
from memq.notification import Publication
from memq.notification.memory import MemoryQueue
from memq.storage_handlers.memory import MemoryHandler
from memq.topic import ReadPartition, Topic
from tests.simulation.read_log import ReadLog


class OneTopic:
    """Knows one topic, all partitions of which had owners."""

    def __init__(self, topic: Topic) -> None:
        self._topic = topic

    async def topics(self) -> Sequence[Topic]:
        """See `memq.broker.sweep.Topics`."""
        return [self._topic]

    async def assignments(self) -> Sequence[Assignment]:
        """See `memq.broker.sweep.Topics`."""
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
        self._objects = objects
        self._logs = {partition: log for partition, log in logs.items() if partition.topic_id == topic.id}
        self._fail = fail

    async def check(self, clock: Clock, draw: random.Random) -> None:
        """Lose one log, sweep everything, whatever its age, and look at what would go."""
        if not self._logs:
            return  # nothing has landed
        store = MemoryHandler(clock)
        for key, body in self._objects.items():
            await store.put(key, [body], crc32c(body))
        lost = draw.choice(list(self._logs))
        anew = draw.random() < 0.5
        queue = await self._queue(clock, lost, anew=anew)
        named = {key for entry in self._left(lost) for key in keys_of(entry) if not (anew and is_staged_object(key))}
        sweep = Sweep(self._cluster, store, queue, OneTopic(self._topic), clock, lambda text: None)
        gone = [found.key async for found in sweep.find(0, 0) if found.key in named]
        if gone:
            self._fail(f"a sweep takes {len(gone)} objects that the lost log of {lost} named, the first is '{gone[0]}'")

    def _left(self, partition: ReadPartition) -> list[Pointer]:
        log = self._logs[partition]
        return [entry.pointer for entry in log.entries[log.queue_begin :]]

    async def _queue(self, clock: Clock, lost: ReadPartition, *, anew: bool) -> MemoryQueue:
        """Return a queue that has all logs but one, and that one with nothing but `opened` when it begins `anew`."""
        queue = MemoryQueue(clock, refuse="age")
        await queue.create(list(self._logs), 1 << 53)
        for partition, log in self._logs.items():
            pointers = self._left(partition)
            if partition == lost:
                pointers = [_opened_after(pointers[-1])] if anew and pointers else []
            else:
                queue._logs[partition].begin = log.queue_begin
            for pointer in pointers:
                await queue.publish(
                    Publication(partition, pointer.partition, pointer.epoch, clock.wall_ms(), encode_pointer(pointer))
                )
        return queue


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
