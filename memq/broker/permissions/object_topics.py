"""Finds the topics whose batches an object has: READ of the object needs a permission on each."""

from __future__ import annotations

import asyncio

from memq.broker.services import Services
from memq.errors import CorruptDataError, InvalidRequestError, StoreError, UnsupportedFormatError
from memq.format.key import SharedObjectKey, is_staged_object, parse_object_key
from memq.permissions import Resource, ResourceKind, topic_resource
from memq.storage_handlers import ObjectEntry
from memq.storage_handlers.confirmed_reads import read_index

KNOWN_MAX = 10_000  # objects whose topics are kept in memory: objects never change
INDEX_S_MAX = 10.0


class ObjectTopics:
    """Finds the topics of an object by its key, or by its index, which is read once."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._known: dict[tuple[str, str], tuple[str, ...]] = {}

    async def resources(self, store: str, key: str) -> list[Resource]:
        """Return the topics of an object; the object itself if they are not known, for example a snapshot's.

        Raises: NotFoundError; as the store.
        """
        unknown = [Resource(ResourceKind.OBJECT, f"{store}/{key}")]
        if store not in self._services.stores or key.partition("/")[0] != self._services.settings.cluster:
            return unknown
        if not is_staged_object(key):
            try:
                parsed = parse_object_key(key)
            except InvalidRequestError:
                return unknown
            if not isinstance(parsed, SharedObjectKey):
                return [topic_resource(parsed.topic)]
        try:
            topics = await self._in_index(store, key)
        except (CorruptDataError, UnsupportedFormatError):
            return unknown
        return [topic_resource(topic) for topic in topics] or unknown

    async def _in_index(self, store: str, key: str) -> tuple[str, ...]:
        found = self._known.get((store, key))
        if found is None:
            handler = self._services.stores[store]
            try:
                async with asyncio.timeout(INDEX_S_MAX):
                    entry = ObjectEntry(key, await handler.size(key), 0)
                    index, _ = await read_index(handler, entry)
            except TimeoutError as error:
                text = f"the index of object '{key}' in store '{store}' was not read within {INDEX_S_MAX:g} s"
                raise StoreError(text) from error
            found = tuple(topic.name for topic in index.meta.topics)
            if len(self._known) >= KNOWN_MAX:
                self._known.clear()
            self._known[store, key] = found
        return found
