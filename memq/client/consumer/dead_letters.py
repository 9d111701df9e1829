"""Sends damaged blocks, as they were found, to the dead-letter topic of their topic."""

from __future__ import annotations

from collections.abc import Sequence

from memq.client.consumer.batch import Damage, TopicPartition
from memq.client.producer.producer import AsyncProducer
from memq.errors import TooLargeError
from memq.runtime.network import Address, format_address
from memq.runtime.runtime import Runtime

SUFFIX = ".dlq"
_CLOSE_S = 5.0


class DeadLetters:
    """A producer for damaged blocks, connected when there is the first one."""

    def __init__(self, runtime: Runtime, addresses: Sequence[Address]) -> None:
        self.sent = 0
        self._runtime = runtime
        self._brokers = [format_address(address) for address in addresses]
        self._producer: AsyncProducer | None = None

    async def send(self, place: TopicPartition, damage: Damage) -> None:
        """Send one block and wait until it is stored.

        Its value is empty when it is over the topic's record bound.

        Raises: as AsyncProducer.send and its delivery.
        """
        if self._producer is None:
            self._producer = AsyncProducer(self._brokers, acks="all", runtime=self._runtime)
        origin = {
            "memq-topic": place.topic,
            "memq-position": str(damage.position),
            "memq-object": damage.object_key,
            "memq-block": str(damage.block),
            "memq-records": str(damage.records),
            "memq-bytes": str(len(damage.data)),
            "memq-cause": str(damage.cause),
        }
        topic = place.topic + SUFFIX
        headers = [(name, text.encode()) for name, text in origin.items()]
        try:
            delivery = await self._producer.send(topic, damage.data, headers=headers)
        except TooLargeError:
            delivery = await self._producer.send(topic, None, headers=headers)
        await delivery
        self.sent += 1

    async def close(self) -> None:
        """Disconnect."""
        if self._producer is not None:
            await self._producer.close(_CLOSE_S)
