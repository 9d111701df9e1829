"""One member of a Kafka group: a consumer that joins and never fetches, on a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from memq.errors import ClosedError, DeniedError, GenerationFencedError, InvalidRequestError, MemqError, QueueError
from memq.notification.kafka.groups.holdings import Holdings
from memq.notification.kafka.librdkafka import LastErrors, consumer_of, end_threads
from memq.notification.kafka.settings import Names
from memq.runtime.threads import ThreadPool
from memq.topic import ReadPartition

POLL_S = 0.02  # longest time until the thread takes a commit
COMMIT_S = 20.0  # longest wait for the answer to a commit: librdkafka has lost such a commit, and its retry succeeds
RELEASE_S = 290.0  # longest wait of a revocation for its release; after 300 s Kafka removes the member
# Errors that end a membership; librdkafka retries after others, or reports them by a callback.
_ENDING = (
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.INVALID_SESSION_TIMEOUT,
    KafkaError.INCONSISTENT_GROUP_PROTOCOL,
    KafkaError.UNSUPPORTED_VERSION,
    KafkaError.UNSUPPORTED_ASSIGNOR,
    KafkaError.FENCED_INSTANCE_ID,
    KafkaError.UNRELEASED_INSTANCE_ID,
)


@dataclass(frozen=True, slots=True)
class Subscribe:
    """Subscribe to these Kafka topics."""

    topics: list[str]


@dataclass(frozen=True, slots=True)
class Commit:
    """Store offsets with their metadata.

    `done` gets them back, each with its own error, or one error for all.
    """

    offsets: list[TopicPartition]
    done: asyncio.Future[list[TopicPartition] | KafkaError]


@dataclass(frozen=True, slots=True)
class Released:
    """All partitions of a revocation were released."""

    revocation: int


@dataclass(frozen=True, slots=True)
class LeaveGroup:
    """Leave the group."""


Order = Subscribe | Commit | Released | LeaveGroup


class HostedMember:
    """A member of a Kafka group until it is closed.

    `holdings` change on the loop, and `changed` is set with every change.
    A revocation blocks the thread until all of its partitions are released, or the member is closed. Only then
    librdkafka joins again without them, and another member gets them. In the meantime librdkafka's own thread sends
    heartbeats to Kafka.
    """

    def __init__(
        self, name: str, settings: Mapping[str, Any], names: Names, errors: LastErrors, first_generation: int
    ) -> None:
        self.holdings = Holdings(name, first_generation)
        self.changed = asyncio.Event()
        self.failure: MemqError | None = None  # why the member is no longer in the group
        self.heard_s = 0.0
        self.session_timeout_ms = 0
        self.topics: list[str] = []
        self._name = name
        self._names = names
        self._errors = errors
        self._consumer = consumer_of({**settings, "on_commit": self._on_commit}, errors.note)
        self._loop = asyncio.get_running_loop()
        self._orders: SimpleQueue[Order] = SimpleQueue()
        self._commits: dict[asyncio.Future[list[TopicPartition] | KafkaError], None] = {}  # without an answer
        self._sent: list[Commit] = []  # the thread's commits without an answer of librdkafka, in order
        self._revocations = 0  # counted by the thread
        self._revocation = 0  # the last one that the loop has handled
        self._pool = ThreadPool("kafka-member", 1)
        self._closing = False

    async def serve(self) -> None:
        """Run the thread of the member until `close`."""
        try:
            await self._pool.run(self._serve)
        finally:
            self._refuse_commits()

    def subscribe(self, topics: Sequence[str]) -> None:
        """Subscribe to these Kafka topics, in place of the former ones."""
        self.topics = list(topics)
        self._orders.put(Subscribe(self.topics))

    def release(self, generation: int, partitions: Sequence[ReadPartition]) -> None:
        """Release revoked partitions."""
        revoking = self.holdings.revoking
        self.holdings.release(generation, partitions)
        if revoking and not self.holdings.revoking:
            self._orders.put(Released(self._revocation))

    async def commit(self, offsets: list[TopicPartition]) -> list[TopicPartition] | KafkaError:
        """Store offsets with their metadata; return each with its error, or one error.

        librdkafka may never answer a commit whose connection to Kafka was lost. After `COMMIT_S` the caller tries
        again. The thread does not wait for the answer, except within a revocation. If librdkafka does not return
        there, the membership ends after the session time-out too, so that the member joins again on another thread.
        Raises: ClosedError; GenerationFencedError; QueueError.
        """
        if self._closing:
            raise ClosedError(f"member '{self._name}' is leaving its group")
        done: asyncio.Future[list[TopicPartition] | KafkaError] = self._loop.create_future()
        self._commits[done] = None
        self._orders.put(Commit(offsets, done))
        revoking = bool(self.holdings.revoking)
        try:
            async with asyncio.timeout(COMMIT_S + (self.session_timeout_ms / 1000 if revoking else 0)):
                return await done
        except TimeoutError as error:
            text = f"librdkafka has not answered a commit of member '{self._name}'"
            if not revoking:
                raise QueueError(text) from error
            self._fail(GenerationFencedError(text))
            raise GenerationFencedError(text) from error
        finally:
            del self._commits[done]

    async def close(self) -> None:
        """Leave the group, and end the thread."""
        self._closing = True
        self._orders.put(LeaveGroup())
        await end_threads(self._pool)
        self._refuse_commits()

    # ---- on the loop ---------------------------------------------------------------------------

    def _refuse_commits(self) -> None:
        """Refuse all commits that have no answer: the thread has ended, or librdkafka blocks it for ever."""
        self._closing = True
        for done in self._commits:
            _settle(done, KafkaError(KafkaError.UNKNOWN_MEMBER_ID))

    def _assign(self, partitions: list[ReadPartition]) -> None:
        self.holdings.assign(partitions)
        self.changed.set()

    def _revoke(self, number: int, partitions: list[ReadPartition]) -> None:
        self._revocation = number
        self.holdings.revoke(partitions)
        if not self.holdings.revoking:
            self._orders.put(Released(number))
        self.changed.set()

    def _lose(self, partitions: list[ReadPartition]) -> None:
        self.holdings.lose(partitions)
        self.changed.set()

    def _fail(self, error: MemqError) -> None:
        self.failure = self.failure or error
        self.changed.set()

    # ---- in the thread -------------------------------------------------------------------------

    def _serve(self) -> None:
        consumer = self._consumer
        try:
            while not self._closing:
                with suppress(Empty):
                    self._obey(self._orders.get_nowait())
                message = consumer.poll(POLL_S)
                error = message.error() if message is not None else None
                if error is not None:
                    self._judge(error)
        except KafkaException as error:
            self._end(error.args[0])  # whatever the error: without this thread the member is not in the group
        finally:
            self._closing = True
            consumer.close()

    def _obey(self, order: Order, *, asynchronous: bool = True) -> None:
        """Execute an order of the loop.

        Only this thread may call the consumer: while it polls, calls of other threads wait for ever.
        An asynchronous commit is answered by a later poll.
        """
        if isinstance(order, Subscribe):
            self._consumer.subscribe(
                order.topics, on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost
            )
        elif isinstance(order, Commit):
            self._sent = [each for each in self._sent if not each.done.done()]
            try:
                if asynchronous:
                    self._consumer.commit(offsets=order.offsets, asynchronous=True)
                    self._sent.append(order)
                else:
                    self._answer(order, list(self._consumer.commit(offsets=order.offsets, asynchronous=False) or ()))
            except KafkaException as error:
                self._answer(order, error.args[0])

    def _on_commit(self, error: KafkaError | None, stored: list[TopicPartition]) -> None:
        """Answer the first commit of these offsets: librdkafka does not name the commit."""
        found = _contents(stored)
        for order in self._sent:
            if _contents(order.offsets) == found:
                self._sent.remove(order)
                self._answer(order, list(stored) if error is None else error)
                return

    def _answer(self, order: Commit, found: list[TopicPartition] | KafkaError) -> None:
        self._loop.call_soon_threadsafe(_settle, order.done, found)

    def _judge(self, error: KafkaError) -> None:
        """End the membership after a fatal error, or one in `_ENDING`."""
        if error.fatal() or error.code() in _ENDING or error.code() == KafkaError._FATAL:
            self._end(error)

    def _end(self, error: KafkaError) -> None:
        """End the membership: the next request of the member gets the error, and it joins again."""
        found = self._errors.failure(error, f"member '{self._name}' in its group")
        if not isinstance(found, DeniedError | InvalidRequestError):
            found = GenerationFencedError(str(found))
        self._loop.call_soon_threadsafe(self._fail, found)

    def _on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """Take partitions, paused: this consumer never fetches pointers."""
        placed = [TopicPartition(part.topic, part.partition, 0) for part in partitions]
        consumer.incremental_assign(placed)
        consumer.pause(placed)
        self._loop.call_soon_threadsafe(self._assign, self._known(partitions))

    def _on_revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """Block the thread until all partitions are released; after `close`, release them at once."""
        if self._closing or not partitions:
            return
        self._revocations += 1
        self._loop.call_soon_threadsafe(self._revoke, self._revocations, self._known(partitions))
        released = Released(self._revocations)
        sent, self._sent = self._sent, []
        for commit in sent:  # no poll calls `_on_commit` before this callback returns, and the release waits for them
            self._obey(commit, asynchronous=False)
        with suppress(Empty):
            while (order := self._orders.get(timeout=RELEASE_S)) != released and not isinstance(order, LeaveGroup):
                self._obey(order, asynchronous=False)
        self._loop.call_soon_threadsafe(self._lose, self._known(partitions))

    def _on_lost(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._loop.call_soon_threadsafe(self._lose, self._known(partitions))

    def _known(self, partitions: list[TopicPartition]) -> list[ReadPartition]:
        known = [self._names.read_partition(part.topic, part.partition) for part in partitions]
        return [part for part in known if part is not None]


def _contents(offsets: Sequence[TopicPartition]) -> set[tuple[str, int, int, str | None]]:
    return {(part.topic, part.partition, part.offset, part.metadata) for part in offsets}


def _settle(done: asyncio.Future[list[TopicPartition] | KafkaError], found: list[TopicPartition] | KafkaError) -> None:
    if not done.done():
        done.set_result(found)
