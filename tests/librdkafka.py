"""A librdkafka in memory that gives wrong answers on command, as the real one did.

It takes the place of the library's three clients at the one door where memq makes them. Logs are lists. Polls wait for
a record or a report, at most for their time-out.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import (
    TIMESTAMP_CREATE_TIME,
    TIMESTAMP_NOT_AVAILABLE,
    Consumer,
    ConsumerGroupState,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Producer,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AclOperation, AdminClient, ConfigResource, NewPartitions, NewTopic

from memq.notification.kafka import librdkafka

INVALID = -1001  # RD_KAFKA_OFFSET_INVALID
KafkaPartition = tuple[str, int]  # a Kafka topic and the number of a partition


@dataclass(frozen=True)
class Record:
    """One record of a log."""

    offset: int
    time_ms: int | None  # None: of a Kafka that keeps no times
    value: bytes | None
    key: bytes | None = None
    headers: list[tuple[str, bytes | None]] | None = None


@dataclass
class Log:
    """One partition. `end` may lie further behind the last record, as it does behind a control record."""

    records: list[Record] = field(default_factory=list)
    begin: int = 0
    end: int = 0
    stable: int | None = None  # where the first open transaction begins

    def append(self, time_ms: int, value: bytes) -> int:
        """Add a record and return its offset."""
        self.records.append(Record(self.end, time_ms, value))
        self.end += 1
        return self.end - 1


class Message:
    """What the library hands over: a record, or an error about a partition."""

    def __init__(
        self,
        place: KafkaPartition | tuple[None, None],
        offset: int | None,
        record: Record | None,
        error: KafkaError | None,
    ) -> None:
        self.place, self._offset, self._record, self._error = place, offset, record, error

    def topic(self) -> str | None:
        return self.place[0]

    def partition(self) -> int | None:
        return self.place[1]

    def offset(self) -> int | None:
        return self._offset

    def value(self) -> bytes | None:
        return self._record.value if self._record is not None else None

    def key(self) -> bytes | None:
        return self._record.key if self._record is not None else None

    def headers(self) -> list[tuple[str, bytes | None]] | None:
        return self._record.headers if self._record is not None else None

    def timestamp(self) -> tuple[int, int]:
        if self._record is None or self._record.time_ms is None:
            return TIMESTAMP_NOT_AVAILABLE, -1
        return TIMESTAMP_CREATE_TIME, self._record.time_ms

    def error(self) -> KafkaError | None:
        return self._error


Report = Callable[[KafkaError | None, Message], None]


ALL_RIGHTS = frozenset(AclOperation) - {AclOperation.UNKNOWN, AclOperation.ANY, AclOperation.ALL}
Request = Callable[[str, object], KafkaError | None]  # takes the name of a call and its subject; returns its error


@dataclass
class Library:
    """A Kafka with its clients. What it is to answer wrongly next is in the fields below `refuse`."""

    topics: dict[str, list[Log]] = field(default_factory=dict)
    configs: dict[str, dict[str, str]] = field(default_factory=dict)  # settings of each topic
    topic_rights: Collection[AclOperation] | None = ALL_RIGHTS
    group_rights: Collection[AclOperation] | None = ALL_RIGHTS
    now_ms: Callable[[], int] | None = None  # the clock of Kafka, which refuses records by age; None: it refuses none
    closed: int = 0  # how many consumers were closed
    changed: threading.Condition = field(default_factory=threading.Condition)  # a record or a report has come
    refuse: Request = lambda call, subject: None  # decides on requests and reads, before they are done
    followed: set[KafkaPartition] = field(default_factory=set)  # the last assignment of the last consumer that follows
    refreshed: list[str] = field(default_factory=list)  # topics whose metadata a producer has refreshed
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
    away: bool = False  # whether the records of producers get no answer: they wait in the library
    before_purge: Callable[[], object] = lambda: None  # called in the thread of a purge
    broken: BaseException | None = None  # raised by all polls of producers with reports
    unflushed: bool = False  # a producer gives no reports after a fatal error, not even when it is flushed
    kept: int = 0  # how many deletions of records or topics are called done, and are not
    denied_absence: int = 0  # how many deletions are answered "not there", and are not done
    lingering: int = 0  # how many times a topic is shown that was deleted
    configs_unknown: int = 0  # how many times a topic is called unknown when its settings are asked for
    asked: int = 0  # how many offsets were asked for
    read: int = 0  # how many partitions were read
    connection_errors: deque[KafkaError] = field(default_factory=deque)  # reported by the next poll of an admin client
    described: Future[Any] | None = None  # the answer about topics, as soon as it has one
    groups: list[str] = field(default_factory=list)  # names of all groups
    group_errors: list[KafkaError] = field(default_factory=list)  # of nodes that do not list their groups
    late: bool = False  # whether those who follow do not learn yet that a topic was deleted
    mute: bool = False  # whether nothing comes to those who read
    cluster_id: str | None = "kafka-1"

    def log(self, place: KafkaPartition) -> Log:
        return self.topics[place[0]][place[1]]

    def arrive(self, place: KafkaPartition, time_ms: int, value: bytes) -> None:
        """Add a record of another process."""
        with self.changed:
            self.log(place).append(time_ms, value)
            self.changed.notify_all()

    def delete(self, topic: str) -> None:
        """Delete a topic, as another process does."""
        with self.changed:
            del self.topics[topic]
            self.changed.notify_all()

    def client(self, kind: type[Any], settings: Mapping[str, Any], complain: Callable[[KafkaError], None]) -> Any:
        """Return a client, in place of `memq.notification.kafka.librdkafka.create_client`."""
        if kind is AdminClient:
            return FakeAdmin(self, complain)
        return {Consumer: FakeConsumer, Producer: FakeProducer}[kind](self)


def use(library_: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have memq make the clients of this library."""
    monkeypatch.setattr(librdkafka, "create_client", library_.client)


class FakeAdmin:
    """Describes topics, lists offsets, deletes records and topics."""

    def __init__(self, library_: Library, complain: Callable[[KafkaError], None]) -> None:
        self._library = library_
        self._complain = complain

    def poll(self, timeout_s: float) -> int:
        assert timeout_s == 0, "the loop would wait"
        while self._library.connection_errors:
            self._complain(self._library.connection_errors.popleft())
        return 0

    def list_topics(self, timeout: float) -> SimpleNamespace:
        error = self._library.refuse("list_topics", None)
        if error is not None:
            raise KafkaException(error)
        if self._library.silent > 0:
            self._library.silent -= 1
            raise KafkaException(KafkaError(KafkaError._TRANSPORT))
        shown = {name: SimpleNamespace(partitions=dict(enumerate(logs))) for name, logs in self._library.topics.items()}
        return SimpleNamespace(cluster_id=self._library.cluster_id, topics=shown)

    def describe_topics(
        self, topics: TopicCollection, request_timeout: float, include_authorized_operations: bool = False
    ) -> dict[str, Future[Any]]:
        names: Any = topics.topic_names
        if self._library.described is not None:
            return dict.fromkeys(names, self._library.described)
        if self._library.short > 0:
            self._library.short -= 1
            wrong = RuntimeError(f"Results length 0 is different from future-map length {len(names)}")
            return {name: finished(wrong) for name in names}
        return {name: self._described(name, include_authorized_operations) for name in names}

    def _described(self, name: str, rights: bool) -> Future[Any]:
        error = self._library.refuse("describe_topics", name)
        if error is not None:
            return finished(KafkaException(error))
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
        allowed = self._library.topic_rights if rights else None
        return finished(SimpleNamespace(partitions=parts, topic_id=f"id of {name}", authorized_operations=allowed))

    def describe_configs(self, resources: Collection[Any], request_timeout: float) -> dict[Any, Future[Any]]:
        return {resource: self._configs(resource.name) for resource in resources}

    def _configs(self, topic: str) -> Future[Any]:
        error = self._library.refuse("describe_configs", topic)
        if error is not None:
            return finished(KafkaException(error))
        if self._library.configs_unknown > 0 or topic not in self._library.configs:
            self._library.configs_unknown -= 1
            return finished(KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)))
        return finished({name: SimpleNamespace(value=value) for name, value in self._library.configs[topic].items()})

    def create_topics(self, new: Collection[NewTopic], request_timeout: float) -> dict[str, Future[Any]]:
        return {each.topic: self._created(each) for each in new}

    def _created(self, new: NewTopic) -> Future[Any]:
        error = self._library.refuse("create_topics", new)
        if error is None and new.topic in self._library.topics:
            error = KafkaError(KafkaError.TOPIC_ALREADY_EXISTS)
        if error is not None:
            return finished(KafkaException(error))
        self._library.topics[new.topic] = [Log() for _ in range(new.num_partitions)]
        self._library.configs[new.topic] = dict(new.config or {})
        return finished(None)

    def create_partitions(self, new: Collection[NewPartitions], request_timeout: float) -> dict[str, Future[Any]]:
        return {each.topic: self._widened(each) for each in new}

    def _widened(self, new: NewPartitions) -> Future[Any]:
        error = self._library.refuse("create_partitions", new)
        if error is not None:
            return finished(KafkaException(error))
        logs = self._library.topics[new.topic]
        logs += [Log() for _ in range(new.new_total_count - len(logs))]
        return finished(None)

    def incremental_alter_configs(
        self, resources: Collection[ConfigResource], request_timeout: float
    ) -> dict[Any, Future[Any]]:
        return {each: self._altered(each) for each in resources}

    def _altered(self, resource: ConfigResource) -> Future[Any]:
        error = self._library.refuse("incremental_alter_configs", resource)
        if error is not None:
            return finished(KafkaException(error))
        for entry in resource.incremental_configs:
            self._library.configs[resource.name][entry.name] = entry.value or ""
        return finished(None)

    def describe_consumer_groups(
        self, groups: Collection[str], include_authorized_operations: bool, request_timeout: float
    ) -> dict[str, Future[Any]]:
        return {group: self._group(group, include_authorized_operations) for group in groups}

    def _group(self, group: str, rights: bool) -> Future[Any]:
        error = self._library.refuse("describe_consumer_groups", group)
        if error is not None:
            return finished(KafkaException(error))
        allowed = self._library.group_rights if rights else None
        return finished(SimpleNamespace(authorized_operations=allowed, members=[], state=ConsumerGroupState.EMPTY))

    def list_consumer_groups(self, *, request_timeout: float) -> Future[Any]:
        error = self._library.refuse("list_consumer_groups", None)
        if error is not None:
            return finished(KafkaException(error))
        listed = [SimpleNamespace(group_id=name) for name in self._library.groups]
        failed = [KafkaException(each) for each in self._library.group_errors]
        return finished(SimpleNamespace(valid=listed, errors=failed))

    def alter_consumer_group_offsets(self, groups: Collection[Any], request_timeout: float) -> dict[str, Future[Any]]:
        """Call all positions stored. The library does so, too, of those that Kafka's answer lacks."""
        return {each.group_id: finished(SimpleNamespace(topic_partitions=each.topic_partitions)) for each in groups}

    def list_offsets(
        self, asked: Mapping[TopicPartition, Any], request_timeout: float, isolation_level: Any = None
    ) -> dict[Any, Future[Any]]:
        committed = isolation_level == IsolationLevel.READ_COMMITTED
        return {place: self._offset((place.topic, place.partition), spec, committed) for place, spec in asked.items()}

    def delete_records(self, before: Collection[TopicPartition], request_timeout: float) -> dict[Any, Future[Any]]:
        return {part: self._deleted(part.topic, part) for part in before}

    def delete_topics(self, names: Collection[str], request_timeout: float) -> dict[str, Future[Any]]:
        if not names:
            raise ValueError("Expected non-empty list of topics to delete")
        return {name: self._deleted(name, None) for name in names}

    def _deleted(self, name: str, before: TopicPartition | None) -> Future[Any]:
        library_ = self._library
        error = library_.refuse("delete_records" if before else "delete_topics", before or name)
        if error is not None:
            return finished(KafkaException(error))
        if library_.denied_absence > 0 or name not in library_.topics:
            library_.denied_absence -= 1
            return finished(KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)))
        library_.kept -= 1
        done = library_.kept < 0
        if before is None:
            if done:
                del library_.topics[name]
                library_.configs.pop(name, None)
            return finished(None)
        log = library_.log((name, before.partition))
        log.begin = max(before.offset, log.begin) if done else log.begin
        return finished(SimpleNamespace(low_watermark=log.begin))

    def _offset(self, place: KafkaPartition, spec: Any, committed: bool) -> Future[Any]:
        self._library.asked += 1
        error = self._library.refuse("list_offsets", place)
        if error is not None:
            return finished(KafkaException(error))
        log = self._library.log(place)
        wrong = self._library.offsets.popleft() if self._library.offsets else None
        if isinstance(wrong, KafkaError):
            return finished(KafkaException(wrong))
        if wrong is not None:
            return finished(SimpleNamespace(offset=wrong))
        value = spec._value  # -1 latest, -2 earliest, else a time
        if value == -1:
            return finished(SimpleNamespace(offset=log.end if not committed or log.stable is None else log.stable))
        if value == -2:
            return finished(SimpleNamespace(offset=log.begin))
        found = (each.offset for each in log.records if each.offset >= log.begin and (each.time_ms or 0) >= value)
        return finished(SimpleNamespace(offset=next(found, -1)))


class FakeConsumer:
    """Reads what it is assigned, and says where it ends."""

    def __init__(self, library_: Library) -> None:
        self._library = library_
        self._messages: deque[Message] = deque()
        self._followed: dict[KafkaPartition, int] = {}  # with the next offset of each

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
        error = self._library.refuse("read", place)
        if error is not None:
            return [Message(place, None, None, error)]
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
        return [TopicPartition(*place) for place in self._followed]

    def incremental_assign(self, parts: Collection[TopicPartition]) -> None:
        assert not any((part.topic, part.partition) in self._followed for part in parts), "the library refuses it"
        self._followed |= {(part.topic, part.partition): part.offset for part in parts}
        self._library.followed = set(self._followed)

    def incremental_unassign(self, parts: Collection[TopicPartition]) -> None:
        for part in parts:
            del self._followed[part.topic, part.partition]
        self._library.followed = set(self._followed)

    def poll(self, timeout_s: float) -> Message | None:
        with self._library.changed:
            self._library.changed.wait_for(lambda: self._messages or self._arrive(), timeout_s)
        return self._messages.popleft() if self._messages else None

    def _arrive(self) -> bool:
        """Receive the new records of followed partitions; whether one came."""
        for place, offset in self._followed.items():
            if place[0] not in self._library.topics:
                if offset != INVALID and not self._library.late:
                    self._messages.append(Message(place, None, None, KafkaError(KafkaError._UNKNOWN_TOPIC)))
                    self._followed[place] = INVALID
                continue
            log = self._library.log(place)
            if not self._library.mute:
                for record in log.records[max(offset - log.end, -len(log.records)) :] if offset < log.end else ():
                    self._messages.append(Message(place, record.offset, record, None))
                self._followed[place] = max(offset, log.end)
        return bool(self._messages)

    def consume(self, count: int, timeout_s: float) -> list[Message]:
        found = list(self._messages)[:count]
        for _ in found:
            self._messages.popleft()
        return found

    def close(self) -> None:
        self._library.closed += 1
        if self._library.stuck is not None:
            self._library.stuck.wait()


class FakeProducer:
    """Appends, and reports from `poll`, as the library does."""

    def __init__(self, library_: Library) -> None:
        self._library = library_
        self._reports: deque[Callable[[], None]] = deque()
        self._waiting: list[Callable[[KafkaError], None]] = []  # reports of the records that got no answer
        self._fatal: KafkaError | None = None
        self._mute = False

    def __len__(self) -> int:
        return len(self._reports) + len(self._waiting)

    def produce(
        self, topic: str, *, value: bytes, key: bytes, partition: int, timestamp: int, on_delivery: Report
    ) -> None:
        place = (topic, partition)
        error = self._fatal or self._library.refuse("produce", place)
        if error is not None:
            self._note(error)
            raise BufferError(error) if error.code() == KafkaError._QUEUE_FULL else KafkaException(error)
        if self._library.away:
            self._waiting.append(lambda error: on_delivery(error, Message(place, None, None, error)))
            return
        wrong = self._library.reports.popleft() if self._library.reports else None
        if self._refuses(topic, timestamp):
            wrong, offset = refused(KafkaError.INVALID_TIMESTAMP), INVALID
        else:
            lost = self._library.lost.popleft() if self._library.lost else False
            offset = INVALID if lost else self._library.log(place).append(timestamp, value)
        message = Message(place, offset, None, None)

        def deliver(error: KafkaError | None, reported: Message) -> None:
            self._note(error)
            on_delivery(error, reported)

        with self._library.changed:
            self._reports.append(lambda: wrong(deliver, message) if wrong else deliver(None, message))
            self._library.changed.notify_all()

    def _note(self, error: KafkaError | None) -> None:
        """After a fatal error, a producer accepts no record."""
        if error is not None and (error.fatal() or error.code() == KafkaError._FATAL):
            self._fatal = error

    def _refuses(self, topic: str, timestamp: int) -> bool:
        if self._library.now_ms is None:
            return False
        settings, age_ms = self._library.configs[topic], self._library.now_ms() - timestamp
        return age_ms > int(settings["message.timestamp.before.max.ms"]) or -age_ms > int(
            settings["message.timestamp.after.max.ms"]
        )

    def poll(self, timeout_s: float) -> int:
        with self._library.changed:
            self._library.changed.wait_for(lambda: self._reports, timeout_s)
        if self._reports and self._library.broken is not None:
            raise self._library.broken
        if self._reports and self._library.fatal:
            self._mute = self._library.unflushed
            raise KafkaException(self._library.fatal.popleft())
        while self._reports and not self._mute:
            self._reports.popleft()()
        return 0

    def list_topics(self, topic: str, timeout_s: float) -> None:
        self._library.refreshed.append(topic)

    def purge(self) -> None:
        """Report the records that got no answer."""
        self._library.before_purge()
        purged = KafkaError(KafkaError._PURGE_INFLIGHT, "purged in flight")
        self._reports.extend(partial(report, purged) for report in self._waiting)
        self._waiting.clear()

    def flush(self, timeout_s: float) -> int:
        return self.poll(0)


def refused(code: int) -> Callable[[Report, Message], None]:
    """Return what reports an error, whether the record has landed or not. The offset of such a report is void."""

    def report(deliver: Report, message: Message) -> None:
        deliver(KafkaError(code), Message(message.place, 0, None, None))

    return report


def finished(value: object) -> Future[Any]:
    """Return a finished answer of the library."""
    future: Future[Any] = Future()
    if isinstance(value, BaseException):
        future.set_exception(value)
    else:
        future.set_result(value)
    return future
