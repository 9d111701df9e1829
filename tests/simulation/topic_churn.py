"""Topics that are created, written, read and deleted repeatedly under few names, next to a lasting one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType

import msgspec

from memq.client.admin import AsyncAdmin
from memq.client.producer.delivery import Ack, AsyncDelivery
from memq.client.producer.producer import AsyncProducer
from memq.errors import AlreadyExistsError, InvalidSettingError, MemqError, NotFoundError
from memq.runtime.runtime import Runtime
from memq.simulation.cluster import PORT
from memq.simulation.world.node import SimNode
from memq.topic import NAMESPACE_END, Topic, namespace_of, read_partitions
from tests.simulation.checked_cluster import CheckedCluster
from tests.simulation.checker import Checker
from tests.simulation.consumers import Reader

BLOCKS_MAX = 12
PARTITIONS_MAX = 2
PACE_S_MAX = 0.2
RETRY_S_MAX = 0.5
POLL_S = 0.1
WRITES_ON_RATE = 0.5  # how often records are sent while the topic is deleted
SIZES = (0, 10, 300)
BOTH = "readers-of-both"  # of the topic that stays and of one that comes and goes
BOTH_RATE = 0.6
NO_CHANGES: Mapping[str, str | int] = MappingProxyType({})


class TopicChurn:
    """One life of the process. While a topic exists, no client may get the answer that it does not."""

    names = ("coming", "going")  # each is used again soon; no other process uses them

    def __init__(self, node: SimNode, runtime: Runtime, cluster: CheckedCluster, life: int) -> None:
        self._node = node
        self._draw = node.random
        self._runtime = runtime
        self._cluster = cluster
        self._checker = cluster.transient
        self._brokers = [f"{host}:{PORT}" for host, _port in cluster.addresses()]
        self._life = f"{node.name}.{life}"
        self._topics = 0
        self._leaving: dict[str, None] = {}  # ids of topics whose deletion was asked for
        self._sent = 0

    async def run(self, topics: int) -> None:
        """Let so many topics live and die, and return when the last one is gone."""
        async with AsyncAdmin(self._brokers, runtime=self._runtime) as admin:
            for number in range(topics):
                await self._live(admin, self._named(self.names[number % len(self.names)]))

    def _named(self, name: str) -> str:
        """Return a name in the namespace of the lasting topic, if that has one."""
        namespace = namespace_of(self._cluster.topic.name)
        return f"{namespace}{NAMESPACE_END}{name}" if namespace else name

    async def _live(self, admin: AsyncAdmin, name: str) -> None:
        self._topics += 1
        topic = await self._made(admin, name)
        producer = AsyncProducer(
            self._brokers,
            linger_ms=self._draw.choice([0, 5, 100]),
            delivery_timeout_ms=topic.settings.delivery_timeout_ms,
            runtime=self._runtime,
        )
        await self._write(producer, topic, self._draw.randint(1, BLOCKS_MAX))
        alone = (_group_of(topic), [(topic, self._checker)])
        both = (BOTH, [(self._cluster.topic, self._cluster.checker), (topic, self._checker)])
        wanted = [alone, both] if self._draw.random() < BOTH_RATE else [alone]
        reading = [asyncio.create_task(self._read(group, topics), name="read") for group, topics in wanted]
        while not all(self._is_drained(topic, group) for group, _ in wanted):  # noqa: ASYNC110  the checker knows it
            await asyncio.sleep(POLL_S)
        if self._draw.random() < 0.5:
            reading[0].cancel()
        writing = None
        self._leaving[topic.id] = None
        if self._draw.random() < WRITES_ON_RATE:
            writing = asyncio.create_task(self._write(producer, topic, BLOCKS_MAX), name="write")
        await self._delete(admin, name)
        if writing is not None:
            await writing
        with suppress(MemqError):
            await producer.close()
        if len(reading) > 1:
            await self._read_on()
        for task in reading:
            task.cancel()
        await asyncio.wait(reading)

    # ---- topics ----------------------------------------------------------------------------------

    async def _made(self, admin: AsyncAdmin, name: str, changes: Mapping[str, str | int] = NO_CHANGES) -> Topic:
        """Make the topic, and again when that may not have landed; one of an earlier life goes first."""
        settings = {**msgspec.structs.asdict(self._cluster.shape.settings), **changes}
        while True:
            try:
                partitions = self._draw.randint(1, PARTITIONS_MAX)
                topic = await admin.create_topic(name, partitions=partitions, settings=settings)
            except AlreadyExistsError:
                await self._delete(admin, name)
            except InvalidSettingError:
                raise
            except MemqError:
                await self._rest()
            else:
                self._cluster.watch(topic)
                return topic

    async def _delete(self, admin: AsyncAdmin, name: str) -> None:
        while True:
            try:
                await admin.delete_topic(name)
            except NotFoundError:
                return  # a try landed that was answered with an error
            except MemqError:
                await self._rest()

    async def _rest(self) -> None:
        await asyncio.sleep(self._draw.uniform(0.05, RETRY_S_MAX))

    # ---- records ---------------------------------------------------------------------------------

    async def _write(self, producer: AsyncProducer, topic: Topic, blocks: int) -> None:
        """Send blocks and wait for what becomes of each."""
        pending: list[tuple[bytes, AsyncDelivery]] = []
        for _ in range(blocks):
            partition = self._draw.randrange(len(topic.partitions))
            stream = f"{self._life}.{self._topics}"
            self._sent += 1
            value = f"{stream} {partition} {self._sent} ".encode() + self._draw.randbytes(self._draw.choice(SIZES))
            self._checker.sent(stream, partition, self._sent, value)
            try:
                pending.append((value, await producer.send(topic.name, value, partition=partition)))
            except MemqError as error:
                self._check_exists(error, topic)
                self._checker.give_up(value)
            await asyncio.sleep(self._draw.uniform(0, PACE_S_MAX))
        for value, delivery in pending:
            try:
                ack = await delivery
            except MemqError as error:
                self._check_exists(error, topic)
                self._checker.give_up(value)
            else:
                self.acked(topic, value, ack)

    def acked(self, topic: Topic, value: bytes, ack: Ack) -> None:
        """Note that a record of a topic is acked."""
        if topic.id in self._leaving:
            self._checker.give_up(value)  # it may lie in a log that came back empty after the topic was gone
        else:
            self._checker.ack(value, ack)

    async def _read(self, group: str, topics: Sequence[tuple[Topic, Checker]]) -> None:
        """Read topics for a group, which has read earlier topics of the same names."""
        life = 0
        while True:
            life += 1
            name = f"{self._life}.{self._topics}.{len(topics)}#{self._node.index}.{life}"
            reader = Reader(name, group, self._node, self._cluster, topics, wanders=False)
            try:
                await reader.run(self._runtime)
            except MemqError as error:
                self._check_exists(error, topics[-1][0])
                if isinstance(error, NotFoundError):
                    topics = topics[:1]  # it can't begin with a topic that is gone
                await self._rest()

    async def _read_on(self) -> None:
        """Wait until the readers of both topics have what the other one has now: one that is gone stops no other.

        What a cut takes meanwhile is excused.
        """
        checker = self._cluster.checker
        logs = {each: log for each, log in checker.logs.items() if each.topic_id == self._cluster.topic.id}
        ends = {partition: len(log.stream) for partition, log in logs.items()}
        while any(  # noqa: ASYNC110  as above
            checker.groups.reached(BOTH, each) < min(end, len(logs[each].stream)) for each, end in ends.items()
        ):
            await asyncio.sleep(POLL_S)

    def _is_drained(self, topic: Topic, group: str) -> bool:
        groups, logs = self._checker.groups, self._checker.logs
        known = [(partition, logs[partition]) for partition in read_partitions(topic) if partition in logs]
        return all(groups.reached(group, partition) == len(log.stream) for partition, log in known)

    def _check_exists(self, error: MemqError, topic: Topic) -> None:
        excused = "could confirm the id" in str(
            error
        )  # the producer learned an older id while the coordinator was away
        if topic.id not in self._leaving and isinstance(error, NotFoundError) and not excused:
            self._cluster.world.fail(f"topic {topic.name} with id {topic.id} exists", error)


def _group_of(topic: Topic) -> str:
    return f"readers of {topic.name}".replace(" ", "-")
