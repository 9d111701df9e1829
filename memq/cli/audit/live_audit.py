"""The live audit over brokers: an ordinary member of the group of auditors with the same state."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from memq.audit.live.service import LiveAudit, Page
from memq.audit.live.storage.database import Database
from memq.audit.live.storage.store import AuditStore
from memq.client.admin.aio_admin import AsyncAdmin
from memq.client.broker_router import BrokerRouter
from memq.client.consumer.aio_consumer import AsyncConsumer
from memq.client.consumer.record import TopicPartition
from memq.client.link_pool import LinkPool, bootstrap_addresses
from memq.errors import GenerationFencedError, InvalidRequestError, MemqError, NotFoundError
from memq.format.pointer import decode_pointer
from memq.format.report import AUDIT_TOPIC
from memq.notification import Entry
from memq.notification.log_reader import entries_between, valid_span
from memq.notification.remote import RemoteQueue
from memq.runtime.network import Runtime
from memq.topic import AUDIT_GROUP, Position, ReadPartition, Topic


class GroupReports:
    """Reads `_memq_audit` as a member of the auditors' group. See `memq.audit.live.service.Reports`."""

    def __init__(self, consumer: AsyncConsumer, queue: RemoteQueue, topic: Topic) -> None:
        self._consumer = consumer
        self._queue = queue
        self._topic = topic

    def homes(self) -> int:
        """See `Reports.homes`."""
        return len(self._topic.partitions)

    async def poll(self, timeout_s: float) -> Page | None:
        """See `Reports.poll`."""
        batch = await self._consumer.poll(timeout_s)
        if batch is None:
            return None
        reports = [(str(record.position), record.value or b"") for record in batch]
        return Page(batch.partition, reports, str(batch.next))

    def assigned(self) -> list[int]:
        """See `Reports.assigned`."""
        return [partition for _, partition in self._consumer.position()]

    async def seek(self, home: int, position: str) -> None:
        """See `Reports.seek`."""
        try:
            await self._consumer.seek(AUDIT_TOPIC, home, Position.parse(position) if position else "beginning")
        except InvalidRequestError as error:  # it went to another member while its state was read
            raise GenerationFencedError(str(error)) from error

    async def caught_up(self, home: int) -> bool:
        """See `Reports.caught_up`."""
        partition = ReadPartition(AUDIT_TOPIC, self._topic.id, home)
        position = self._consumer.position().get(TopicPartition(AUDIT_TOPIC, home))
        if position is None:
            return False
        end = (await valid_span(self._queue, partition)).end
        async for left in entries_between(self._queue, partition, position.pointer_offset, end):
            if any(_holds_records(entry) for entry in left):
                return False
        return True

    async def commit(self) -> None:
        """See `Reports.commit`."""
        await self._consumer.commit()


def _holds_records(entry: Entry) -> bool:
    """Whether a pointer may hold reports: behind the last ones there may be those of owners and producers."""
    try:
        return decode_pointer(entry.body).kind == "data"
    except MemqError:
        return True


@asynccontextmanager
async def live_audit(brokers: str, state: Database, keep_ms: int, runtime: Runtime) -> AsyncIterator[LiveAudit]:
    """Open what an auditor of the cluster at `brokers` needs; `run` or `step` it inside.

    Raises: UnreachableError; NotFoundError when the cluster does not audit.
    """
    pool = LinkPool(runtime, bootstrap_addresses(brokers))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(pool.close)
        admin = await stack.enter_async_context(AsyncAdmin(brokers, runtime=runtime))
        found = {topic.name: topic for topic in await admin.topics(internal=True)}
        if AUDIT_TOPIC not in found:
            raise NotFoundError(
                "the cluster does not audit: it has no topic _memq_audit", hint="set audit = on in its brokers"
            )
        store = AuditStore(state)
        group = await store.group(f"{AUDIT_GROUP}-{runtime.random.getrandbits(64):016x}")
        consumer = await stack.enter_async_context(
            AsyncConsumer(
                *(brokers, [AUDIT_TOPIC]),
                group=group,
                auto_commit=False,
                on_damaged="skip",
                on_expired="skip",
                audit=False,
                runtime=runtime,
            )
        )
        any_broker = BrokerRouter(pool)
        queue = RemoteQueue(any_broker)
        reports = GroupReports(consumer, queue, found[AUDIT_TOPIC])
        audit = LiveAudit(reports, admin.topics, queue, any_broker.read, store, runtime, keep_ms)
        stack.push_async_callback(audit.close)
        yield audit
