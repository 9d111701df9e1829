"""A librdkafka in memory that gives wrong answers on command, as the real one did.

It takes the place of the library's three clients at the one door where memq makes them. Logs are lists; nothing waits,
but a delivery report that is held back.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient

from memq.notification.kafka import librdkafka

INVALID = -1001  # RD_KAFKA_OFFSET_INVALID
KafkaPartition = tuple[str, int]  # a Kafka topic and the number of a partition


@dataclass(frozen=True)
class Record:
    """One record of a log."""

    offset: int
    time_ms: int
    value: bytes


@dataclass
class Log:
    """One partition. `end` may lie further behind the last record, as it does behind a control record."""

    records: list[Record] = field(default_factory=list)
    begin: int = 0
    end: int = 0

    def append(self, time_ms: int, value: bytes) -> int:
        """Add a record and return its offset."""
        self.records.append(Record(self.end, time_ms, value))
        self.end += 1
        return self.end - 1


class Message:
    """What the library hands over: a record, or an error about a partition."""

    def __init__(
        self, place: KafkaPartition, offset: int | None, record: Record | None, error: KafkaError | None
    ) -> None:
        self._place, self._offset, self._record, self._error = place, offset, record, error

    def topic(self) -> str:
        return self._place[0]

    def partition(self) -> int:
        return self._place[1]

    def offset(self) -> int | None:
        return self._offset

    def value(self) -> bytes | None:
        return self._record.value if self._record is not None else None

    def timestamp(self) -> tuple[int, int]:
        return 1, self._record.time_ms if self._record is not None else -1

    def error(self) -> KafkaError | None:
        return self._error


Report = Callable[[KafkaError | None, Message], None]


@dataclass
class Library:
    """A Kafka with its clients. What it is to answer wrongly next is in the fields below `topics`."""

    topics: dict[str, list[Log]] = field(default_factory=dict)
    offsets: deque[int | KafkaError | None] = field(default_factory=deque)  # for the next offsets; None: the right one
    eof_early: int = 0  # how many reads meet an end at once, wherever they begin
    rewinds: int = 0  # how many reads begin again behind two records: a false OFFSET_OUT_OF_RANGE
    visible: int | None = None  # a replica that lags shows records below this offset alone
    reports: deque[Callable[[Report, Message], None]] = field(default_factory=deque)  # in place of the next reports
    lost: deque[bool] = field(default_factory=deque)  # whether the next records do not land
    stuck: threading.Event | None = None  # what ends a client does not return before this is set
    unknown: int = 0  # how many times topics are not shown
    silent: int = 0  # how many times topics are asked for and nobody answers
    short: int = 0  # how many answers about topics lack them
    narrow: int = 0  # how many times topics are shown without their last partition
    fatal: deque[KafkaError] = field(default_factory=deque)  # raised by the next polls of producers, before reports
    unflushed: bool = False  # a producer gives no reports after a fatal error, not even when it is flushed
    kept: int = 0  # how many deletions of records or topics are called done, and are not
    denied_absence: int = 0  # how many deletions are answered "not there", and are not done
    lingering: int = 0  # how many times a topic is shown that was deleted
    configs: dict[str, str] = field(default_factory=dict)  # settings of each topic
    configs_unknown: int = 0  # how many times a topic is called unknown when its settings are asked for
    asked: int = 0  # how many offsets were asked for
    read: int = 0  # how many partitions were read
    mute: bool = False  # whether nothing comes to those who read

    def log(self, place: KafkaPartition) -> Log:
        return self.topics[place[0]][place[1]]

    def client(self, kind: type[Any], settings: Mapping[str, Any], complain: Callable[[KafkaError], None]) -> Any:
        """Return a client, in place of `memq.notification.kafka.librdkafka._client`."""
        return {AdminClient: FakeAdmin, Consumer: FakeConsumer, Producer: FakeProducer}[kind](self)


def use(library_: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have memq make the clients of this library."""
    monkeypatch.setattr(librdkafka, "_client", library_.client)


class FakeAdmin:
    """Describes topics, lists offsets, deletes records and topics."""

    def __init__(self, library_: Library) -> None:
        self._library = library_

    def poll(self, timeout_s: float) -> int:
        return 0

    def list_topics(self, timeout: float) -> SimpleNamespace:
        if self._library.silent > 0:
            self._library.silent -= 1
            raise KafkaException(KafkaError(KafkaError._TRANSPORT))
        return SimpleNamespace(cluster_id="kafka-1", topics=self._library.topics)

    def describe_topics(self, topics: TopicCollection, request_timeout: float) -> dict[str, Future[Any]]:
        names: Any = topics.topic_names
        if self._library.short > 0:
            self._library.short -= 1
            wrong = RuntimeError(f"Results length 0 is different from future-map length {len(names)}")
            return {name: finished(wrong) for name in names}
        return {name: self._described(name) for name in names}

    def _described(self, name: str) -> Future[Any]:
        if name not in self._library.topics and self._library.lingering > 0:
            self._library.lingering -= 1
            leader = SimpleNamespace(id=1)
            return finished(
                SimpleNamespace(partitions=[SimpleNamespace(id=0, leader=leader)], topic_id=f"id of {name}")
            )
        if name not in self._library.topics or self._library.unknown > 0:
            self._library.unknown -= 1
            return finished(KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)))
        count = len(self._library.topics[name]) - (self._library.narrow > 0)
        self._library.narrow -= 1
        parts = [SimpleNamespace(id=number, leader=SimpleNamespace(id=1)) for number in range(count)]
        return finished(SimpleNamespace(partitions=parts, topic_id=f"id of {name}"))

    def describe_configs(self, resources: Collection[Any], request_timeout: float) -> dict[Any, Future[Any]]:
        return {resource: self._configs() for resource in resources}

    def _configs(self) -> Future[Any]:
        if self._library.configs_unknown > 0:
            self._library.configs_unknown -= 1
            return finished(KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)))
        return finished({name: SimpleNamespace(value=value) for name, value in self._library.configs.items()})

    def list_offsets(
        self, asked: Mapping[TopicPartition, Any], request_timeout: float, isolation_level: Any = None
    ) -> dict[Any, Future[Any]]:
        return {place: self._offset((place.topic, place.partition), spec) for place, spec in asked.items()}

    def delete_records(self, before: Collection[TopicPartition], request_timeout: float) -> dict[Any, Future[Any]]:
        return {part: self._deleted(part.topic, part) for part in before}

    def delete_topics(self, names: Collection[str], request_timeout: float) -> dict[str, Future[Any]]:
        return {name: self._deleted(name, None) for name in names}

    def _deleted(self, name: str, before: TopicPartition | None) -> Future[Any]:
        library_ = self._library
        if library_.denied_absence > 0 or name not in library_.topics:
            library_.denied_absence -= 1
            return finished(KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)))
        library_.kept -= 1
        done = library_.kept < 0
        if before is None:
            if done:
                del library_.topics[name]
            return finished(None)
        log = library_.log((name, before.partition))
        log.begin = before.offset if done else log.begin
        return finished(SimpleNamespace(low_watermark=log.begin))

    def _offset(self, place: KafkaPartition, spec: Any) -> Future[Any]:
        self._library.asked += 1
        log = self._library.log(place)
        wrong = self._library.offsets.popleft() if self._library.offsets else None
        if isinstance(wrong, KafkaError):
            return finished(KafkaException(wrong))
        if wrong is not None:
            return finished(SimpleNamespace(offset=wrong))
        value = spec._value  # -1 latest, -2 earliest, else a time
        if value == -1:
            return finished(SimpleNamespace(offset=log.end))
        if value == -2:
            return finished(SimpleNamespace(offset=log.begin))
        found = (each.offset for each in log.records if each.offset >= log.begin and each.time_ms >= value)
        return finished(SimpleNamespace(offset=next(found, -1)))


class FakeConsumer:
    """Reads what it is assigned, and says where it ends."""

    def __init__(self, library_: Library) -> None:
        self._library = library_
        self._messages: deque[Message] = deque()
        self._followed: list[TopicPartition] = []

    def list_topics(self, topic: str, timeout_s: float) -> None:
        """Nothing has to be looked up."""

    def assign(self, parts: Collection[TopicPartition]) -> None:
        self._messages.clear()
        for part in parts:
            self._library.read += 1
            self._messages += self._read((part.topic, part.partition), part.offset)

    def _read(self, place: KafkaPartition, offset: int) -> list[Message]:
        if self._library.mute:
            return []
        log, eof = self._library.log(place), KafkaError(KafkaError._PARTITION_EOF)
        if self._library.eof_early > 0:
            self._library.eof_early -= 1
            return [Message(place, offset, None, eof)]
        shown = log.end if self._library.visible is None else min(log.end, self._library.visible)
        first = offset if log.begin <= offset <= log.end else log.begin  # out of range: auto.offset.reset = earliest
        records = [record for record in log.records if first <= record.offset < shown]
        if self._library.rewinds > 0:
            self._library.rewinds -= 1
            records = records[:2] + [record for record in log.records if record.offset >= log.begin]
        found = [Message(place, record.offset, record, None) for record in records]
        return [*found, Message(place, max(shown, first), None, eof)]

    def unassign(self) -> None:
        self._messages.clear()

    def assignment(self) -> list[TopicPartition]:
        return list(self._followed)

    def incremental_assign(self, parts: Collection[TopicPartition]) -> None:
        """Nothing comes to those who follow."""
        self._followed += parts

    def incremental_unassign(self, parts: Collection[TopicPartition]) -> None:
        self._followed = [part for part in self._followed if part not in parts]

    def poll(self, timeout_s: float) -> Message | None:
        return self._messages.popleft() if self._messages else None

    def consume(self, count: int, timeout_s: float) -> list[Message]:
        found = list(self._messages)[:count]
        for _ in found:
            self._messages.popleft()
        return found

    def close(self) -> None:
        if self._library.stuck is not None:
            self._library.stuck.wait()


class FakeProducer:
    """Appends, and reports from `poll`, as the library does."""

    def __init__(self, library_: Library) -> None:
        self._library = library_
        self._reports: deque[Callable[[], None]] = deque()
        self._mute = False

    def __len__(self) -> int:
        return len(self._reports)

    def produce(
        self, topic: str, *, value: bytes, key: bytes, partition: int, timestamp: int, on_delivery: Report
    ) -> None:
        place = (topic, partition)
        lost = self._library.lost.popleft() if self._library.lost else False
        offset = INVALID if lost else self._library.log(place).append(timestamp, value)
        message = Message(place, offset, None, None)
        wrong = self._library.reports.popleft() if self._library.reports else None
        self._reports.append(lambda: wrong(on_delivery, message) if wrong else on_delivery(None, message))

    def poll(self, timeout_s: float) -> int:
        if self._reports and self._library.fatal:
            self._mute = self._library.unflushed
            raise KafkaException(self._library.fatal.popleft())
        while self._reports and not self._mute:
            self._reports.popleft()()
        return 0

    def list_topics(self, topic: str, timeout_s: float) -> None:
        """Nothing has to be looked up."""

    def purge(self) -> None:
        """Nothing waits in it."""

    def flush(self, timeout_s: float) -> int:
        return self.poll(timeout_s)


def refused(code: int) -> Callable[[Report, Message], None]:
    """Return what reports an error, whether the record has landed or not. The offset of such a report is void."""

    def report(deliver: Report, message: Message) -> None:
        deliver(KafkaError(code), Message((message.topic(), message.partition()), 0, None, None))

    return report


def finished(value: object) -> Future[Any]:
    """Return a finished answer of the library."""
    future: Future[Any] = Future()
    if isinstance(value, BaseException):
        future.set_exception(value)
    else:
        future.set_result(value)
    return future
