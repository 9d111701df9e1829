"""Topics that are sealed while records are sent, and read to the end that readers see."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from memq.client.admin import AsyncAdmin
from memq.client.consumer.consumer import AsyncConsumer
from memq.client.producer.delivery import Ack
from memq.client.producer.producer import AsyncProducer
from memq.errors import MemqError, NotFoundError
from memq.topic import Topic, read_partitions
from tests.simulation.checker import Checker, may_lack
from tests.simulation.topic_churn import TopicChurn

SEALED = 3  # topics of one life
BLOCKS = 40
SEAL_S_MAX = 4.0  # from the first block to the seal
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class SealedRead:
    """The records that a reader found up to the end, and those that retention had taken by then.

    A broker that is away delays the end, so that retention may take records before a reader comes to them. A cut takes
    the newest pointers of a log, acked ones too.
    """

    found: AbstractSet[bytes]
    taken: AbstractSet[bytes]

    def missed(self, checker: Checker, acked: Iterable[bytes]) -> list[bytes]:
        """Return the acked records that the reader had to find, and did not."""
        missed = set(acked) - self.found - self.taken
        return sorted(value for value in missed if not checker.records[value].lost)


def sealed_read(checker: Checker, topic: Topic, found: AbstractSet[bytes]) -> SealedRead:
    """Return a read whose end has come just now."""
    logs = [checker.logs[partition] for partition in read_partitions(topic) if partition in checker.logs]
    return SealedRead(found, {one.value for log in logs for one in log.stream[: log.gone_index]})


class SealedLife(TopicChurn):
    """One life of the process. No record is acked after the end, and the end comes after all acked records."""

    names = ("closing", "closed")
    _acks: dict[bytes, tuple[int, float]]  # partition and time
    _level: Literal["all", 1]  # of the producer, in turns

    async def _live(self, admin: AsyncAdmin, name: str) -> None:
        self._topics += 1
        self._acks, self._level = {}, 1 if (self._node.index + self._topics) % 2 else "all"
        topic = await self._made(admin, name)
        producer = AsyncProducer(
            self._brokers,
            acks=self._level,
            linger_ms=self._draw.choice([0, 5, 100]),
            delivery_timeout_ms=topic.settings.delivery_timeout_ms,
            runtime=self._runtime,
        )
        writing = asyncio.create_task(self._write(producer, topic, BLOCKS), name="write")
        await asyncio.sleep(self._draw.uniform(0, SEAL_S_MAX))
        began_s = self._cluster.world.now
        await self._seal(admin, topic)
        waited_s = self._cluster.world.now - began_s
        read = sealed_read(self._checker, topic, await self._read_to_end(name))
        await writing
        if missed := read.missed(self._checker, self._promised(topic, waited_s)):
            words = f"{len(missed)} acked records, the first is {missed[0][:60]!r}"
            self._cluster.world.fail(f"the end of sealed topic {name} comes before {words}")
        self._leaving[topic.id] = None
        await self._delete(admin, name)
        with suppress(MemqError):  # what failed was counted by its delivery
            await producer.close()

    def _promised(self, topic: Topic, waited_s: float) -> list[bytes]:
        """Return the acked records that are before the end, so long after the seal.

        With acks=1 these are not those that killed owners had in memory, or that the end has waited for.
        """
        return [
            value
            for value, (partition, acked_s) in self._acks.items()
            if self._level == "all" or not may_lack(self._checker, (topic.id, partition), value, acked_s, waited_s)
        ]

    async def _seal(self, admin: AsyncAdmin, topic: Topic) -> None:
        while True:
            try:
                await admin.seal_topic(topic.name, timeout_s=TIMEOUT_S)
            except MemqError as error:
                self._check_exists(error, topic)
                await self._rest()
            else:
                return

    async def _read_to_end(self, name: str) -> set[bytes]:
        """Read the topic until a consumer without an `end` ends by itself."""
        while True:
            read = set[bytes]()
            try:
                async with AsyncConsumer(self._brokers, name, runtime=self._runtime) as consumer:
                    async for batch in consumer:
                        read.update(record.value for record in batch if record.value is not None)
            except NotFoundError:
                await self._rest()  # a broker that has just started does not know the topic yet
            except MemqError:
                await self._rest()
            else:
                return read

    def acked(self, topic: Topic, value: bytes, ack: Ack) -> None:
        self._acks[value] = ack.partition, self._cluster.world.now
        if self._level == 1:
            self._checker.give_up(value)  # a rule of its own is in `_promised`
        else:
            super().acked(topic, value, ack)
