"""Reads plain topics for the pop groups of a service partition (Q1).

A group reads ahead as far as a budget of items that are not over (`memq.queues.pop.keeper`). Its position and its
blocks are one decision. After any error a partition is opened again at the position that the state has: what was judged
for a decision that does not count is forgotten.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from memq.broker.partitions import Partitions
from memq.broker.service_partitions.pop_partition import PopPartition
from memq.broker.services import Services
from memq.errors import MemqError, NotFoundError
from memq.notification.log_reader import valid_span
from memq.queues.block import QueueBlock
from memq.queues.keeper import QueueKeeper
from memq.queues.pop.groups import BeginPopDecision, PopGroup, PopPosition, place_of, topic_of
from memq.runtime.tasks import TaskOwner
from memq.topic import ReadPartition, Topic, read_partitions

WAIT_S = 1.0  # for new pointers, or for room
CHECK_S = 5.0  # between two checks of what retention has taken
FORGET_S = 30.0  # between two proofs that a topic was deleted
FAILED_PAUSE_S = 1.0


class PopReaders:
    """Reads for all pop groups of one service partition, while its log is open here."""

    def __init__(self, services: Services, partitions: Partitions, keeper: QueueKeeper, tasks: TaskOwner) -> None:
        self._services = services
        self._partitions = partitions
        self._keeper = keeper
        self._tasks = tasks

    async def run(self) -> None:
        """Read until cancelled."""
        pop = self._keeper.pop
        running: dict[tuple[str, int], asyncio.Task[None]] = {}
        while True:
            pop.changed.clear()
            running = {key: task for key, task in running.items() if not task.done()}
            for group in list(pop.groups.values()):
                key = group.queue, group.life
                if key not in running:
                    reader = _GroupReader(self._services, self._partitions, self._keeper, group)
                    running[key] = self._tasks.start(reader.run(), f"read for {group.queue}")
            strays = pop.strays()
            if strays:
                await self._end(strays)
            with suppress(TimeoutError):
                async with asyncio.timeout(WAIT_S if strays else None):
                    await pop.changed.wait()

    async def _end(self, strays: list[QueueBlock]) -> None:
        """End the items of groups that were removed; those that workers have end with their leases."""
        try:
            await self._keeper.pop.end(strays, removed=True)
        except MemqError as error:
            self._services.events.warning("pop-retry", f"items of removed pop groups: {error}")
            await asyncio.sleep(FAILED_PAUSE_S)


class _GroupReader:
    """Reads the topic of one pop group, in one life of it."""

    def __init__(self, services: Services, partitions: Partitions, keeper: QueueKeeper, group: PopGroup) -> None:
        self._services = services
        self._partitions = partitions
        self._pop = keeper.pop
        self._queue, self._life = group.queue, group.life
        self._open: dict[int, PopPartition] = {}
        self._begins: dict[int, int] = {}  # the first offsets of the last check
        self._checked_s = 0.0
        self._gone_s = 0.0  # when the deletion of the topic was proven first
        self._turn = 0

    async def run(self) -> None:
        """Read until the group was removed, or begun again."""
        while (group := self._pop.group(self._queue, self._life)) is not None:
            try:
                topic = await self._topic(group)
                moved = await self._round(group, topic) if topic is not None else False
            except MemqError as error:
                self._services.events.warning("pop-retry", f"pop group '{self._queue}': {error}")
                self._open.clear()
                await asyncio.sleep(FAILED_PAUSE_S)
                continue
            if topic is None:
                await asyncio.sleep(WAIT_S)
            elif not moved:
                await self._wait(topic)

    async def _round(self, group: PopGroup, topic: Topic) -> bool:
        """Read a page of each partition; return whether something was read."""
        logs = read_partitions(topic)
        missing = [log for log in logs if group.position(log.partition) is None]
        if missing:  # of a topic that has got more read partitions: all their records are new
            positions = tuple([PopPosition(log.partition, await self._begin_of(log)) for log in missing])
            terms = group.lease_ms, group.attempts_max
            await self._pop.begin(BeginPopDecision(group.queue, group.topic_id, *terms, positions))
            return True
        now_s = self._services.runtime.clock.monotonic()
        if now_s >= self._checked_s + CHECK_S:
            self._checked_s = now_s
            await self._check(logs)
        self._turn += 1
        first, moved = self._turn % len(logs), False
        for log in logs[first:] + logs[:first]:
            if not self._pop.has_room(self._queue):
                break
            part = self._open.get(log.partition)
            if part is None:
                part = self._open[log.partition] = PopPartition(self._services, topic, log, self._pop, group)
                await part.open()
            moved |= await part.read()
            if part.is_done:
                del self._open[log.partition]
        return moved

    async def _begin_of(self, log: ReadPartition) -> int:
        return (await valid_span(self._services.pointers, log)).begin

    async def _wait(self, topic: Topic) -> None:
        """Wait for new pointers, or for room."""
        if not self._pop.has_room(self._queue):
            await self._pop.until_moved(WAIT_S)
            return
        ends = {log: self._open[log.partition].next for log in read_partitions(topic) if log.partition in self._open}
        with suppress(MemqError):
            await self._services.pointers.wait(ends, WAIT_S)

    async def _topic(self, group: PopGroup) -> Topic | None:
        """Return the topic of the group; None while it seems to be deleted.

        A topic that was made again takes the place of the former one; without one, the group goes. A deletion is proven
        twice, half a minute apart. Then the items of the former topic end.
        """
        name = topic_of(group.queue)
        try:
            topic = await self._partitions.current_topic(name, group.topic_id)
        except NotFoundError:
            topic = None
        if topic is not None:
            self._gone_s = 0.0
            return topic
        now_s = self._services.runtime.clock.monotonic()
        if not await self._services.coordinator.deleted(group.topic_id):
            self._gone_s = 0.0
        elif not self._gone_s:
            self._gone_s = now_s
        elif now_s >= self._gone_s + FORGET_S:
            await self._replace(group, name)
        return None

    async def _replace(self, group: PopGroup, name: str) -> None:
        with suppress(NotFoundError):
            made = await self._partitions.current_topic(name)
            positions = tuple([PopPosition(log.partition, await self._begin_of(log)) for log in read_partitions(made)])
            terms = group.lease_ms, group.attempts_max
            decision = BeginPopDecision(group.queue, made.id, *terms, positions, replaced=group.topic_id)
            await self._pop.begin(decision)
            self._services.events.warning(
                "pop-topic-replaced", f"pop group '{self._queue}' reads the new topic '{name}'"
            )
            return
        await self._pop.remove(group.queue, group.life)
        self._services.events.warning("pop-group-removed", f"pop group '{self._queue}': its topic was deleted")

    async def _check(self, logs: list[ReadPartition]) -> None:
        """End the items whose pointers retention took, as two checks say."""
        for log in logs:
            begin = await self._begin_of(log)
            before = min(begin, self._begins.get(log.partition, 0))
            self._begins[log.partition] = begin
            gone = [
                block
                for block, place in ((each, place_of(each.key)) for each in self._pop.blocks_of(self._queue))
                if place.life == self._life and place.partition == log.partition and place.offset < before
            ]
            ended = await self._pop.end(gone, removed=False) if gone else 0
            if ended:
                text = f"pop group '{self._queue}': retention took {ended} records that were not acked"
                self._services.events.warning("pop-records-expired", text)
