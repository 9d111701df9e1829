"""Topics for operators: the part of `Admin` that creates, alters, measures and deletes them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from memq.client.arguments import (
    check_connect_timeout,
    check_kind,
    check_seconds,
    check_switch,
    public_name,
    runtime_of,
    with_kafka_hints,
)
from memq.client.broker_router import BrokerRouter
from memq.client.consumer.batch import TopicPartition, topic_partition_of
from memq.client.consumer.offset_resolver import OffsetResolver
from memq.client.consumer.settings import Point, check_point, named_partitions, point_of
from memq.client.lifecycle import AsyncClosing, Background, BlockingClient, KafkaHints
from memq.client.link_pool import CONNECT_TIMEOUT_MS, LinkPool, bootstrap_addresses
from memq.client.log_answers import Key, LogAnswers, Value, ask_logs
from memq.client.metadata import ClusterMetadata
from memq.client.topic_extents import TopicExtent, extents_of
from memq.errors import InvalidRequestError, InvalidSettingError, MemqError, NotFoundError, TimedOutError
from memq.groups.remote import RemoteGroups
from memq.limits import PARTITIONS_MAX
from memq.notification import Span
from memq.notification.remote import RemoteQueue
from memq.protocol.admin_messages import (
    AdminAnswer,
    AdminRequest,
    AlterTopic,
    CreateTopic,
    DeleteTopic,
    SealTopic,
    TruncateTopic,
)
from memq.protocol.frames import Api
from memq.protocol.hold_messages import DescribeHolds, ListDelayed
from memq.protocol.messages import TopicMetadata
from memq.protocol.queue_messages import ListQueues, WireQueue
from memq.runtime.runtime import Runtime
from memq.runtime.tls import Tls
from memq.topic import Position, ReadPartition, Topic, Totals, check_resource_name, is_internal, read_partitions

ANSWER_S = 30.0
SEAL_S = 120.0  # an owner that has just opened is alone after S and the clock error
SEAL_POLL_S = 0.2
SPANS_MAX = 1_000  # partitions that are asked for their ends in one request
Settings = Mapping[str, int | bool | str]


@dataclass(frozen=True, slots=True)
class Truncated:
    """The part of one partition that a truncation removes: from `begin` up to `before`, which stays.

    Copies and records of pointers that were not removed yet are counted, too.
    """

    topic_partition: TopicPartition
    begin: Position
    before: Position
    records: int
    bytes: int


class DelayedCount(NamedTuple):
    """How many delayed records of a partition or topic wait, and when the next one is due (Unix ms)."""

    records: int
    next_ms: int


class AsyncTopicAdmin(KafkaHints, AsyncClosing):
    """Creates, alters and deletes topics; counts their records. Any broker can answer."""

    @public_name("Admin")
    def __init__(
        self,
        brokers: str | Sequence[str] | None = None,
        *,
        connect_timeout_ms: int = CONNECT_TIMEOUT_MS,
        tls: Tls | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        self._connect_timeout_s = check_connect_timeout(connect_timeout_ms) / 1000
        self._runtime = runtime_of(runtime, tls)
        self._pool = LinkPool(self._runtime, bootstrap_addresses(brokers), owner="admin client")
        self._metadata = ClusterMetadata(self._runtime, self._pool)
        self._any = BrokerRouter(self._pool)
        self._queue = RemoteQueue(self._any)
        self._groups = RemoteGroups(self._any)
        self._resolver = OffsetResolver(self._queue)

    async def close(self) -> None:
        """Disconnect."""
        await self._metadata.close()
        await self._pool.close()

    @property
    def cluster(self) -> str:
        """The name of the cluster; "" before the first answer."""
        return self._metadata.cluster

    @with_kafka_hints
    async def create_topic(
        self, name: str, *, partitions: int | None = None, settings: Settings | None = None, exist_ok: bool = False
    ) -> Topic:
        """Create a topic and return it; with `exist_ok` return an existing one unchanged.

        Without `partitions` it has as many as its namespace sets, else as the broker's setting `partitions`.
        Raises: AlreadyExistsError, InvalidNameError, InvalidRequestError, UnknownSettingError, InvalidSettingError.
        """
        check_resource_name(name)
        if partitions is not None:
            check_kind("partitions", partitions, int)
            if not 1 <= partitions <= PARTITIONS_MAX:
                raise InvalidRequestError(f"{partitions} partitions are outside 1 to {PARTITIONS_MAX}")
        check_switch("exist_ok", exist_ok)
        sent = {} if settings is None else _sendable(settings)
        ask = CreateTopic(name=name, partitions=partitions or 0, settings=sent, exist_ok=exist_ok)
        return _topic_of(await self._ask(AdminRequest(ask=ask)))

    async def topics(self, *, internal: bool = False) -> list[Topic]:
        """Return all topics, ordered by name; `internal` adds memq's own, whose names begin with `_memq`."""
        check_switch("internal", internal)
        await self._pool.reach(self._connect_timeout_s)
        found = [found.topic for found in await self._metadata.all_topics()]
        return [topic for topic in found if internal or not is_internal(topic.name)]

    async def topic(self, name: str) -> TopicMetadata:
        """Return a topic with the owners of its partitions. Raises: NotFoundError, InvalidNameError."""
        check_resource_name(name, internal=True)
        await self._pool.reach(self._connect_timeout_s)
        self._metadata.doubt(name)
        found = await self._metadata.refresh(name)
        if found is None:
            raise NotFoundError(f"topic '{name}' does not exist")
        return found

    async def delayed(self, topic: str) -> dict[int, DelayedCount]:
        """Return how many delayed records of each write partition wait. Raises: NotFoundError."""
        found = (await self.topic(topic)).topic
        answer = await self._ask(AdminRequest(ask=DescribeHolds(topic=found.name, topic_id=found.id)))
        return {each.partition: DelayedCount(each.blocks, each.next_ms) for each in answer.waiting}

    async def delayed_topics(self, *, proven: bool = True) -> dict[str, DelayedCount]:
        """Return how many delayed records wait, for each topic with some.

        Without `proven`, owners write no proof into their logs, and the answer may be old after a takeover.
        """
        await self._pool.reach(self._connect_timeout_s)
        answer = await self._ask(AdminRequest(ask=ListDelayed(proven=proven)))
        return {each.topic: DelayedCount(each.blocks, each.next_ms) for each in answer.delayed}

    async def queues(self, *, proven: bool = True) -> dict[str, WireQueue]:
        """Return the queues that have items, with their counts. `proven` as of `delayed_topics`."""
        await self._pool.reach(self._connect_timeout_s)
        answer = await self._ask(AdminRequest(ask=ListQueues(proven=proven)))
        return {each.queue: each for each in answer.about_queues.queues}

    async def ends(self, topics: Sequence[Topic]) -> dict[str, LogAnswers[int, int]]:
        """Return the pointer offset at which each read partition ends, by topic name and partition.

        `unknown` of a topic has the error of each log that fails. Raises: NotFoundError; the first error if all fail.
        """
        _check_topics(topics)
        await self._pool.reach(self._connect_timeout_s)
        partitions = [partition for topic in topics for partition in read_partitions(topic)]
        found: dict[ReadPartition, int | MemqError] = {}
        for at in range(0, len(partitions), SPANS_MAX):
            found |= await self._ends_of(partitions[at : at + SPANS_MAX])
        _there(LogAnswers(found)).one_known()
        return {
            topic.name: LogAnswers({each.partition: found[each] for each in read_partitions(topic)}) for topic in topics
        }

    async def end_totals(self, topic: Topic, partitions: Iterable[int] | None = None) -> LogAnswers[int, Totals]:
        """Return the records and bytes ever committed to each read partition, by partition.

        Removed records count, too. `partitions` limits the answer. `unknown` has the error of each log that fails.
        Raises: NotFoundError; the first error if all logs fail.
        """
        _check_topics([topic])
        await self._pool.reach(self._connect_timeout_s)
        wanted = None if partitions is None else _numbers(partitions)
        found = await ask_logs(
            [each for each in read_partitions(topic) if wanted is None or each.partition in wanted],
            lambda each: self._resolver.end_totals(each, topic.settings, topic.writers_of(each)),
        )
        return _there(LogAnswers({each.partition: answer for each, answer in found.items()})).one_known()

    async def extents(self, topics: Sequence[Topic]) -> dict[str, TopicExtent]:
        """Return records, bytes, times and batches of the last hour of topics, by name."""
        _check_topics(topics)
        await self._pool.reach(self._connect_timeout_s)
        return await extents_of(self._resolver, list(topics), self._runtime.clock.wall_ms())

    async def count(self, topic: str, first: Position, last: Position) -> int:
        """Return how many records are from position `first` up to position `last`, which is not counted.

        Both are of one partition. It reads pointers, no records. Copies are counted, too.
        Raises: NotFoundError; InvalidRequestError for positions of two partitions, or a `last` before `first`;
        PositionExpiredError for a position that retention removed; PositionLostError if the log was cut before it.
        """
        for position in (first, last):
            if not isinstance(position, Position):
                raise TypeError(f"positions must be of memq.Position, not {type(position).__name__}")
        if first.read_partition != last.read_partition or last.offset < first.offset:
            raise InvalidRequestError(
                f"no record is from {first} up to {last}",
                hint="give two positions of one partition, the lower one first",
            )
        found = (await self.topic(topic)).topic
        (partition,) = named_partitions(found, first)
        before: list[int] = []
        for position in (first, last):
            await self._resolver.start_at(position, partition, found.settings)
            await self._resolver.checked_mark(partition, position)
            before.append((await self._totals_before(found, partition, position)).records)
        return before[1] - before[0]

    @with_kafka_hints
    async def alter_topic(self, name: str, *, settings: Settings) -> Topic:
        """Change settings of a topic and return it.

        Raises: NotFoundError, UnknownSettingError, InvalidSettingError.
        """
        sent, topic = _sendable(settings), (await self.topic(name)).topic
        return _topic_of(await self._ask(AdminRequest(ask=AlterTopic(name=name, topic_id=topic.id, settings=sent))))

    async def truncate_topic(self, name: str, before: Point, *, dry_run: bool = False) -> list[Truncated]:
        """Remove the records before a point from all partitions of a topic, and return what goes.

        `before` is "end", a datetime, or positions as a consumer's `start`; positions truncate their own partitions
        only. Records go in whole batches, so the batch of a position stays. The next runs of retention remove them,
        when they are older than the topic's `dedup_window_ms`. Readers there get PositionExpiredError, as after
        retention. With `dry_run` nothing is ordered.

        Raises: NotFoundError; InvalidRequestError for a position after the end, and for a topic of memq's own.
        """
        check_point(before, "before", (name,))
        check_switch("dry_run", dry_run)
        topic = (await self.topic(name)).topic
        found: list[Truncated] = []
        for partition in named_partitions(topic, before):
            point = point_of(before, topic_partition_of(partition))
            position = await self._resolver.start_at(point, partition, topic.settings, pass_expired=True)
            found.append(await self._truncated(topic, partition, position.pointer_offset))
        goes = {
            each.topic_partition.partition: each.before.pointer_offset for each in found if each.begin < each.before
        }
        if goes and not dry_run:
            await self._ask(AdminRequest(ask=TruncateTopic(name=name, topic_id=topic.id, before=goes)))
        return found

    async def seal_topic(self, name: str, *, timeout_s: float = SEAL_S) -> Topic:
        """Let a topic take no more records, and return it when all acked ones are in its logs.

        From then on consumers without an `end` end after the last record. Producers get TopicSealedError.
        Raises: NotFoundError; InvalidRequestError for a topic of memq's own; TimedOutError when it has not ended within
        `timeout_s`: it is sealed, and still ends later.
        """
        check_seconds("timeout_s", timeout_s, 0, 86_400)
        topic = (await self.topic(name)).topic
        topic = _topic_of(await self._ask(AdminRequest(ask=SealTopic(name=name, topic_id=topic.id))))
        until_s = self._runtime.clock.monotonic() + timeout_s
        while not topic.ended:
            if self._runtime.clock.monotonic() >= until_s:
                raise TimedOutError(
                    f"topic '{name}' is sealed, and has not ended within {timeout_s:g} s",
                    hint="the governor's log names the cause as seal-waits; ask again later",
                )
            await asyncio.sleep(SEAL_POLL_S)
            found = (await self.topic(name)).topic
            if found.id != topic.id:
                if self._metadata.is_unconfirmed(name, found.id):
                    continue  # a broker that has slept may know an earlier topic of this name
                raise NotFoundError(f"topic '{name}' was deleted while it was being sealed")
            topic = found if found.version >= topic.version else topic  # another broker may be behind
            if not topic.sealed_ms:
                raise InvalidRequestError(f"topic '{name}' was unsealed while it was being sealed")
        return topic

    async def unseal_topic(self, name: str) -> Topic:
        """Let a sealed topic take records again, and return it. Consumers that have ended stay at their end.

        Raises: NotFoundError, InvalidRequestError.
        """
        topic = (await self.topic(name)).topic
        ask = SealTopic(name=name, topic_id=topic.id, sealed=False)
        return _topic_of(await self._ask(AdminRequest(ask=ask)))

    async def delete_topic(self, name: str) -> None:
        """Delete a topic and its pointers; the sweep deletes its objects later.

        A delayed request never deletes a later topic of the same name. Raises: NotFoundError.
        """
        topic = (await self.topic(name)).topic
        await self._ask(AdminRequest(ask=DeleteTopic(name=name, topic_id=topic.id)))

    async def _ask(self, request: AdminRequest) -> AdminAnswer:
        """Ask once: a request that was lost may have been done, and a second one would hide that."""
        self._check_loop()
        await self._pool.reach(self._connect_timeout_s)
        return await self._any.once(Api.ADMIN, request, AdminAnswer, timeout_s=ANSWER_S)

    async def _ends_of(self, partitions: Sequence[ReadPartition]) -> dict[ReadPartition, int | MemqError]:
        """Ask for the ends of partitions in one request; when all fail, each has the error."""
        try:
            found = await self._queue.spans(partitions)
        except MemqError as error:
            return dict.fromkeys(partitions, error)
        return {each: span.end if isinstance(span, Span) else span for each, span in found.items()}

    async def _pointers_before(self, topic: Topic, partition: ReadPartition, position: Position) -> Totals:
        """Return how much lies before the pointer of a position."""
        offset, writers = position.pointer_offset, topic.writers_of(partition)
        return await self._resolver.totals_before(partition, offset, topic.settings, writers)

    async def _truncated(self, topic: Topic, partition: ReadPartition, before: int) -> Truncated:
        begin = await self._resolver.position_of("beginning", partition, topic.settings)
        end = Position(partition.partition, max(before, begin.pointer_offset))
        gone, left = [await self._pointers_before(topic, partition, each) for each in (begin, end)]
        size = left.bytes - gone.bytes
        return Truncated(topic_partition_of(partition), begin, end, left.records - gone.records, size)

    async def _totals_before(self, topic: Topic, partition: ReadPartition, position: Position) -> Totals:
        """Return how much lies before a position."""
        here = await self._pointers_before(topic, partition, position)
        return here.plus(position.record_index, 0)


class TopicAdmin(KafkaHints, BlockingClient):
    """The same for threads."""

    _core: AsyncTopicAdmin

    _background: Background[AsyncTopicAdmin]

    def close(self) -> None:
        """Disconnect. May be called twice."""
        self._finish(None)

    def _closing(self, timeout_s: float | None) -> Coroutine[Any, Any, None]:
        return self._core.close()

    @property
    def cluster(self) -> str:
        """The name of the cluster; "" before the first answer."""
        return self._core.cluster

    @with_kafka_hints
    def create_topic(
        self, name: str, *, partitions: int | None = None, settings: Settings | None = None, exist_ok: bool = False
    ) -> Topic:
        """Create a topic and return it; with `exist_ok` return an existing one unchanged.

        Without `partitions` it has as many as its namespace sets, else as the broker's setting `partitions`.
        Raises: AlreadyExistsError, InvalidNameError, InvalidRequestError, UnknownSettingError, InvalidSettingError.
        """
        work = self._core.create_topic(name, partitions=partitions, settings=settings, exist_ok=exist_ok)
        return self._background.run(work)

    def topics(self, *, internal: bool = False) -> list[Topic]:
        """Return all topics, ordered by name; `internal` adds memq's own, whose names begin with `_memq`."""
        return self._background.run(self._core.topics(internal=internal))

    def topic(self, name: str) -> TopicMetadata:
        """Return a topic with the owners of its partitions. Raises: NotFoundError, InvalidNameError."""
        return self._background.run(self._core.topic(name))

    def delayed(self, topic: str) -> dict[int, DelayedCount]:
        """Return how many delayed records of each write partition wait. Raises: NotFoundError."""
        return self._background.run(self._core.delayed(topic))

    def delayed_topics(self, *, proven: bool = True) -> dict[str, DelayedCount]:
        """Return how many delayed records wait, for each topic with some.

        Without `proven`, owners write no proof into their logs, and the answer may be old after a takeover.
        """
        return self._background.run(self._core.delayed_topics(proven=proven))

    def queues(self, *, proven: bool = True) -> dict[str, WireQueue]:
        """Return the queues that have items, with their counts. `proven` as of `delayed_topics`."""
        return self._background.run(self._core.queues(proven=proven))

    def ends(self, topics: Sequence[Topic]) -> dict[str, LogAnswers[int, int]]:
        """Return the pointer offset at which each read partition ends, by topic name and partition.

        `unknown` of a topic has the error of each log that fails. Raises: NotFoundError; the first error if all fail.
        """
        return self._background.run(self._core.ends(topics))

    def end_totals(self, topic: Topic, partitions: Iterable[int] | None = None) -> LogAnswers[int, Totals]:
        """Return the records and bytes ever committed to each read partition, by partition.

        Removed records count, too. `partitions` limits the answer. `unknown` has the error of each log that fails.
        Raises: NotFoundError; the first error if all logs fail.
        """
        return self._background.run(self._core.end_totals(topic, partitions))

    def extents(self, topics: Sequence[Topic]) -> dict[str, TopicExtent]:
        """Return records, bytes, times and batches of the last hour of topics, by name."""
        return self._background.run(self._core.extents(topics))

    def count(self, topic: str, first: Position, last: Position) -> int:
        """Return how many records are from position `first` up to position `last`, which is not counted.

        Copies are counted, too. Raises: NotFoundError, InvalidRequestError, PositionExpiredError, PositionLostError.
        """
        return self._background.run(self._core.count(topic, first, last))

    @with_kafka_hints
    def alter_topic(self, name: str, *, settings: Settings) -> Topic:
        """Change settings of a topic and return it.

        Raises: NotFoundError, UnknownSettingError, InvalidSettingError.
        """
        return self._background.run(self._core.alter_topic(name, settings=settings))

    def truncate_topic(self, name: str, before: Point, *, dry_run: bool = False) -> list[Truncated]:
        """Remove the records before a point from all partitions of a topic, and return what goes.

        `before` is "end", a datetime, or positions as a consumer's `start`. Whole batches go, with the next runs of
        retention, when they are older than `dedup_window_ms`. With `dry_run` nothing is ordered.
        Raises: NotFoundError, InvalidRequestError.
        """
        return self._background.run(self._core.truncate_topic(name, before, dry_run=dry_run))

    def seal_topic(self, name: str, *, timeout_s: float = SEAL_S) -> Topic:
        """Let a topic take no more records, and return it when all acked ones are in its logs.

        Raises: NotFoundError, InvalidRequestError; TimedOutError when it has not ended within `timeout_s`.
        """
        return self._background.run(self._core.seal_topic(name, timeout_s=timeout_s))

    def unseal_topic(self, name: str) -> Topic:
        """Let a sealed topic take records again, and return it. Raises: NotFoundError, InvalidRequestError."""
        return self._background.run(self._core.unseal_topic(name))

    def delete_topic(self, name: str) -> None:
        """Delete a topic and its pointers; the sweep deletes its objects later. Raises: NotFoundError."""
        self._background.run(self._core.delete_topic(name))


def _there(answers: LogAnswers[Key, Value]) -> LogAnswers[Key, Value]:
    """Return the answers. Raises: NotFoundError when one is about a topic that does not exist."""
    for error in answers.unknown.values():
        if isinstance(error, NotFoundError):
            raise error
    return answers


def _sendable(settings: Settings) -> dict[str, bool | int | str]:
    """Return settings that a request can carry; what they mean the broker knows."""
    if not isinstance(settings, Mapping):
        raise TypeError(f"settings must be a mapping of names to values, not {type(settings).__name__}")
    for name, value in settings.items():
        check_kind("the name of a topic setting", name, str)
        if not isinstance(value, bool | int | str):
            raise TypeError(f"topic setting {name} must be a number, a text or a bool, not {type(value).__name__}")
        if isinstance(value, int) and value.bit_length() > 63:
            raise InvalidSettingError(f"topic setting {name} = {value:.3g} is beyond 2^63")
    return dict(settings)


def _check_topics(topics: Sequence[Topic]) -> None:
    """Refuse names in place of topics. Raises: TypeError."""
    if not isinstance(topics, Sequence):
        raise TypeError(f"topics must be a sequence of memq.topic.Topic, not {type(topics).__name__}")
    for topic in topics:
        if not isinstance(topic, Topic):
            raise TypeError(f"topic must be a memq.topic.Topic, as `topics` returns them, not {type(topic).__name__}")


def _numbers(partitions: Iterable[int]) -> frozenset[int]:
    """Refuse what names no partitions. Raises: TypeError."""
    if not isinstance(partitions, Iterable):
        raise TypeError(f"partitions are a sequence of int, not {type(partitions).__name__}")
    numbers = tuple(partitions)
    for number in numbers:
        check_kind("partition", number, int)
    return frozenset(numbers)


def _topic_of(answer: AdminAnswer) -> Topic:
    assert answer.topic is not None, "the broker answered without a topic"
    return answer.topic
