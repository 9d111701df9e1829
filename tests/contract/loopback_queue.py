"""The queue `remote` for the contract suite: a broker's handlers over a queue in memory, in wire format."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import msgspec

from memq.broker.api import Answer as BrokerAnswer
from memq.broker.api import Call
from memq.broker.api.cluster_requests import ClusterRequests
from memq.broker.api.group_requests import GroupRequests
from memq.broker.api.hold_requests import HoldRequests
from memq.broker.api.operations import operations_of
from memq.broker.api.pop_requests import PopRequests
from memq.broker.api.queue_requests import QueueRequests
from memq.broker.api.reader_requests import ReaderRequests
from memq.broker.api.stream_requests import StreamRequests
from memq.broker.api.topic_requests import TopicRequests
from memq.broker.api.transaction_requests import TransactionRequests
from memq.broker.metrics import Counters
from memq.broker.partition.recent_pointer_cache import RecentPointerCache
from memq.broker.permissions.namespace_requests import NamespaceRequests
from memq.broker.permissions.permission_requests import PermissionRequests
from memq.broker.permissions.quota_requests import QuotaRequests
from memq.compaction.reader import CompactedLogReader, ManifestFiles
from memq.errors import MemqError, NotFoundError
from memq.groups.remote import RemoteGroups
from memq.notification import NotificationQueue, Publication
from memq.notification.remote import RemoteQueue
from memq.protocol.connection import ANONYMOUS
from memq.protocol.frames import Api, Frame
from memq.protocol.messages import Nack, decode_message, encode_message, error_of, nack_of
from memq.runtime.clock import Clock
from memq.storage_handlers.memory import MemoryHandler
from memq.topic import STATE_TOPIC, ReadPartition, Topic, TopicSettings, equal_slots
from tests.access import EVERYTHING
from tests.contract.state_log_queue import StateLogQueue

Answer = TypeVar("Answer", bound=msgspec.Struct)


class _Topics:
    """What the handlers ask of `memq.broker.partitions.Partitions`: topics, each of ten read partitions or more."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, str], int] = {}

    async def current_topic(self, name: str, topic_id: str) -> Topic:
        if (name, topic_id) not in self.known:
            raise NotFoundError(f"topic '{name}' does not exist")
        parts = equal_slots(self.known[name, topic_id])
        return Topic(name=name, id=topic_id, created_ms=0, settings=TopicSettings(), partitions=parts)


class _Hosts:
    """The part of `memq.broker.service_partitions.hosts.ServiceHosts` for handlers: one coordinator has all groups.

    It is the `GroupMigrator`, too.
    """

    groups = None

    def __init__(self, lender: NotificationQueue) -> None:
        self._lender = lender

    async def check(self, find: object) -> None:
        """The queue has no groups of an earlier release."""

    async def service_or_link(self, kind: None, group: str, *, forwarded: bool) -> StateLogQueue:
        assert isinstance(self._lender, StateLogQueue), "this queue has no groups"
        return self._lender

    def address_of(self, group: str) -> str:
        return "here:1"

    async def service_topic(self, *, create: bool) -> Topic:
        return Topic(name=STATE_TOPIC, id="0" * 32, created_ms=0, partitions=equal_slots(1))

    async def service_in(self, kind: None, topic: Topic, partition: int) -> StateLogQueue:
        return await self.service_or_link(None, "", forwarded=False)


class LoopbackQueue(RemoteQueue, RemoteGroups):
    """Reads and groups go through a broker's handlers; publishing and upkeep are the broker's own."""

    def __init__(self, lender: NotificationQueue, clock: Clock) -> None:
        super().__init__(self._asked)
        self._lender = lender
        self.former = lender.former
        self._topics = _Topics()
        self._made: dict[ReadPartition, None] = {}
        pointers = CompactedLogReader(lender, ManifestFiles("test", MemoryHandler(clock)), clock)
        services = SimpleNamespace(
            queue=lender,
            pointers=pointers,
            recent_pointers=RecentPointerCache(),
            recent_batches=None,
            counters=Counters(),
        )
        given = cast(Any, services), cast(Any, self._topics)
        cluster = ClusterRequests(*given, cast(Any, None), cast(Any, None))
        hosts = cast(Any, _Hosts(lender))
        groups, holds = GroupRequests(given[1], hosts, hosts), HoldRequests(*given, cast(Any, None))
        moves, queues = TransactionRequests(*given, cast(Any, None)), QueueRequests(given[0], cast(Any, None))
        topics = StreamRequests(*given), TopicRequests(*given), ReaderRequests(*given)
        pops, permissions = PopRequests(given[0], cast(Any, None), given[1]), PermissionRequests(given[0])
        rules = permissions, QuotaRequests(given[0]), NamespaceRequests(given[0])
        self._operations = operations_of(*topics, groups, cluster, holds, moves, queues, pops, *rules)

    async def _asked(self, api: Api, message: msgspec.Struct, answer: type[Answer], *, timeout_s: float) -> Answer:
        try:
            found = encode_message(cast(Any, await self._answer(Frame(api, 0, 0, 0, encode_message(message)))))
        except MemqError as error:
            raise error_of(decode_message(encode_message(nack_of(error)), Nack)) from error
        return decode_message(found, answer)

    async def _answer(self, frame: Frame) -> BrokerAnswer:
        operation, ask, _ = self._operations.find(frame)
        prepared = None if operation.prepare is None else await operation.prepare(ask)
        return await operation.handler(
            Call(cast(Any, SimpleNamespace(program="test")), ANONYMOUS, 0, ask, prepared, access=EVERYTHING)
        )

    # ---- what only a broker does -----------------------------------------------------------------

    @property
    def refuses_by_age(self) -> bool:
        return self._lender.refuses_by_age

    async def publish(self, publication: Publication) -> int:
        return await self._lender.publish(publication)

    async def create(self, partitions: Sequence[ReadPartition], stale_publish_ms: int) -> None:
        await self._lender.create(partitions, stale_publish_ms)
        self._made |= dict.fromkeys(partitions)
        for each in partitions:
            key = each.topic, each.topic_id
            self._topics.known[key] = max(each.partition + 1, self._topics.known.get(key, 10))

    async def trim(self, partition: ReadPartition, before: int) -> None:
        await self._lender.trim(partition, before)

    async def drop(self, partitions: Sequence[ReadPartition]) -> None:
        for each in partitions:
            self._made.pop(each, None)
        left = {(each.topic, each.topic_id) for each in self._made}
        for topic in [each for each in self._topics.known if each not in left]:
            del self._topics.known[topic]  # before its logs
        await self._lender.drop(partitions)

    async def check(self) -> None:
        await self._lender.check()

    async def close(self) -> None:
        await self._lender.close()
