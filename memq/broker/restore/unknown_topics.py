"""Objects of topics that the coordinator does not know: no restore can put their pointers into a log.

A deleted topic leaves objects until a sweep, and the coordinator keeps its id. Any other unknown topic is lost: the
coordinator is empty, an old backup, or the one of another cluster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from memq.errors import CorruptDataError, InvalidRequestError, NotFoundError, UnsupportedFormatError
from memq.format.key import SharedObjectKey, parse_object_key, topic_prefix, topics_prefix
from memq.format.object import ObjectTopic
from memq.governor import Coordinator
from memq.storage_handlers import ObjectEntry, StorageHandler
from memq.storage_handlers.confirmed_reads import read_index
from memq.topic import Topic

LOST_TEXT = (
    "the coordinator does not know it; its {count} objects were not restored: restore a backup of the coordinator, or"
    " check the settings coordinator and cluster"
)


async def unknown_objects(
    cluster: str,
    store: StorageHandler,
    coordinator: Coordinator,
    topics: Iterable[Topic],
    batches: Counter[ObjectTopic],
) -> Counter[ObjectTopic]:
    """Count the objects of topics that are neither among `topics` nor deleted.

    `batches` are counts of batches in shared and staged objects, by topic. A topic has only the first 8 hex digits of
    its id if no index of its objects can be read. Raises: MemqError of store and coordinator.
    """
    known = {topic_prefix(cluster, topic.name, topic.id) for topic in topics}
    counts: Counter[str] = Counter()
    names: dict[str, ObjectTopic] = {}
    for topic, count in batches.items():
        prefix = topic_prefix(cluster, topic.name, topic.id)
        counts[prefix] += count
        names[prefix] = topic
    async for entry in store.list(topics_prefix(cluster)):
        try:
            named = parse_object_key(entry.key)
        except InvalidRequestError:
            continue  # a foreign object, or a manifest
        assert not isinstance(named, SharedObjectKey), entry.key
        prefix = topic_prefix(cluster, named.topic, named.topic_id)
        counts[prefix] += 1
        if prefix in known or (prefix in names and len(names[prefix].id) > len(named.topic_id)):
            continue
        shown = [
            topic for topic in await _topics_in(store, entry) if topic_prefix(cluster, topic.name, topic.id) == prefix
        ]
        names[prefix] = shown[0] if shown else ObjectTopic(named.topic, named.topic_id)
    return Counter(
        {
            topic: counts[prefix]
            for prefix, topic in names.items()
            if prefix not in known and not await coordinator.deleted(topic.id)
        }
    )


async def _topics_in(store: StorageHandler, entry: ObjectEntry) -> Sequence[ObjectTopic]:
    """Return the topics of an object by its index: a key has only a part of the topic's id."""
    try:
        index, _ = await read_index(store, entry)
    except (CorruptDataError, NotFoundError, UnsupportedFormatError):
        return ()
    return index.meta.topics
