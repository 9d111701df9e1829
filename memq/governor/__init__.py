"""The coordinator port: membership, topics, and assignments by compare-and-set; one file each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import msgspec

from memq.topic import Topic


class BrokerEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A live broker: its id, the session that registered it, and where clients reach it.

    `capacity_bytes_s`: what it can take, 0 when nobody said. `draining`: it wants to own nothing any more.
    """

    id: str
    session: str
    address: str
    http_address: str = ""
    zone: str = ""
    capacity_bytes_s: int = 0
    draining: bool = False


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """The current load of a write partition, as its owner measured it."""

    topic_id: str
    partition: int
    bytes_s: int


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """The owner of a write partition.

    `epoch` only grows; `version` is for compare-and-set; `broker` "" means none.
    `session` is that of the owner that opened it, "" while it is assigned but not opened. In a planned move it is
    still that of the old owner while `broker` is the new one already: who drains first gives it back.
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
    left for them to read; calls may be merged. At most one session governs, and what is set in its term is
    refused from the moment that another one does. Loads are sent to nobody; a reader asks for them.
    While the coordinator is away every call raises UnreachableError, and whoever owns a partition continues: the proof
    is in the queue. A registered broker whose session was lost meanwhile is entered again.
    Raises: VersionConflictError, NotFoundError, AlreadyExistsError, UnreachableError, DeniedError.
    """

    @property
    def cluster(self) -> str:
        """The cluster's name."""
        ...

    async def register(self, broker: BrokerEntry) -> None:
        """Enter a broker into the membership, in place of an older session or entry of the same id."""
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

    async def current_topic(self, name: str) -> Topic | None:
        """Return a topic by a fresh read, None if there is none: all earlier changes are visible."""
        ...

    async def deleted(self, topic_id: str) -> bool:
        """Return whether a topic with this id was deleted, by a fresh read.

        The coordinator keeps the ids of deleted topics. It returns False for an id that it does not know: a backup or
        a stale read from before the topic was created proves nothing.
        """
        ...

    async def assignments(self) -> Sequence[Assignment]:
        """Return the assignments of all partitions, by topic id and partition."""
        ...

    async def assignment(self, topic_id: str, partition: int) -> Assignment:
        """Return one assignment by a fresh read: all earlier changes are visible."""
        ...

    async def set_assignment(self, assignment: Assignment, *, term: int = 0) -> Assignment:
        """Replace the assignment whose stored version is `assignment.version`.

        Return it with the next version.
        With a `term` the change is the governor's. Raises: TermFencedError when that term has ended.
        """
        ...

    async def govern(self, broker: BrokerEntry) -> int:
        """Return the term in which this registered session governs: a new one without a governor.

        0 when another does.
        """
        ...

    async def governor(self) -> str:
        """Return the id of the governor, "" without one."""
        ...

    async def report(self, broker: BrokerEntry, loads: Sequence[Load]) -> None:
        """Report the load of the broker's partitions; it replaces the last report.

        It goes when the broker goes.
        """
        ...

    async def loads(self) -> Sequence[Load]:
        """Return what the live brokers reported last, by topic id and partition."""
        ...

    def watch(self, callback: Callable[[], Awaitable[None]]) -> Callable[[], None]:
        """Call `callback` after changes; the returned function ends that."""
        ...

    async def close(self) -> None:
        """End threads and connections."""
        ...


class MarkKeeper(Protocol):
    """Keeps the mark by which a cluster knows its store. Raises: UnreachableError, DeniedError."""

    async def store_mark(self, mark: str = "", *, before: str = "") -> str:
        """Return the mark of the cluster's store by a fresh read, "" while it has none.

        With `mark` it is set first, when the stored one is `before`; otherwise nothing changes.
        """
        ...


class MarkedCoordinator(Coordinator, MarkKeeper, Protocol):
    """A coordinator of brokers that are processes, each with its own setting `store`."""
