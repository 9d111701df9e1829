"""Refuses to start on a queue that was lost: with an empty one, a sweep would take every object for unnamed."""

from __future__ import annotations

from memq.broker.services import Services
from memq.errors import InvalidRequestError, NotFoundError
from memq.format.key import topic_prefix
from memq.topic import read_partitions


async def check_queue(services: Services) -> None:
    """Prove that the queue knows each topic that has objects. Raises: InvalidRequestError, MemqError of the parts.

    A topic that is not in the queue and has no objects is one whose making was interrupted.
    """
    for topic in await services.coordinator.topics():
        try:
            await services.queue.span(read_partitions(topic)[0])
        except NotFoundError as error:
            async for entry in services.store.list(topic_prefix(services.settings.cluster, topic.name, topic.id)):
                raise InvalidRequestError(
                    f"the queue does not have topic '{topic.name}', of which the store has '{entry.key}'",
                    hint="make the queue anew with memq restore, before any broker starts",
                ) from error
