"""The coordinator port: membership, topics, and assignments by compare-and-set; one file each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import msgspec

from memq.permissions import RuleSet
from memq.topic import Topic

TAKEOVER_INTERVAL_MS = 60_000  # between two early takeovers of one registration: a port that flaps causes one a minute


class BrokerEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A live broker: its id, the session that registered it, and where clients reach it.

    `capacity_bytes_s`: the traffic that it can take, 0 when not configured. `draining`: it gives up its partitions.
    `host` and `pid` identify its process, for the check of a suspicion; a broker of an earlier release has none.
    `state_logs`: its groups are on state logs; a broker of an earlier release has them in the queue.
    """

    id: str
    session: str
    address: str
    http_address: str = ""
    zone: str = ""
    capacity_bytes_s: int = 0
    draining: bool = False
    host: str = ""
    pid: int = 0
    state_logs: bool = False


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """The current load of a write partition, as its owner measured it."""

    topic_id: str
    partition: int
    bytes_s: int


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """The owner of a write partition.

    `epoch` only grows; `version` is for compare-and-set; `broker` "" means no owner.
    `session` names the session of the owner that opened the partition, "" while none has opened it. In a planned
    move `broker` is already the new owner, and `session` is still the old owner's. The old owner drains, and then
    sets `session` to "".
    """

    topic_id: str
    partition: int
    broker: str = ""
    session: str = ""
    epoch: int = 0
    version: int = 0


class RuleKeeper(Protocol):
    """Keeps the rules of permissions. A change notifies no watcher. Raises: UnreachableError, DeniedError."""

    async def read(self) -> RuleSet:
        """Return the rules by a fresh read, which shows all earlier changes; version 0 has none."""
        ...

    async def replace(self, changed: RuleSet) -> RuleSet:
        """Replace the rules if `changed` has the version that follows theirs; return the stored rules."""
        ...


class Coordinator(Protocol):
    """Membership, topics, assignments, and the rules of permissions.

    Promises: every change of a topic or an assignment is a compare-and-set on its version. So a read may be
    stale, but a change is always based on the current version. Watchers are called after a change, without
    arguments, and read the new state themselves; calls may be merged. At most one session governs; from the
    moment that another session governs, changes in the old term are refused. Loads notify no watcher.
    While the coordinator is unreachable, every call raises UnreachableError, and owners keep their partitions: their
    proof is in the queue. A broker whose session was lost in that time is registered again.
    Raises: VersionConflictError, NotFoundError, AlreadyExistsError, UnreachableError, DeniedError.
    """

    rules: RuleKeeper

    @property
    def cluster(self) -> str:
        """The cluster's name."""
        ...

    async def register(self, broker: BrokerEntry) -> int | None:
        """Add a broker to the membership; it replaces an older session or entry of the same id.

        Return the wall time (Unix ms) of the coordinator's machine when it stored the entry; None if that is not known.
        """
        ...

    async def unregister(self, broker: BrokerEntry) -> None:
        """Leave the membership and release the partitions that this session owns."""
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
        """Return a topic by a fresh read, which shows all earlier changes; None if it does not exist."""
        ...

    async def deleted(self, topic_id: str) -> bool:
        """Return whether a topic with this id was deleted, by a fresh read.

        The coordinator keeps the ids of deleted topics. It returns False for an unknown id. Such an id proves nothing:
        the coordinator may have been restored from a backup, or the read may be older than the topic.
        """
        ...

    async def assignments(self) -> Sequence[Assignment]:
        """Return the assignments of all partitions, by topic id and partition."""
        ...

    async def assignment(self, topic_id: str, partition: int) -> Assignment:
        """Return one assignment by a fresh read, which shows all earlier changes."""
        ...

    async def set_assignment(self, assignment: Assignment, *, term: int = 0) -> Assignment:
        """Replace the assignment whose stored version is `assignment.version`.

        Return it with the next version.
        With a `term`, the change is the governor's. Raises: TermFencedError when that term has ended.
        """
        ...

    async def govern(self, broker: BrokerEntry) -> int:
        """Return the term in which this registered session governs; 0 when another session governs.

        Without a governor, this session becomes the governor, in a new term.
        """
        ...

    async def governor(self) -> str:
        """Return the id of the governor, "" without one."""
        ...

    async def take_over(self, suspect: BrokerEntry, *, term: int, now_ms: int) -> bool:
        """Remove a suspect from the membership, and from the governor's role, before its session ends.

        Its partitions are assigned by the governor's next act. With a `term`, the call is the governor's; with 0, the
        suspect must be the governor. Return False, without a change, when the stored registration is not `suspect`, is
        draining, was taken over less than TAKEOVER_INTERVAL_MS before `now_ms`, or is the last member that takes
        partitions. A suspect that is alive returns by `register`. Raises: TermFencedError when `term` has ended.
        """
        ...

    async def report(self, broker: BrokerEntry, loads: Sequence[Load]) -> None:
        """Report the load of the broker's partitions; it replaces the last report.

        The report is removed when the broker leaves the membership. A caller reports again only after a change: a
        coordinator that lost its session repeats the last report.
        """
        ...

    async def loads(self) -> Sequence[Load]:
        """Return the last reports of the live brokers, by topic id and partition."""
        ...

    def watch(self, callback: Callable[[], Awaitable[None]]) -> Callable[[], None]:
        """Call `callback` after changes, until the caller calls the returned function."""
        ...

    async def close(self) -> None:
        """End threads and connections."""
        ...


class MarkKeeper(Protocol):
    """Keeps the mark by which a cluster recognises its store. Raises: UnreachableError, DeniedError."""

    async def store_mark(self, mark: str = "", *, before: str = "") -> str:
        """Return the mark of the cluster's store by a fresh read, "" while it has none.

        With `mark`, the coordinator first replaces the stored mark by it, but only if the stored mark is `before`.
        """
        ...


class MarkedCoordinator(Coordinator, MarkKeeper, Protocol):
    """A coordinator of brokers that are processes, each with its own setting `store`."""
