"""Named producers at the client: the id of a name, and how an instance begins in each partition."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence

from memq.backoff import backoff_s
from memq.client.link_pool import LinkPool
from memq.client.metadata import ClusterMetadata
from memq.client.producer_settings import ProducerSettings
from memq.errors import MovedError, NotReadyError, ProtocolError, RetryableError, TimedOutError
from memq.limits import PRODUCER_ID_END
from memq.network import Runtime
from memq.protocol.frames import Api
from memq.protocol.messages import AdminAnswer, AdminRequest, BeginProducer
from memq.topic import Topic

BEGINNINGS_AT_ONCE_MAX = 32
RETRY_S_BASE, RETRY_S_MAX = 0.05, 1.0


def id_of_name(name: str) -> int:
    """Return the producer id of a name: 63 bits of its SHA-256, never 0; 0 for no name."""
    if not name:
        return 0
    digest = hashlib.sha256(b"memq producer " + name.encode()).digest()
    return int.from_bytes(digest[:8], "big") % (PRODUCER_ID_END - 1) + 1


class Naming:
    """Asks the owners of partitions to let one instance begin; `answer_s` is how long each of them may take."""

    def __init__(
        self, runtime: Runtime, pool: LinkPool, metadata: ClusterMetadata, producer_id: int, answer_s: float
    ) -> None:
        self._runtime = runtime
        self._pool = pool
        self._metadata = metadata
        self._producer_id = producer_id
        self._answer_s = answer_s
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
        """Ask whoever owns the partition until it is begun."""
        ask = BeginProducer(
            topic=topic.name, topic_id=topic.id, partition=partition, producer=f"{self._producer_id:016x}"
        )
        tries = 0
        async with self._turn:
            while True:
                try:
                    return await self._ask(topic, partition, ask)
                except RetryableError as error:
                    tries += 1
                    if isinstance(error, MovedError) and error.address:
                        self._metadata.moved(topic.name, topic.id, partition, error.address)
                    delay_s = backoff_s(self._runtime.random, tries, base_s=RETRY_S_BASE, most_s=RETRY_S_MAX)
                    await asyncio.sleep(error.retry_after_ms / 1000 + delay_s)

    async def _ask(self, topic: Topic, partition: int, ask: BeginProducer) -> tuple[int, int]:
        address = self._metadata.owner(topic.name, topic.id, partition)
        if address is None:
            await self._metadata.refresh(topic.name)
            raise NotReadyError(f"topic '{topic.name}' partition {partition} has no owner now")
        try:
            session = await self._pool.session(address)
            answer = await session.link.request(Api.ADMIN, AdminRequest(ask=ask), AdminAnswer, timeout_s=self._answer_s)
        except RetryableError as error:
            if not (isinstance(error, MovedError) and error.address):
                await self._metadata.refresh(topic.name)
            raise
        if answer.instance is None:
            raise ProtocolError("the broker did not say how a named producer begins")
        return answer.instance.epoch, answer.instance.next_sequence
