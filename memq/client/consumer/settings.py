"""Validated consumer settings."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Literal

from memq.client.arguments import check_client_id, check_connect_timeout, check_number, check_switch, check_zone
from memq.client.consumer.batch import TopicPartition
from memq.client.consumer.fetch.fetcher import ReadMode
from memq.client.consumer.record_filter import RecordFilter
from memq.client.link_pool import CONNECT_TIMEOUT_MS
from memq.client.stores import check_s3
from memq.errors import InvalidRequestError, InvalidSettingError, NotFoundError
from memq.limits import KIB, MIB
from memq.topic import (
    BROADCAST_GROUP,
    Position,
    ReadPartition,
    Topic,
    check_group,
    check_name,
    check_resource_name,
    read_partitions,
)

if TYPE_CHECKING:
    from memq.encryption.encryption import Encryption

Point = str | datetime | Position | Sequence[Position] | Mapping[tuple[str, int], str | datetime | Position]
OnDamaged = Literal["fail", "skip", "dead-letter"]
OnExpired = Literal["fail", "skip"]
BEGINNING, END = "beginning", "end"
_KAFKA_POINTS = {"earliest": BEGINNING, "smallest": BEGINNING, "latest": END, "largest": END}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerSettings:
    """The settings of one consumer. Sizes in bytes, times in ms.

    `start` and `end` as `point_of` takes them.
    """

    topics: tuple[str, ...]
    group: str | None = None
    broadcast: str | None = None
    start: Point = BEGINNING
    end: Point | None = None
    auto_commit: bool = True
    auto_commit_interval_ms: int = 1_000
    session_timeout_ms: int = 10_000
    prefetch_bytes_max: int = 64 * MIB
    on_damaged: OnDamaged = "fail"
    on_expired: OnExpired = "fail"
    wanted: RecordFilter | None = None
    read: ReadMode = "auto"
    connect_timeout_ms: int = CONNECT_TIMEOUT_MS
    client_id: str = ""
    zone: str = ""
    audit: bool = True
    s3: Mapping[str, object] | None = None
    encryption: Encryption | None = None

    def check(self) -> ConsumerSettings:
        """Return itself when the values hold. Raises: InvalidRequestError, InvalidNameError, TypeError."""
        if not self.topics:
            raise InvalidRequestError("a consumer needs at least one topic")
        for topic in self.topics:
            check_resource_name(topic, internal=True)
        if self.group is not None:
            check_resource_name(check_group(self.group), "group", internal=not self.group.startswith(BROADCAST_GROUP))
        if self.broadcast is not None:
            self._check_broadcast(self.broadcast)
        bounds = {
            "auto_commit_interval_ms": (10, 3_600_000),
            "session_timeout_ms": (100, 3_600_000),
            "prefetch_bytes_max": (4 * KIB, 1 << 40),
        }
        for name, (low, high) in bounds.items():
            check_number(name, getattr(self, name), low, high, int)
        check_switch("auto_commit", self.auto_commit)
        check_switch("audit", self.audit)
        check_connect_timeout(self.connect_timeout_ms)
        check_client_id(self.client_id)
        check_zone(self.zone)
        if self.on_damaged not in ("fail", "skip", "dead-letter"):
            raise InvalidSettingError(f"on_damaged = {self.on_damaged!r} is not 'fail', 'skip' or 'dead-letter'")
        if self.on_expired not in ("fail", "skip"):
            raise InvalidSettingError(f"on_expired = {self.on_expired!r} is not 'fail' or 'skip'")
        if self.read not in ("auto", "direct", "broker"):
            raise InvalidSettingError(f"read = {self.read!r} is not 'auto', 'direct' or 'broker'")
        check_s3(self.s3)
        check_point(self.start, "start", self.topics)
        if self.end is not None:
            check_point(self.end, "end", self.topics)
        return self

    def _check_broadcast(self, name: str) -> None:
        """Refuse a broadcast consumer with a group, or with a name that is none."""
        check_group(f"{BROADCAST_GROUP}-{check_name(name, 'broadcast')}")
        if self.group is not None:
            raise InvalidRequestError(
                f"a consumer with broadcast='{name}' reads all partitions, and has no group",
                hint="leave group or broadcast out",
            )

    @property
    def group_name(self) -> str | None:
        """The group whose positions this consumer stores: its own, or the private one of a broadcast name."""
        return self.group if self.broadcast is None else f"{BROADCAST_GROUP}-{self.broadcast}"


def topics_of(topics: str | bytes | Sequence[str]) -> tuple[str, ...]:
    """Return the topics that a consumer is to read; their names are checked later. Raises: TypeError."""
    if isinstance(topics, str):
        return (topics,)
    if isinstance(topics, bytes) or not isinstance(topics, Iterable):
        raise TypeError(f"topics must be one topic or a sequence of topics, not {type(topics).__name__}")
    return tuple(topics)


def _point_hint(text: str) -> str:
    """Return what to write in place of a text that names no point."""
    if text.lower() in _KAFKA_POINTS:
        return f"memq's word is '{_KAFKA_POINTS[text.lower()]}'"
    with contextlib.suppress(InvalidRequestError):
        Position.parse(text)
        return f"write memq.Position.parse('{text[:60]}')"
    with contextlib.suppress(ValueError):
        zone = "" if datetime.fromisoformat(text).tzinfo else ".astimezone()"
        return f"write datetime.fromisoformat('{text[:60]}'){zone}"
    return "use 'beginning', 'end', a datetime or a memq.Position"


def check_point(point: Point, name: str, topics: Sequence[str]) -> None:
    """Refuse an invalid start or end. Raises: InvalidRequestError, TypeError."""
    if not isinstance(point, str | datetime | Position | Mapping) and not _is_list(point):
        raise TypeError(f"{name} must be 'beginning', 'end', a datetime or a memq.Position, not {type(point).__name__}")
    if isinstance(point, str) and point not in (BEGINNING, END):
        raise InvalidRequestError(f"{name} = '{point[:60]}' is not a position", hint=_point_hint(point))
    if isinstance(point, datetime) and point.tzinfo is None:
        raise InvalidRequestError(
            f"{name} = {point} has no time zone", hint="use datetime.now(datetime.UTC), or astimezone()"
        )
    if isinstance(point, Mapping):
        for key, start in point.items():
            _check_partition(key, name)
            if not isinstance(start, str | datetime | Position):
                raise TypeError(f"{name} of {key} must be a memq.Position, not {type(start).__name__}")
        if point and not any(topic in topics for topic, _ in point):  # a misspelt name; those of others may be there
            raise InvalidRequestError(
                f"{name} has no position of {', '.join(topics)[:200]}, only of {min(point)[0]}",
                hint="the first part of each key is the name of a topic",
            )
    if isinstance(point, Mapping | Sequence) and not isinstance(point, str):
        for each in point.values() if isinstance(point, Mapping) else point:
            check_point(each, name, topics[:1])
    if isinstance(point, Position) and Position.parse(point.marked_text) != point:  # which refuses what no pointer has
        raise TypeError(f"{name} is a Position of something else than numbers: {point!r}")
    if len(topics) > 1 and (isinstance(point, Position) or _is_list(point)):
        raise InvalidRequestError(
            f"{name} is a Position, and there are {len(topics)} topics", hint="use {(topic, partition): Position, …}"
        )


def point_of(point: Point, partition: TopicPartition) -> str | int | Position:
    """Return what `point` means for one partition: `beginning`, `end`, a Unix time in ms, or a position.

    Positions for other partitions only leave this one at its beginning.
    """
    if isinstance(point, str):
        return point
    if isinstance(point, datetime):
        return (point - _EPOCH) // timedelta(milliseconds=1)
    if isinstance(point, Mapping):
        found = point.get(partition, BEGINNING)
        return found if isinstance(found, Position) else point_of(found, partition)
    if isinstance(point, Position):
        point = [point]
    return next((position for position in point if position.read_partition == partition.partition), BEGINNING)


def named_partitions(topic: Topic, point: Point) -> list[ReadPartition]:
    """Return the partitions of which `point` has a position; all for a point without positions.

    Raises: NotFoundError for a partition that the topic does not have: its position would be passed over.
    """
    every = read_partitions(topic)
    if isinstance(point, str | datetime):
        return every
    if isinstance(point, Mapping):
        numbers = [number for name, number in point if name == topic.name]
    else:
        numbers = [position.read_partition for position in ([point] if isinstance(point, Position) else point)]
    for number in numbers:
        if not 0 <= number < topic.read_partitions:
            raise NotFoundError(
                f"topic '{topic.name}' has no partition {number}", hint=f"it has {topic.read_partitions}, from 0 on"
            )
    return [partition for partition in every if partition.partition in numbers]


def _check_partition(key: object, name: str) -> None:
    """Refuse what names no partition: its position would be passed over. Raises: TypeError."""
    if not isinstance(key, tuple) or len(key) != 2 or not isinstance(key[0], str) or not hasattr(key[1], "__index__"):
        raise TypeError(f"{name} is by (topic, partition), not by {ascii(key)[:60]}")


def _is_list(point: Point) -> bool:
    if not isinstance(point, Sequence) or isinstance(point, str | bytes):
        return False
    return all(isinstance(position, Position) for position in point)
