"""Requests to the owner of a partition, repeated there or at another broker until one answers."""

from __future__ import annotations

import asyncio

from memq.client.link_pool import LinkPool
from memq.client.metadata import ClusterMetadata
from memq.errors import MovedError, NotReadyError, RetryableError
from memq.protocol.frames import Api
from memq.protocol.messages import AdminAnswer, AdminRequest, BeginProducer, PublishStaged
from memq.runtime.backoff import backoff_s
from memq.runtime.network import Runtime
from memq.topic import Topic

RETRY_S_BASE, RETRY_S_MAX = 0.05, 1.0


class OwnerRequests:
    """`answer_s` is how long one owner may take. The requests must be ones that may be made twice."""

    def __init__(self, runtime: Runtime, pool: LinkPool, metadata: ClusterMetadata, answer_s: float) -> None:
        self._runtime = runtime
        self._pool = pool
        self._metadata = metadata
        self._answer_s = answer_s

    async def ask(self, topic: Topic, partition: int, ask: BeginProducer | PublishStaged) -> AdminAnswer:
        """Ask for ever, while there is no answer but that it may pass. Raises: what the owner says against it."""
        tries = 0
        while True:
            try:
                return await self._ask(topic, partition, ask)
            except RetryableError as error:
                tries += 1
                if isinstance(error, MovedError) and error.address:
                    self._metadata.moved(topic.name, topic.id, partition, error.address)
                delay_s = backoff_s(self._runtime.random, tries, base_s=RETRY_S_BASE, most_s=RETRY_S_MAX)
                await asyncio.sleep(error.retry_after_ms / 1000 + delay_s)

    async def _ask(self, topic: Topic, partition: int, ask: BeginProducer | PublishStaged) -> AdminAnswer:
        address = self._metadata.owner(topic.name, topic.id, partition)
        if address is None:
            await self._metadata.refresh(topic.name)
            raise NotReadyError(f"topic '{topic.name}' partition {partition} has no owner now")
        try:
            session = await self._pool.session(address)
            return await session.link.request(Api.ADMIN, AdminRequest(ask=ask), AdminAnswer, timeout_s=self._answer_s)
        except RetryableError as error:
            if not (isinstance(error, MovedError) and error.address):
                await self._metadata.refresh(topic.name)
            raise
