"""The topics that the live audit knows. A shell.

Brokers learn of a new topic one by one, so the list of one broker may lack an existing topic. Before the audit drops
reports about a topic, it requests the topic by name, and the broker asks the coordinator.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from memq.errors import InvalidRequestError, NotFoundError, NotReadyError
from memq.protocol.messages import Metadata, MetadataRequest
from memq.topic import Topic, is_internal

GONE_MAX = 4_096  # ids of topics that are gone, and are not asked for again

ListTopics = Callable[[], Awaitable[Sequence[Topic]]]  # raises RetryableError
FindTopic = Callable[[str], Awaitable[Topic]]  # by name; raises RetryableError, NotFoundError, InvalidRequestError
AskMetadata = Callable[[MetadataRequest], Awaitable[Metadata]]


async def find_topic(ask: AskMetadata, name: str) -> Topic:
    """Return a topic as the coordinator has it.

    Raises: NotReadyError if the broker knows only an earlier topic of that name, because it can't ask the coordinator;
    NotFoundError; as `ask`.
    """
    answer = await ask(MetadataRequest(topics=[name]))
    if name in answer.unconfirmed:
        raise NotReadyError(f"no broker could ask the coordinator for topic '{name}'")
    for found in answer.topics:
        return found.topic
    raise NotFoundError(f"topic '{name}' does not exist")


class AuditedTopics:
    """Topics by id. Raises everywhere: RetryableError."""

    def __init__(self, ask_all: ListTopics, find: FindTopic) -> None:
        self.by_id: dict[str, Topic] = {}
        self._ask_all = ask_all
        self._find = find
        self._gone: dict[str, None] = {}

    async def refresh(self) -> None:
        """Request all topics. Request each known topic that the answer lacks by its name."""
        before, listed = self.by_id, {topic.id: topic for topic in await self._ask_all()}
        for topic in before.values():
            if topic.id not in listed:
                listed |= await self._found(topic.name, topic.id)
        self.by_id = listed

    async def learn(self, name: str, topic_id: str) -> None:
        """Request the topic of a report if it is unknown."""
        if topic_id not in self.by_id and topic_id not in self._gone and not is_internal(name):
            self.by_id |= await self._found(name, topic_id)

    async def _found(self, name: str, topic_id: str) -> dict[str, Topic]:
        try:
            topic = await self._find(name)
        except (NotFoundError, InvalidRequestError):
            pass
        else:
            if topic.id == topic_id:
                return {topic_id: topic}
        self._gone[topic_id] = None  # an id never comes back
        while len(self._gone) > GONE_MAX:
            del self._gone[next(iter(self._gone))]
        return {}
