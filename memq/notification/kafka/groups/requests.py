"""Requests to group coordinators: librdkafka aborts the process if one times out at a bad moment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from confluent_kafka import ConsumerGroupTopicPartitions, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from memq.notification.kafka.admin import KafkaAdmin
from memq.notification.kafka.library import answered
from memq.runtime.process import keep_for_ever, keep_to_end

LIBRARY_TIMEOUT_S = 3_600.0  # the longest that librdkafka takes
RENEW_S = 1.0  # between two new clients, twice as long after each one until a request is answered
RENEW_S_MAX = 60.0


class KafkaGroupRequests:
    """Asks about a group, sets its positions, deletes it.

    librdkafka first asks who coordinates the group. When the request times out before that is answered, the answer
    that comes then ends the process (2.16: its assertion `eonce->refcnt > 0`): a Kafka that hung for a moment,
    or was started again, would take all brokers with it. So the library is given an hour, and who asks waits for as
    long as a request may take; what was sent fails in the library by `socket.timeout.ms`, which is harmless. What
    still looks for a coordinator then may come to pass later. So that hardly anything does, a topic is asked for
    first: a Kafka that is away is found by that.
    A client whose connection breaks under such a request never asks that coordinator again (2.16: it stays in its
    state TRY_CONNECT). It can't be destroyed, either, and keeps a few threads. A new one takes its place, after pauses
    that grow until a request is answered: with a bound on their number requests failed until the broker was restarted.
    All raise KafkaException, and what `KafkaAdmin.check` raises.
    """

    def __init__(self, make: Callable[[], AdminClient], kafka: KafkaAdmin) -> None:
        self._make = make
        self._client: AdminClient | None = None
        self._renewals = 0  # since a request was answered
        self._renew_at_s = 0.0  # on the loop's clock
        self._kafka = kafka
        self._timeout_s = kafka.timeout_s

    async def describe(self, group: str, *, rights: bool = False) -> Any:
        """Return the library's description of a Kafka group; with `rights`, what may be done with it, too."""
        await self._kafka.check()
        answers: Any = self._admin.describe_consumer_groups(
            [group], include_authorized_operations=rights, request_timeout=LIBRARY_TIMEOUT_S
        )
        return await self._answered(answers[group])

    async def store(self, group: str, offsets: list[TopicPartition]) -> Sequence[TopicPartition]:
        """Set positions of a Kafka group that has no members; return them, each with its error."""
        await self._kafka.check()
        request = ConsumerGroupTopicPartitions(group, offsets)
        answers: Any = self._admin.alter_consumer_group_offsets([request], request_timeout=LIBRARY_TIMEOUT_S)
        stored: Sequence[TopicPartition] = (await self._answered(answers[group])).topic_partitions
        return stored

    async def delete(self, group: str) -> None:
        """Delete a Kafka group."""
        await self._kafka.check()
        answers: Any = self._admin.delete_consumer_groups([group], request_timeout=LIBRARY_TIMEOUT_S)
        await self._answered(answers[group])

    @property
    def _admin(self) -> AdminClient:
        if self._client is None:
            self._client = self._make()
        return self._client

    def close(self) -> None:
        """Let go of the client."""
        if self._client is not None:
            keep_to_end(self._client)
        self._client = None

    def _renew(self, used: AdminClient) -> None:
        """Use a new client from now on.

        The one that was used is kept to the end of the process, for its destructor would wait.
        """
        now_s = asyncio.get_running_loop().time()
        if used is self._client and now_s >= self._renew_at_s:
            self._renew_at_s = now_s + min(RENEW_S * 2 ** min(self._renewals, 6), RENEW_S_MAX)
            self._renewals += 1
            self._client = None
            keep_for_ever(used)

    async def _answered(self, answer: Any) -> Any:
        used = self._admin
        try:
            async with asyncio.timeout(self._timeout_s):
                found = await answered(answer)
        except KafkaException as error:
            if error.args[0].code() == KafkaError._TRANSPORT:
                self._renew(used)
            raise
        except TimeoutError as error:
            self._renew(used)
            late = KafkaError(KafkaError._TIMED_OUT, f"no answer in {self._timeout_s:g} s")
            raise KafkaException(late) from error
        self._renewals = 0
        return found
