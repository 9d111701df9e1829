"""Who owns what: the coordinator port (membership, topics, assignments by compare-and-set), one file each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import msgspec

from memq.topic import Topic


class BrokerEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A live broker: its id, the session that registered it, and where clients reach it."""

    id: str
    session: str
    address: str
    http_address: str = ""
    zone: str = ""


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """Who owns a write partition. `epoch` only grows; `version` is for compare-and-set; `broker` "" means nobody.

    `session` is that of the owner that opened it, "" while it is assigned but not opened.
    """

    topic_id: str
    partition: int
    broker: str = ""
    session: str = ""
    epoch: int = 0
    version: int = 0


class Coordinator(Protocol):
    """Membership, topics and assignments.

    Promises: every change of a topic or an assignment is a compare-and-set on its version; what was
    read may be stale, what was set was current. Watchers are called after a change, with what changed
    left for them to read; calls may be merged.
    Raises: VersionConflictError, NotFoundError, AlreadyExistsError, UnreachableError.
    """

    @property
    def cluster(self) -> str:
        """The cluster's name."""
        ...

    async def register(self, broker: BrokerEntry) -> None:
        """Enter a broker into the membership, in place of an older session of the same id."""
        ...

    async def unregister(self, broker: BrokerEntry) -> None:
        """Leave the membership and release what this session owns."""
        ...

    async def brokers(self) -> Sequence[BrokerEntry]:
        """Return the live brokers, by id."""
        ...

    async def topics(self) -> Sequence[Topic]:
        """Return all topics, by name."""
        ...

    async def create_topic(self, topic: Topic) -> None:
        """Add a topic with unassigned partitions."""
        ...

    async def alter_topic(self, topic: Topic) -> Topic:
        """Replace the topic whose stored version is `topic.version`; return it with the next version."""
        ...

    async def delete_topic(self, topic: Topic) -> None:
        """Remove a topic and its assignments."""
        ...

    async def assignments(self) -> Sequence[Assignment]:
        """Return the assignments of all partitions, by topic id and partition."""
        ...

    async def assignment(self, topic_id: str, partition: int) -> Assignment:
        """Return one assignment."""
        ...

    async def set_assignment(self, assignment: Assignment) -> Assignment:
        """Replace the assignment whose stored version is `assignment.version`; return it with the next version."""
        ...

    def watch(self, callback: Callable[[], Awaitable[None]]) -> Callable[[], None]:
        """Call `callback` after changes; the returned function ends that."""
        ...

    async def close(self) -> None:
        """End threads and connections."""
        ...
