"""Answers requests about topics: metadata, and their creation, change and end."""

from __future__ import annotations

import asyncio

import msgspec

from memq.broker.api import Answer, Call
from memq.broker.partitions import Partitions
from memq.broker.services import Services
from memq.broker.upkeep.retention import trim_compacted
from memq.broker.upkeep.truncation import with_truncations
from memq.errors import (
    InvalidNameError,
    InvalidRequestError,
    InvalidSettingError,
    NotFoundError,
    TooLargeError,
)
from memq.namespaces import check_room, namespace_named
from memq.permissions import Permission, topic_resource
from memq.protocol.admin_messages import (
    AdminAnswer,
    AlterTopic,
    CreateTopic,
    DeleteTopic,
    SealTopic,
    TrimCompacted,
    TruncateTopic,
)
from memq.protocol.messages import Metadata, MetadataRequest, StoreMetadata, TopicMetadata
from memq.topic import (
    Topic,
    TopicSettings,
    check_resource_name,
    is_internal,
    is_state_topic,
    namespace_of,
    parse_settings,
)

TOPICS_PER_METADATA_MAX = 10_000


class TopicRequests:
    """Requests that any broker answers."""

    def __init__(self, services: Services, partitions: Partitions) -> None:
        self._services = services
        self._partitions = partitions
        self._in_namespaces = asyncio.Lock()

    async def metadata(self, call: Call[MetadataRequest]) -> Answer:
        """Return brokers, stores, and topics with the owners of their partitions. Raises: TooLargeError."""
        ask = call.ask
        if ask.topics is not None and len(ask.topics) > TOPICS_PER_METADATA_MAX:
            raise TooLargeError(f"metadata of {len(ask.topics)} topics at once, {TOPICS_PER_METADATA_MAX} are allowed")
        names = [topic.name for topic in self._partitions.topics()] if ask.topics is None else ask.topics
        for name in names:
            check_resource_name(name, internal=True)
        unconfirmed = [] if ask.topics is None else await self._partitions.confirm(names, ask.known)
        found: list[TopicMetadata] = []
        missing: list[str] = []
        for name in names:
            may_create = ask.create and call.access.may(Permission.CREATE, topic_resource(name))
            topic = await self._find(name, create=may_create)
            if topic is None:
                missing.append(name)
            else:
                found.append(TopicMetadata(topic=topic, owners=self._partitions.owners(topic)))
        return Metadata(
            cluster=self._services.settings.cluster,
            brokers=list(self._partitions.brokers()),
            zones=list(self._partitions.brokers().values()),
            topics=found,
            missing=missing,
            unconfirmed=unconfirmed,
            stores=[StoreMetadata(name=name, url=store.url) for name, store in self._services.stores.items()],
            waits=self._services.waits.describe(),
        )

    async def _find(self, name: str, *, create: bool) -> Topic | None:
        try:
            return await self._partitions.current_topic(name)
        except NotFoundError:
            settings = self._services.settings
            if not (create and settings.auto_create_topics):
                return None
            return await self._make(name, 0, {}, exist_ok=True)

    async def create(self, call: Call[CreateTopic]) -> Answer:
        """Create a topic."""
        ask = call.ask
        made = await self._make(ask.name, ask.partitions, ask.settings, exist_ok=ask.exist_ok)
        return AdminAnswer(topic=made)

    async def _make(
        self, name: str, partitions: int, settings: dict[str, int | bool | str], *, exist_ok: bool
    ) -> Topic:
        """Create a topic with the defaults of its namespace, within the limits of that.

        Raises: as `Partitions.create`, `parse_settings`, `check_room`.
        """
        default, namespace = self._services.settings.partitions, namespace_of(check_resource_name(name))
        if not namespace:
            base = parse_settings(settings, TopicSettings())
            return await self._partitions.create(name, partitions or default, base, exist_ok=exist_ok)
        coordinator = self._services.coordinator
        async with self._in_namespaces:  # else two that are made at once would both find room
            found = namespace_named((await coordinator.rules.read()).namespaces, namespace)
            base = parse_settings(settings, found.base(TopicSettings()))
            count = partitions or found.partitions or default
            check_room(found, await coordinator.topics(), name, count)
            return await self._partitions.create(name, count, base, exist_ok=exist_ok)

    async def alter(self, call: Call[AlterTopic]) -> Answer:
        """Change settings of a topic; of one of memq's own only `retention_ms`.

        Raises: InvalidSettingError for another one: the audit relies on the settings that brokers give the topic.
        """
        if is_internal(call.ask.name) and set(call.ask.settings) != {"retention_ms"}:
            raise InvalidSettingError(
                f"topic '{call.ask.name}' is memq's own: retention_ms is its only setting that can be changed"
            )
        topic = await self._partitions.current_topic(call.ask.name, call.ask.topic_id)
        settings = parse_settings(call.ask.settings, topic.settings)
        return AdminAnswer(topic=await self._partitions.alter(topic, settings))

    async def delete(self, call: Call[DeleteTopic]) -> Answer:
        """Delete a topic; one of memq's own only when this broker does not need it.

        Raises: InvalidNameError else: reports that no auditor has read would be lost, or all consumer groups.
        """
        if is_state_topic(call.ask.name):
            raise InvalidNameError(
                f"topic '{call.ask.name}' is memq's own: it has the consumer groups, and can't be deleted",
                hint="memq group delete GROUP deletes one group",
            )
        if is_internal(call.ask.name) and self._services.settings.audit:
            raise InvalidNameError(
                f"topic '{call.ask.name}' is memq's own, and can't be deleted while the cluster audits",
                hint="set audit = off in all brokers and restart them, then delete it",
            )
        await self._partitions.delete(await self._partitions.current_topic(call.ask.name, call.ask.topic_id))
        return AdminAnswer()

    async def truncate(self, call: Call[TruncateTopic]) -> Answer:
        """Store an operator's order to truncate; the next runs of retention carry it out.

        Raises: InvalidRequestError for one of memq's own topics, and for an offset after the end of a log.
        """
        ask = call.ask
        if is_internal(ask.name):
            raise InvalidRequestError(
                f"topic '{ask.name}' is memq's own, and can't be truncated",
                hint="change its retention_ms, or name one of your topics",
            )
        topic = await self._partitions.current_topic(ask.name, ask.topic_id)
        ordered = await with_truncations(self._services.pointers, topic, ask.before)
        return AdminAnswer(topic=topic if ordered == topic else await self._store(ordered))

    async def seal(self, call: Call[SealTopic]) -> Answer:
        """Seal a topic, or let it take records again; the governor ends it (`memq.broker.upkeep.sealing`).

        Raises: InvalidRequestError for one of memq's own topics.
        """
        ask = call.ask
        if is_internal(ask.name):
            raise InvalidRequestError(
                f"topic '{ask.name}' is memq's own, and can't be sealed", hint="name your own topic"
            )
        topic = await self._partitions.current_topic(ask.name, ask.topic_id)
        if bool(topic.sealed_ms) == ask.sealed:
            return AdminAnswer(topic=topic)
        now_ms = self._services.runtime.clock.wall_ms()
        notes = {"expiring": False, "idle_mark": "", "idle_since_ms": now_ms}  # an operator keeps an idle topic, too
        changed = msgspec.structs.replace(topic, sealed_ms=now_ms if ask.sealed else 0, ended=False, **notes)
        return AdminAnswer(topic=await self._store(changed))

    async def _store(self, changed: Topic) -> Topic:
        """Store a changed topic, and return it with its next version. Raises: as the coordinator port."""
        stored = await self._services.coordinator.alter_topic(changed)
        await self._partitions.refresh()
        return stored

    async def trim_compacted(self, call: Call[TrimCompacted]) -> Answer:
        """Remove those pointers of a topic from the queue that its manifests have."""
        await trim_compacted(self._services, await self._partitions.current_topic(call.ask.topic, call.ask.topic_id))
        return AdminAnswer(sweep_age_ms=self._services.settings.sweep_age_ms)
