"""Requests to the owner of a partition, repeated there or at another broker until one answers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from memq.client.link_pool import LinkPool
from memq.client.metadata import ClusterMetadata
from memq.errors import MovedError, NotReadyError, RetryableError, TimedOutError
from memq.notification import Span
from memq.notification.remote import RemoteQueue
from memq.protocol.admin_messages import AdminAnswer, AdminRequest, BeginProducer, PublishStaged
from memq.protocol.frames import Api
from memq.protocol.link import Link
from memq.runtime.clock import backoff_s
from memq.runtime.runtime import Runtime
from memq.topic import ReadPartition, Topic

Found = TypeVar("Found")
SPANS_S_MAX = 10.0  # for those who ask again: a dead owner is replaced after its session, 10 s by default
RETRY_S_BASE, RETRY_S_MAX = 0.05, 1.0
MOVED_ASKS = 4  # redirects after which the metadata are asked for: brokers cut off from the coordinator may be wrong


class OwnerRequests:
    """`answer_s` is how long one owner may take, with all tries for a span.

    The requests must be ones that may be made twice.
    """

    def __init__(self, runtime: Runtime, pool: LinkPool, metadata: ClusterMetadata, answer_s: float) -> None:
        self._runtime = runtime
        self._pool = pool
        self._metadata = metadata
        self._answer_s = answer_s

    async def ask(self, topic: Topic, partition: int, ask: BeginProducer | PublishStaged) -> AdminAnswer:
        """Ask for ever, while there is no answer but that it may pass. Raises: what the owner says against it."""
        request = AdminRequest(ask=ask)
        return await self._until_answered(
            topic.name,
            topic.id,
            partition,
            lambda link: link.request(Api.ADMIN, request, AdminAnswer, timeout_s=self._answer_s),
        )

    async def spans(self, log: ReadPartition, writers: Sequence[int]) -> list[Span]:
        """Return the span of a log as the owners of the write partitions `writers` have it.

        Raises: TimedOutError when one of them has not answered: the end that the others know may leave its records out;
        what an owner says against it.
        """
        return await asyncio.gather(*(self._span(log, writer) for writer in dict.fromkeys(writers)))

    async def _span(self, log: ReadPartition, writer: int) -> Span:
        errors: deque[RetryableError] = deque(maxlen=1)
        try:
            async with asyncio.timeout(self._answer_s):
                return await self._until_answered(
                    log.topic,
                    log.topic_id,
                    writer,
                    lambda link: RemoteQueue(link.request).owner_span(log, writer),
                    errors.append,
                )
        except TimeoutError as error:
            said = "".join(f": {each}" for each in errors)
            raise TimedOutError(
                f"the owner of partition {writer} of topic '{log.topic}' did not prove its end within"
                f" {self._answer_s:g} s{said}",
                hint=f"check the broker that 'memq topic describe {log.topic}' names as the owner",
            ) from error

    async def _until_answered(
        self,
        name: str,
        topic_id: str,
        partition: int,
        request: Callable[[Link], Awaitable[Found]],
        failed: Callable[[RetryableError], None] = lambda _: None,
    ) -> Found:
        tries = 0
        while True:
            try:
                return await self._ask(name, topic_id, partition, request)
            except RetryableError as error:
                tries += 1
                failed(error)
                if isinstance(error, MovedError) and error.address and tries % MOVED_ASKS:
                    self._metadata.moved(name, topic_id, partition, error.address)
                elif isinstance(error, MovedError) and error.address:
                    await self._refresh(name)
                delay_s = backoff_s(self._runtime.random, tries, base_s=RETRY_S_BASE, most_s=RETRY_S_MAX)
                await asyncio.sleep(error.retry_after_ms / 1000 + delay_s)

    async def _refresh(self, name: str) -> None:
        """Refresh the metadata of a topic; what is known stays if no broker answers."""
        with suppress(RetryableError):
            await self._metadata.refresh(name)

    async def _ask(
        self, name: str, topic_id: str, partition: int, request: Callable[[Link], Awaitable[Found]]
    ) -> Found:
        address = self._metadata.owner(name, topic_id, partition)
        if address is None:
            await self._metadata.refresh(name)
            raise NotReadyError(f"topic '{name}' partition {partition} has no owner now")
        try:
            return await request((await self._pool.session(address)).link)
        except RetryableError as error:
            if not (isinstance(error, MovedError) and error.address):
                await self._metadata.refresh(name)
            raise
