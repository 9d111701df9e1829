"""Refuses to start on a queue that was lost: with an empty one, a sweep would take every object for unnamed."""

from __future__ import annotations

from memq.broker.services import Services
from memq.errors import InvalidRequestError, NotFoundError
from memq.format.key import shared_prefix, staged_prefix, topic_prefix
from memq.topic import read_partitions


async def check_queue(services: Services) -> None:
    """Prove that the queue knows each topic that has objects. Raises: InvalidRequestError, MemqError of the parts.

    A topic that is not in the queue and has no objects is one whose making was interrupted. The objects that topics
    share may be anybody's, so they tell something only when no topic with such objects is known; those that writers
    staged, only when no topic is known at all.
    """
    cluster, known, sharing, held, lost = services.settings.cluster, False, "", False, ""
    for topic in await services.coordinator.topics():
        try:
            await services.queue.span(read_partitions(topic)[0])
        except NotFoundError:
            await _refuse_objects(services, topic.name, topic_prefix(cluster, topic.name, topic.id))
            sharing, lost = topic.name if topic.settings.shared_objects else sharing, topic.name
        else:
            held, known = True, known or topic.settings.shared_objects
    if sharing and not known:
        await _refuse_objects(services, sharing, shared_prefix(cluster))
    if lost and not held:
        await _refuse_objects(services, lost, staged_prefix(cluster))


async def _refuse_objects(services: Services, topic: str, prefix: str) -> None:
    async for entry in services.store.list(prefix):
        raise InvalidRequestError(
            f"the queue does not have topic '{topic}', the store has '{entry.key}'",
            hint="make the queue anew with memq restore, before any broker starts",
        )
