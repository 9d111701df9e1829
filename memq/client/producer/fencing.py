"""Named producers at the client: how an instance begins in each partition."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from memq.client.owner_requests import OwnerRequests
from memq.client.producer.settings import ProducerSettings
from memq.errors import ProtocolError, TimedOutError
from memq.protocol.messages import BeginProducer
from memq.topic import Topic

BEGINNINGS_AT_ONCE_MAX = 32


class InstanceFencing:
    """Asks the owners of partitions to let one instance of a producer begin."""

    def __init__(self, owners: OwnerRequests, producer_id: int) -> None:
        self._owners = owners
        self._producer = f"{producer_id:016x}"
        self._turn = asyncio.Semaphore(BEGINNINGS_AT_ONCE_MAX)

    async def begin(self, topic: Topic, partitions: Sequence[int], settings: ProducerSettings) -> list[tuple[int, int]]:
        """Begin in each partition; return its epoch there, and the sequence after the last that is committed.

        Raises: TimedOutError after the delivery timeout; ProducerFencedError, NotFoundError, TooLargeError.
        """
        if not partitions:
            return []
        try:
            async with asyncio.timeout(settings.delivery_timeout_s), asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._begin(topic, partition)) for partition in partitions]
        except TimeoutError as error:
            raise TimedOutError(
                f"producer '{settings.name}' did not begin in topic '{topic.name}' in {settings.delivery_timeout_s:g} s"
            ) from error
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _begin(self, topic: Topic, partition: int) -> tuple[int, int]:
        ask = BeginProducer(topic=topic.name, topic_id=topic.id, partition=partition, producer=self._producer)
        async with self._turn:
            answer = await self._owners.ask(topic, partition, ask)
        if answer.instance is None:
            raise ProtocolError("the broker did not say how a named producer begins")
        return answer.instance.epoch, answer.instance.next_sequence
