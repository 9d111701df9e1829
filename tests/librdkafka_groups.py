"""Groups of a Kafka in memory, for the consumers of `tests/librdkafka.py`: one member with all partitions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from tests.librdkafka import INVALID, FakeAdmin, KafkaPartition, Library, Message, finished

Rebalanced = Callable[[Any, list[TopicPartition]], None]


@dataclass
class Part:
    """A partition in an answer: unlike that of the library, its error can be chosen."""

    topic: str
    partition: int
    offset: int
    metadata: str | None
    error: KafkaError | None


@dataclass
class GroupLibrary(Library):
    """A Kafka with groups."""

    positions: dict[str, dict[KafkaPartition, tuple[int, str]]] = field(default_factory=dict)  # of each group
    held: set[KafkaPartition] = field(default_factory=set)  # what a member of another process does not give back
    members: dict[str, MemberConsumer] = field(default_factory=dict)  # of each group
    errors: deque[KafkaError] = field(default_factory=deque)  # received next, in messages that name no partition
    idle: Callable[[float], None] = lambda timeout_s: None  # called by polls that receive nothing

    def client(self, kind: type[Any], settings: Mapping[str, Any], complain: Callable[[KafkaError], None]) -> Any:
        if kind is Consumer:
            return MemberConsumer(self, settings["group.id"])
        return GroupAdmin(self, complain) if kind is AdminClient else super().client(kind, settings, complain)


class GroupAdmin(FakeAdmin):
    """Lists groups, too."""

    def __init__(self, library_: GroupLibrary, complain: Callable[[KafkaError], None]) -> None:
        super().__init__(library_, complain)
        self._groups = library_.positions

    def list_consumer_groups(self, *, request_timeout: float) -> Future[Any]:
        return finished(SimpleNamespace(errors=[], valid=[SimpleNamespace(group_id=name) for name in self._groups]))


class MemberConsumer:
    """A member: it gets all partitions that no other process holds, and loses them to the next member."""

    def __init__(self, library_: GroupLibrary, group: str) -> None:
        self._library, self._group = library_, group
        self._topics: list[str] = []
        self._on_assign: Rebalanced | None = None
        self._on_revoke: Rebalanced | None = None
        self._assigned: list[TopicPartition] = []  # by the group
        self._at: dict[KafkaPartition, int] = {}  # the next offset of each partition
        self._ended: set[KafkaPartition] = set()  # whose end was reported
        self._paused: set[KafkaPartition] = set()

    def subscribe(self, topics: list[str], on_assign: Rebalanced, on_revoke: Rebalanced) -> None:
        self._topics, self._on_assign, self._on_revoke = topics, on_assign, on_revoke
        self._library.members[self._group] = self

    def _rebalance(self) -> None:
        """Call what was given to `subscribe`, as polls of the library do."""
        topics = self._topics if self._library.members.get(self._group) is self else []
        places = [(topic, number) for topic in topics for number in range(len(self._library.topics[topic]))]
        parts = [TopicPartition(*place) for place in places if place not in self._library.held]
        if parts == self._assigned:
            return
        assert self._on_assign is not None
        assert self._on_revoke is not None
        revoked, self._assigned = self._assigned, parts
        if revoked:
            self._at = {}
            self._on_revoke(self, revoked)
        if parts:
            self._on_assign(self, parts)

    def poll(self, timeout_s: float) -> Message | None:
        self._rebalance()
        found = self._receive(1)
        if not found:
            self._library.idle(timeout_s)
        return found[0] if found else None

    def consume(self, count: int, timeout_s: float) -> list[Message]:
        self._rebalance()
        return self._receive(count)

    def _receive(self, count: int) -> list[Message]:
        if self._library.errors:
            return [Message((None, None), None, None, self._library.errors.popleft())]
        found: list[Message] = []
        for place in [place for place in self._at if place not in self._paused]:
            log, offset = self._library.log(place), self._at[place]
            records = [record for record in log.records if record.offset >= offset][: count - len(found)]
            found += [Message(place, record.offset, record, None) for record in records]
            self._at[place] = records[-1].offset + 1 if records else max(offset, log.end)
            if not records and place not in self._ended and len(found) < count:
                self._ended.add(place)
                found.append(Message(place, self._at[place], None, KafkaError(KafkaError._PARTITION_EOF)))
        return found

    def assign(self, parts: Collection[TopicPartition]) -> None:
        self._ended.clear()
        self._at.clear()
        stored = self._library.positions.get(self._group, {})
        for part in parts:
            place = part.topic, part.partition
            self._at[place] = part.offset if part.offset >= 0 else stored.get(place, (0, ""))[0]

    def pause(self, parts: Collection[TopicPartition]) -> None:
        assert all((part.topic, part.partition) in self._at for part in parts), "the library ignores it"
        self._paused |= {(part.topic, part.partition) for part in parts}

    def resume(self, parts: Collection[TopicPartition]) -> None:
        self._paused -= {(part.topic, part.partition) for part in parts}

    def seek(self, part: TopicPartition) -> None:
        place = part.topic, part.partition
        if place not in self._at:
            raise KafkaException(KafkaError(KafkaError._STATE))
        self._at[place] = part.offset
        self._ended.discard(place)

    def committed(self, parts: Collection[TopicPartition], timeout: float) -> list[Part]:
        assert timeout < 60, "the library waits for as long"
        stored = self._library.positions.get(self._group, {})
        return [
            self._part(part, "committed", *stored.get((part.topic, part.partition), (INVALID, ""))) for part in parts
        ]

    def commit(self, offsets: Collection[TopicPartition], asynchronous: bool) -> list[Part] | None:
        if asynchronous:
            return None  # the library stores them at some time, and tells nobody of an error
        if self._library.members.get(self._group) is not self:
            raise KafkaException(KafkaError(KafkaError.ILLEGAL_GENERATION))
        parts = [self._part(part, "commit", part.offset, part.metadata) for part in offsets]
        stored = self._library.positions.setdefault(self._group, {})
        stored |= {(part.topic, part.partition): (part.offset, part.metadata or "") for part in parts if not part.error}
        return parts

    def _part(self, part: TopicPartition, call: str, offset: int, metadata: str | None) -> Part:
        error = self._library.refuse(call, (part.topic, part.partition))
        return Part(part.topic, part.partition, offset, metadata or None, error)

    def close(self) -> None:
        if self._library.members.get(self._group) is self:
            del self._library.members[self._group]
        self._library.closed += 1
