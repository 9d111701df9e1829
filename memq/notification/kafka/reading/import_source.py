"""Foreign Kafka topics, read to be copied: the only member of the copy's group in Kafka.

The copy uses two features of Kafka's groups. The group's generation fences a second copy: the one that joined last
continues, and the other one gets an error. The group's positions, with their metadata, store the state of the copy.
Records of aborted transactions are never returned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from confluent_kafka import TIMESTAMP_NOT_AVAILABLE, Consumer, KafkaError, KafkaException, Message, TopicPartition

from memq.errors import GenerationFencedError, MemqError, NotFoundError, QueueError, UnreachableError
from memq.notification.kafka.admin import Asked, KafkaAdmin, KafkaPartition
from memq.notification.kafka.groups.requests import Positions
from memq.notification.kafka.librdkafka import SILENT, LastErrors, code_of, consumer_of, end_threads
from memq.notification.kafka.reading.fetcher import PASSING
from memq.notification.kafka.settings import KafkaSettings
from memq.runtime.clock import Clock
from memq.runtime.threads import ThreadPool

T = TypeVar("T")
TAKE_RECORDS_MAX = 1_000
JOIN_POLL_S = 0.1
JOIN_S = 60.0  # Kafka removes a killed member after its session time-out, 6 s


class SourceRecord(NamedTuple):
    """One record of a Kafka topic; `timestamp_ms` is None if Kafka has none."""

    partition: KafkaPartition
    offset: int
    value: bytes | None
    key: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] | None
    timestamp_ms: int | None


class SourceEnd(NamedTuple):
    """The end of a partition was reached: no record lies between the last one returned and `offset`."""

    partition: KafkaPartition
    offset: int


@dataclass(frozen=True, slots=True)
class SourceTopic:
    """A Kafka topic: its unique id, and its number of partitions.

    A topic that is created again under the same name has another id.
    """

    id: str
    partitions: int


class KafkaSource:
    """Reads topics of a Kafka in a group of its own."""

    def __init__(self, settings: KafkaSettings, clock: Clock) -> None:
        """Send no request. Raises: InvalidSettingError."""
        self._settings = settings
        self._clock = clock
        self._errors = LastErrors()
        self._admin = KafkaAdmin(settings, self._errors)
        self._pool = ThreadPool("kafka-source", 1)
        self._positions = Positions(settings, self._errors)
        self._consumer: Consumer | None = None
        self._assigned: set[KafkaPartition] = set()
        self._lost = False

    async def describe(self, topics: Sequence[str]) -> tuple[str, dict[str, SourceTopic]]:
        """Return the id of the Kafka cluster, and the description of the topics.

        Raises: NotFoundError, DeniedError, QueueError; UnreachableError when Kafka does not answer.
        """
        try:
            listed = await self._admin.list_topics()  # not `describe_cluster`, which may abort the process
            found = {
                topic: await self._admin.ask(answer, f"reading the metadata of Kafka topic '{topic}'")
                for topic, answer in self._admin.describe_topics(topics).items()
            }
        except (NotFoundError, QueueError) as error:
            error.hint = "check --from and the names of the topics"
            if code_of(error) in SILENT:
                raise UnreachableError(str(error), hint=error.hint) from error
            raise
        described = {topic: SourceTopic(str(each.topic_id), len(each.partitions)) for topic, each in found.items()}
        return _id_of(listed.cluster_id), described

    async def ends(self, partitions: Sequence[KafkaPartition]) -> dict[KafkaPartition, tuple[int, int]]:
        """Return the first offset of each partition, and the offset after its last committed record.

        Raises: QueueError if a partition ends before it begins.
        """
        begins, ends = await self._offsets(partitions, "begin"), await self._offsets(partitions, "end")
        behind = [partition for partition in partitions if ends[partition] < begins[partition]]
        if behind:
            topic, number = behind[0]
            span = f"ends at {ends[behind[0]]}, before it begins at {begins[behind[0]]}"
            raise QueueError(f"partition {number} of Kafka topic '{topic}' {span}")
        return {partition: (begins[partition], ends[partition]) for partition in partitions}

    async def _offsets(self, partitions: Sequence[KafkaPartition], asked: Asked) -> dict[KafkaPartition, int]:
        found: dict[KafkaPartition, int] = {}
        for partition, offset in (
            await self._admin.list_offsets(dict.fromkeys(partitions, asked), committed=True)
        ).items():
            if isinstance(offset, MemqError):
                raise offset
            found[partition] = offset
        return found

    async def committed_of_others(
        self, partitions: Sequence[KafkaPartition], own: str
    ) -> dict[str, dict[KafkaPartition, int]]:
        """Return the positions of all groups but `own` in these partitions."""
        found: dict[str, dict[KafkaPartition, int]] = {}
        for group in sorted(each for each in await self._admin.list_groups() if each != own):
            for part in await self._positions.of(group, partitions):
                found.setdefault(group, {})[part.topic, part.partition] = part.offset
        return found

    # ---- the group of the copy ----------------------------------------------------------------

    async def join(self, group: str, topics: Sequence[str], partitions: Sequence[KafkaPartition]) -> None:
        """Become the only member of the group.

        Raises: GenerationFencedError when another member does not leave within `JOIN_S`.
        """
        await self._run(self._join, group, list(topics), set(partitions))

    async def stored(self, partitions: Sequence[KafkaPartition]) -> dict[KafkaPartition, tuple[int, str]]:
        """Return the stored offset and metadata of each partition, without those that have none."""
        return await self._run(self._stored, partitions)

    async def store(self, positions: Mapping[KafkaPartition, tuple[int, str]]) -> None:
        """Store offsets with metadata. Raises: GenerationFencedError when another copy took over; QueueError."""
        await self._run(self._store, positions)

    async def start(self, offsets: Mapping[KafkaPartition, int]) -> None:
        """Read all partitions from these offsets on."""
        await self._run(self._start, offsets)

    async def seek(self, partition: KafkaPartition, offset: int) -> None:
        """Read a partition from another offset on."""
        await self._run(self._seek, partition, offset)

    async def take(self, wait_s: float) -> list[SourceRecord | SourceEnd]:
        """Return received records and ends; wait up to `wait_s`.

        Raises: GenerationFencedError, DeniedError, NotFoundError, QueueError.
        """
        return await self._run(self._take, wait_s)

    async def close(self) -> None:
        """Leave the group, and end the thread."""
        await self._positions.close()
        await end_threads(self._pool, self._consumer.close if self._consumer is not None else None)
        await self._admin.close()

    # ---- in the thread -------------------------------------------------------------------------

    def _join(self, group: str, topics: list[str], partitions: set[KafkaPartition]) -> None:
        self._consumer = consumer_of(self._settings.source(group), self._errors.note)
        self._consumer.subscribe(topics, on_assign=self._on_assign, on_revoke=self._on_revoke)
        deadline_s = self._clock.monotonic() + JOIN_S
        while self._assigned != partitions:
            message = self._consumer.poll(JOIN_POLL_S)
            if message is not None:
                self._judge(message.error())
            if self._clock.monotonic() > deadline_s:
                raise GenerationFencedError(
                    f"group '{group}' at {self._settings.servers} has another member that does not leave",
                    hint="end the other import of these topics",
                )
        self._lost = False  # a revocation before the full assignment does not matter

    def _on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._assigned |= {(part.topic, part.partition) for part in partitions}
        consumer.assign(partitions)
        consumer.pause(partitions)

    def _on_revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._assigned -= {(part.topic, part.partition) for part in partitions}
        self._lost = True

    def _stored(self, partitions: Sequence[KafkaPartition]) -> dict[KafkaPartition, tuple[int, str]]:
        parts = self._own().committed(
            [TopicPartition(*partition) for partition in partitions], timeout=self._admin.timeout_s
        )
        for part in parts:
            if part.error is not None:  # else the copy would begin as if no position was stored
                raise KafkaException(part.error)
        return {(part.topic, part.partition): (part.offset, part.metadata or "") for part in parts if part.offset >= 0}

    def _store(self, positions: Mapping[KafkaPartition, tuple[int, str]]) -> None:
        parts = [TopicPartition(*partition, offset, metadata=state) for partition, (offset, state) in positions.items()]
        for part in self._own().commit(offsets=parts, asynchronous=False) or ():
            if part.error is not None:
                raise KafkaException(part.error)

    def _start(self, offsets: Mapping[KafkaPartition, int]) -> None:
        parts = [TopicPartition(*partition, offset) for partition, offset in offsets.items()]
        self._own().assign(parts)
        self._own().resume(parts)

    def _seek(self, partition: KafkaPartition, offset: int) -> None:
        self._own().seek(TopicPartition(*partition, offset))

    def _take(self, wait_s: float) -> list[SourceRecord | SourceEnd]:
        found: list[SourceRecord | SourceEnd] = []
        for message in self._own().consume(TAKE_RECORDS_MAX, wait_s):
            error = message.error()
            if error is None:
                found.append(_record_of(message))
            elif error.code() == KafkaError._PARTITION_EOF:
                found.append(SourceEnd((message.topic() or "", message.partition() or 0), message.offset() or 0))
            else:
                self._judge(error)
        self._own()  # raises if `consume` has handled a revocation
        return found

    def _own(self) -> Consumer:
        assert self._consumer is not None, "it joins first"
        if self._lost:
            raise GenerationFencedError(
                "another import of these topics into the same topic took over", hint="let the other import continue"
            )
        return self._consumer

    def _judge(self, error: KafkaError | None) -> None:
        if error is not None and error.code() not in PASSING:
            raise self._errors.failure(error, "reading Kafka's topics")

    # ---- inside ---------------------------------------------------------------------------------

    async def _run(self, function: Callable[..., T], *arguments: Any) -> T:
        try:
            return await self._pool.run(function, *arguments)
        except KafkaException as error:
            raise self._errors.group_failure(error, "copying Kafka's topics", member=True) from error


def _id_of(cluster: str | None) -> str:
    """Return the id of a Kafka cluster, which is part of the identity of its records."""
    if not cluster:
        raise QueueError("Kafka does not report the id of its cluster", hint="use Kafka 0.10.1 or later")
    return cluster


def _record_of(message: Message) -> SourceRecord:
    kind, time_ms = message.timestamp()
    value: Any = message.value()
    key: Any = message.key()
    headers: Any = message.headers()
    return SourceRecord(
        (message.topic() or "", message.partition() or 0),
        message.offset() or 0,
        None if value is None else bytes(value),
        None if key is None else bytes(key),
        tuple((name, None if held is None else bytes(held)) for name, held in headers) if headers else None,
        None if kind == TIMESTAMP_NOT_AVAILABLE else time_ms,
    )
