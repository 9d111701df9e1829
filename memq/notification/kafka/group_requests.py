"""Requests that the coordinator of a group answers: librdkafka ends the process when one times out at a bad moment."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from confluent_kafka import ConsumerGroupTopicPartitions, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from memq.notification.kafka.topics import Topics

LIBRARY_TIMEOUT_S = 3_600.0  # the longest that librdkafka takes


class GroupRequests:
    """Asks about a group, sets its positions, deletes it.

    librdkafka first asks who coordinates the group. When the request times out before that is answered, the answer
    that comes then ends the process (2.16: its assertion `eonce->refcnt > 0`): a Kafka that stood still for a moment,
    or was started again, would take all brokers with it. So the library is given an hour, and who asks waits for as
    long as a request may take; what was sent fails in the library by `socket.timeout.ms`, which is harmless. What
    still looks for a coordinator then may come to pass later. So that hardly anything does, a topic is asked for
    first: a Kafka that is away is found by that.
    All raise KafkaException, and what `Topics.check` raises.
    """

    def __init__(self, admin: AdminClient, topics: Topics, timeout_s: float) -> None:
        self._admin = admin
        self._topics = topics
        self._timeout_s = timeout_s

    async def describe(self, group: str, *, rights: bool = False) -> Any:
        """Return the library's description of a Kafka group; with `rights`, what may be done with it, too."""
        await self._topics.check()
        answers: Any = self._admin.describe_consumer_groups(
            [group], include_authorized_operations=rights, request_timeout=LIBRARY_TIMEOUT_S
        )
        return await self._answered(answers[group])

    async def store(self, group: str, offsets: list[TopicPartition]) -> Sequence[TopicPartition]:
        """Set positions of a Kafka group that has no members; return them, each with its error."""
        await self._topics.check()
        request = ConsumerGroupTopicPartitions(group, offsets)
        answers: Any = self._admin.alter_consumer_group_offsets([request], request_timeout=LIBRARY_TIMEOUT_S)
        stored: Sequence[TopicPartition] = (await self._answered(answers[group])).topic_partitions
        return stored

    async def delete(self, group: str) -> None:
        """Delete a Kafka group."""
        await self._topics.check()
        answers: Any = self._admin.delete_consumer_groups([group], request_timeout=LIBRARY_TIMEOUT_S)
        await self._answered(answers[group])

    async def _answered(self, answer: Any) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.wrap_future(answer)
        except TimeoutError as error:
            late = KafkaError(KafkaError._TIMED_OUT, f"no answer in {self._timeout_s:g} s")
            raise KafkaException(late) from error
