"""Sends damaged blocks, as they were found, to the dead-letter topic of their topic."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from memq.client.consumer.batch import Damage, TopicPartition
from memq.client.producer.delivery import AsyncDelivery
from memq.client.producer.producer import AsyncProducer
from memq.errors import MemqError, TooLargeError
from memq.runtime.network import Address, format_address
from memq.runtime.runtime import Runtime
from memq.topic import Position

if TYPE_CHECKING:
    from memq.encryption.encryption import Encryption

SUFFIX = ".dlq"
CLOSE_S = 5.0


class DeadLetters:
    """A producer for damaged blocks, connected when there is the first one."""

    def __init__(self, runtime: Runtime, addresses: Sequence[Address], encryption: Encryption | None = None) -> None:
        self.sent = 0
        self._runtime = runtime
        self._encryption = encryption  # of the letters, which may be plain blocks
        self._brokers = [format_address(address) for address in addresses]
        self._producer: AsyncProducer | None = None
        self._waiting: dict[tuple[TopicPartition, str, Position], AsyncDelivery] = {}  # until its call has them all

    async def send(self, partition: TopicPartition, damages: Sequence[Damage]) -> None:
        """Send blocks of one batch and wait until all are stored.

        A call that is cut short is continued by the next call for the same blocks: none is sent twice.

        Raises: as AsyncProducer.send and its delivery. Then the next call sends the failed block again.
        """
        keys = [(partition, damage.object_key, damage.position) for damage in damages]
        for key, damage in zip(keys, damages, strict=True):
            if key not in self._waiting:
                self._waiting[key] = await self._put(partition, damage)
        for key in keys:
            try:
                await self._waiting[key]
            except MemqError:
                del self._waiting[key]
                raise
        for key in keys:
            del self._waiting[key]
        self.sent += len(keys)

    async def _put(self, partition: TopicPartition, damage: Damage) -> AsyncDelivery:
        """Send one block. Its value is empty when it is over the topic's record bound."""
        if self._producer is None:
            self._producer = AsyncProducer(
                self._brokers, acks="all", encryption=self._encryption, runtime=self._runtime
            )
        origin = {
            "memq-topic": partition.topic,
            "memq-position": str(damage.position),
            "memq-object": damage.object_key,
            "memq-block": str(damage.block),
            "memq-records": str(damage.records),
            "memq-bytes": str(len(damage.data)),
            "memq-cause": str(damage.cause),
        }
        topic = partition.topic + SUFFIX
        headers = [(name, text.encode()) for name, text in origin.items()]
        try:
            return await self._producer.send(topic, damage.data, headers=headers)
        except TooLargeError:
            return await self._producer.send(topic, None, headers=headers)

    async def close(self) -> None:
        """Disconnect; a block that is not stored is no error: its batch is not committed, and comes again."""
        if self._producer is not None:
            with suppress(MemqError):
                await self._producer.close(CLOSE_S)
