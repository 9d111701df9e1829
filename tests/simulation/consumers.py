"""The consumer of the product as a process: it reads for its group, and starts again after an error."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from memq.client.consumer.batch import Batch, TopicPartition
from memq.client.consumer.consumer import AsyncConsumer
from memq.errors import (
    CorruptDataError,
    InvalidRequestError,
    MemqError,
    NotFoundError,
    PositionExpiredError,
    PositionLostError,
)
from memq.runtime.runtime import Runtime
from memq.simulation.cluster import PORT
from memq.simulation.world.node import SimNode
from memq.topic import BROADCAST_GROUP, Position, ReadPartition, Topic
from tests.simulation.checked_cluster import CheckedCluster
from tests.simulation.checker import Checker
from tests.simulation.group_rules import GroupRules
from tests.simulation.log_truth import watch_lag
from tests.simulation.wishes import Wish, facets_of

WANDER_RATE = 0.05
WANDERS_MAX = 40  # of one life: a reader that always seeks back reaches the end of a long log only by chance
PAUSE_S_MAX = 2.0


async def run_consumer(
    node: SimNode,
    runtime: Runtime,
    cluster: CheckedCluster,
    group: str,
    *,
    wanders: bool,
    wish: Wish | None = None,
) -> None:
    """Consume until the process dies. With `wanders`, the consumer pauses and seeks back now and then.

    `wish` is the filter of the group.
    """
    life = 0
    while True:
        life += 1
        name = f"{node.name}#{node.index}.{life}"
        reader = Reader(name, group, node, cluster, [(cluster.topic, cluster.checker)], wanders=wanders, wish=wish)
        try:
            await reader.run(runtime)
        except MemqError as error:
            cluster.world.trace.event(cluster.world.now, "consumer failed", reader.name, type(error).__name__)
            await asyncio.sleep(node.random.uniform(0.05, 0.5))


def is_explained(damage: CorruptDataError, misreads: Callable[[str], int]) -> bool:
    """Whether the store gave a wrong answer for an object that the error names; stored bytes never change here.

    Two answers must agree before a reader reports damage. One of them may come from the memory of a broker, which is
    not counted: memory and store may both answer with the same foreign bytes.
    """
    return any(misreads(name) for name in re.findall("'([^']+)'", str(damage)))


class Reader:
    """One life of a consumer of some topics; it reports what it reads of each to the checker of that topic."""

    def __init__(
        self,
        name: str,
        group: str,
        node: SimNode,
        cluster: CheckedCluster,
        topics: Sequence[tuple[Topic, Checker]],
        *,
        wanders: bool,
        wish: Wish | None = None,
    ) -> None:
        self.name = name
        self._wish = wish
        self._wanders_left = WANDERS_MAX if wanders else 0
        self._group = group
        self._node = node
        self._draw = node.random
        self._cluster = cluster
        self._ids = {topic.name: topic.id for topic, _ in topics}
        self._checkers = {topic.id: checker for topic, checker in topics}
        self._paused: dict[ReadPartition, float] = {}  # until when, by the loop's clock
        self._rebalances = 0

    async def run(self, runtime: Runtime) -> None:
        """Read for ever; an error about damage that no answer explains is a finding. Raises: MemqError."""
        try:
            await self._read(runtime)
        except CorruptDataError as error:
            world = self._cluster.world
            if not is_explained(error, world.misreads):
                world.fail(f"{self.name} reports damage, but all answers to reads of the object were right", error)
            raise

    async def _read(self, runtime: Runtime) -> None:
        draw, loop = self._draw, asyncio.get_running_loop()
        for checker in self._checkers.values():
            checker.groups.begin(self.name)
        auto_commit, wanders = draw.random() < 0.5, bool(self._wanders_left)
        consumer = AsyncConsumer(
            [f"{host}:{PORT}" for host, _port in self._cluster.addresses()],
            list(self._ids),
            audit=len(self._ids) == 1,  # the rules of reports know the groups that read all of one topic
            group=None if self._is_broadcast else self._group,
            broadcast=self._group.removeprefix(f"{BROADCAST_GROUP}-") if self._is_broadcast else None,
            auto_commit=auto_commit,
            auto_commit_interval_ms=draw.choice([50, 500]),
            session_timeout_ms=draw.choice([1_000, 3_000]),
            prefetch_bytes_max=min(self._cluster.shape.prefetch_bytes_max, draw.choice([8 << 10, 64 << 10, 1 << 20])),
            on_assigned=self._assigned,
            tags=None if self._wish is None else self._wish.tags,
            where=None if self._wish is None else self._wish.where,
            runtime=runtime,
        )
        async with consumer, self._asked_for_lag(consumer):
            while True:
                try:
                    batch = await consumer.poll(timeout=draw.uniform(0.1, 2.0))
                except PositionExpiredError as error:
                    await self._go_on(consumer, error)
                    continue
                except (PositionLostError, InvalidRequestError):  # its position is after the end of the log, or was
                    if not await self._go_back(consumer):
                        raise
                    continue
                except NotFoundError:
                    if len(self._ids) == 1:
                        raise
                    continue  # one of the topics is gone: the other continues
                if batch is not None:
                    self._note_taken(batch)
                    await self._take(batch)
                    if not auto_commit and draw.random() < 0.5:
                        await consumer.commit(batch)
                        partition = self._partition(batch.topic, batch.partition)
                        self._checker(partition).commits.returned(self._group, partition, batch.next)
                    await asyncio.sleep(draw.choice([0, 0, 0.001, 0.05]))
                elif self._wish is not None and not auto_commit:
                    await consumer.commit()  # what the filter left out since the last wanted record
                if wanders:
                    self._resume(consumer, loop.time())
                    await self._wander(consumer, loop.time())

    @asynccontextmanager
    async def _asked_for_lag(self, consumer: AsyncConsumer) -> AsyncIterator[None]:
        """Compare the lag of a consumer with the logs during the block, if planned and it never seeks back."""
        truth = self._cluster.truth
        if truth is None or self._wanders_left or list(self._ids.values()) != [self._cluster.topic.id]:
            yield
            return
        asking = asyncio.create_task(watch_lag(consumer, lambda: self._rebalances, truth), name="lag")
        try:
            yield
        finally:
            asking.cancel()

    async def _go_on(self, consumer: AsyncConsumer, error: PositionExpiredError) -> None:
        """Continue with the first that retention left; it may be faster once more."""
        while True:
            first = Position.parse(error.first)
            partition = self._partition(error.topic, first.read_partition)
            try:
                await consumer.seek(partition.topic, partition.partition, first)
            except PositionExpiredError as again:
                error = again
            else:
                self._groups(partition).expired(self.name, partition, first)
                return

    async def _go_back(self, consumer: AsyncConsumer) -> bool:
        """Seek to the first lost pointer, as an operator sets a group; return False if no log lost any."""
        found = False
        for place, position in consumer.position().items():
            partition = self._partition(*place)
            log = self._checker(partition).logs.get(partition)
            if log is None or log.cut_at is None:
                continue
            first = Position(place.partition, log.cut_at)
            if position <= first:
                continue
            found = True
            try:
                await consumer.seek(place.topic, place.partition, first)
            except PositionExpiredError as error:  # retention has taken what was left there
                await self._go_on(consumer, error)
            else:
                self._groups(partition).seek(self.name, partition, (first.pointer_offset, 0))
        return found

    @property
    def _is_broadcast(self) -> bool:
        return self._group.startswith(BROADCAST_GROUP)

    async def _wander(self, consumer: AsyncConsumer, now_s: float) -> None:
        """Now and then pause a partition for a while, or seek back to a position that the group has passed.

        Not in a healed world, because a slow reader of compacted parts needs all of its time to reach the end.
        """
        if self._cluster.healed or not self._wanders_left or self._draw.random() >= WANDER_RATE:
            return
        self._wanders_left -= 1
        places = list(consumer.position())
        if not places:
            return
        place = self._draw.choice(places)
        partition = self._partition(*place)
        if self._draw.random() < 0.5:
            consumer.pause(place.topic, place.partition)
            self._paused[partition] = now_s + self._draw.uniform(0, PAUSE_S_MAX)
            self._groups(partition).pause(self.name, partition, paused=True)
            return
        iterated = self._groups(partition).iterated(self._group, partition)
        if iterated:
            record = self._checker(partition).logs[partition].stream[self._draw.choice(iterated)]
            position = Position(place.partition, record.offset, record.record_index)
            try:
                await consumer.seek(place.topic, place.partition, position)
            except PositionExpiredError:
                return  # retention was faster
            self._groups(partition).seek(self.name, partition, (record.offset, record.record_index))

    def _resume(self, consumer: AsyncConsumer, now_s: float) -> None:
        """Resume assigned partitions that were paused for long enough."""
        for partition in [partition for partition, until_s in self._paused.items() if until_s <= now_s]:
            del self._paused[partition]
            self._groups(partition).pause(self.name, partition, paused=False)
            if (partition.topic, partition.partition) in consumer.position():
                consumer.resume(partition.topic, partition.partition)

    def _partition(self, topic: str, number: int) -> ReadPartition:
        return ReadPartition(topic, self._ids[topic], number)

    def _checker(self, partition: ReadPartition) -> Checker:
        return self._checkers[partition.topic_id]

    def _groups(self, partition: ReadPartition) -> GroupRules:
        return self._checker(partition).groups

    def _assigned(self, places: list[TopicPartition]) -> None:
        self._rebalances += 1
        for place in places:
            partition = self._partition(*place)
            self._paused.pop(partition, None)  # it comes without what was asked for before
            self._groups(partition).assign(self.name, self._group, partition)

    def _note_taken(self, batch: Batch) -> None:
        partition = self._partition(batch.topic, batch.partition)
        if not self._is_broadcast:  # a newer consumer of the name takes the partitions at once
            self._groups(partition).take(self.name, self._group, partition, self._node.paused_until)

    async def _take(self, batch: Batch) -> None:
        partition = self._partition(batch.topic, batch.partition)
        groups = self._groups(partition)
        for record in batch:
            if self._wanders_left and self._draw.random() < WANDER_RATE:
                await asyncio.sleep(self._draw.uniform(0, 0.05))  # what is not iterated yet must not be stored
            at = record.position
            value = record.value or b""
            if self._wish is not None and (record.tag, tuple(record.headers)) != facets_of(value):
                self._cluster.world.fail(f"record {value[:60]!r} has tag {record.tag} and headers {record.headers}")
            groups.consume(self.name, self._group, partition, (at.pointer_offset, at.record_index), value)
