"""Topics, assignments and brokers as a pure machine, for the coordinators that run in one process.

A method checks a request against the state and returns a `RegistryChange`. The shell stores the change, and only then
applies it. So a change that was not stored has no effect.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from memq.errors import (
    AlreadyExistsError,
    InvalidRequestError,
    NotFoundError,
    TermFencedError,
    VersionConflictError,
)
from memq.format.report import AUDIT_TOPIC
from memq.governor import TAKEOVER_INTERVAL_MS, Assignment, BrokerEntry, Load
from memq.limits import PARTITIONS_MAX, SLOTS
from memq.permissions import RuleSet
from memq.topic import STATE_TOPIC, PartitionKey, Topic, check_name, check_resource_name

_TOPIC_ID = re.compile(r"[0-9a-f]{32}\Z")


def encode_topic(topic: Topic, before: bytes | None = None) -> bytes:
    """Return the bytes of a topic as coordinators store it.

    Unknown fields of `before`, the stored bytes, are kept. In a rolling upgrade brokers of two versions change the same
    topics. If the older version dropped the fields of the newer one, a setting would silently get its default.
    """
    body = msgspec.json.encode(topic)
    if before is None:
        return body
    return msgspec.json.encode(_merged(msgspec.json.decode(body), msgspec.json.decode(before)))


def _merged(new: Any, old: Any) -> Any:
    """Return `new` with the fields that only `old` has.

    These are unknown fields, since the encoder writes all known ones. List items are merged by index: partitions are
    never removed or reordered.
    """
    if isinstance(new, dict) and isinstance(old, dict):
        return {name: _merged(value, old.get(name)) for name, value in new.items()} | {
            name: value for name, value in old.items() if name not in new
        }
    if isinstance(new, list) and isinstance(old, list):
        return [_merged(value, old[at] if at < len(old) else None) for at, value in enumerate(new)]
    return new


@dataclass(frozen=True, slots=True)
class RegistryChange:
    """The changes of a request: topics to store and remove, assignments, new mark and rules."""

    stored: tuple[Topic, ...] = ()
    removed: tuple[Topic, ...] = ()
    assignments: tuple[Assignment, ...] = ()
    mark: str = ""
    rules: RuleSet | None = None


class Takeover(msgspec.Struct, frozen=True, kw_only=True):
    """An early takeover of a registration. `registered_again`: the broker has done so."""

    broker: str
    session: str
    at_ms: int  # wall clock of the broker that took over
    registered_again: bool = False


def may_take_over(takeovers: Iterable[Takeover], suspect: BrokerEntry, now_ms: int) -> bool:
    """Whether a registration may be removed early.

    Its last takeover must be at least TAKEOVER_INTERVAL_MS ago. A draining broker closes its port itself. An entry
    without a host is of an earlier release, which would not register again.
    """
    if not suspect.host or suspect.draining:
        return False
    last = [each for each in takeovers if each.session == suspect.session]
    return all(each.registered_again and abs(now_ms - each.at_ms) >= TAKEOVER_INTERVAL_MS for each in last)


def has_successor(brokers: Iterable[BrokerEntry], suspect: BrokerEntry) -> bool:
    """Whether another member takes partitions: of two brokers that refuse each other, one must stay."""
    return any(each.session != suspect.session and not each.draining for each in brokers)


def with_takeover(
    takeovers: Iterable[Takeover], suspect: BrokerEntry, now_ms: int, sessions: Container[str]
) -> tuple[Takeover, ...]:
    """Return the takeovers and one of `suspect`, without old ones whose sessions are not in `sessions`."""
    kept = [each for each in takeovers if each.session in sessions or abs(now_ms - each.at_ms) < TAKEOVER_INTERVAL_MS]
    others = [each for each in kept if each.session != suspect.session]
    return (*others, Takeover(broker=suspect.id, session=suspect.session, at_ms=now_ms))


def with_return(takeovers: Iterable[Takeover], session: str) -> tuple[Takeover, ...]:
    """Return the takeovers after a session has registered again."""
    return tuple(
        msgspec.structs.replace(each, registered_again=True) if each.session == session else each for each in takeovers
    )


class Registry:
    """Topics, assignments of partitions, all ids ever used, the store's mark, rules, and the live brokers."""

    def __init__(
        self,
        topics: Iterable[Topic] = (),
        assignments: Iterable[Assignment] = (),
        used_ids: Iterable[str] = (),
        mark: str = "",
        rules: RuleSet | None = None,
    ) -> None:
        self.mark = mark
        self.rules = rules or RuleSet()
        self._topics = {topic.name: topic for topic in topics}
        self._assignments = {(entry.topic_id, entry.partition): entry for entry in assignments}
        self._order: list[PartitionKey] | None = None  # of the assignments, until one is added or removed
        self._used_ids = dict.fromkeys(used_ids)
        self._brokers: dict[str, BrokerEntry] = {}
        self._loads: dict[str, tuple[Load, ...]] = {}
        self._governor: BrokerEntry | None = None
        self._term = 0
        self._takeovers: tuple[Takeover, ...] = ()

    # ---- state -------------------------------------------------------------------------------

    def topics(self) -> list[Topic]:
        """Return all topics, by name."""
        return sorted(self._topics.values(), key=lambda topic: topic.name)

    def assignments(self) -> list[Assignment]:
        """Return all assignments, by topic id and partition."""
        if self._order is None:
            self._order = sorted(self._assignments)
        return [self._assignments[key] for key in self._order]

    def assignment(self, topic_id: str, partition: int) -> Assignment:
        """Return one assignment, or raise NotFoundError."""
        found = self._assignments.get((topic_id, partition))
        if found is None:
            raise NotFoundError(f"partition {partition} of topic id {topic_id} does not exist")
        return found

    def brokers(self) -> list[BrokerEntry]:
        """Return the live brokers, by id."""
        return [self._brokers[broker] for broker in sorted(self._brokers)]

    def governor(self) -> str:
        """Return the id of the governor, "" without one."""
        return self._governor.id if self._governor is not None else ""

    def loads(self) -> list[Load]:
        """Return the loads that the live brokers reported, by topic id and partition."""
        found = [load for loads in self._loads.values() for load in loads]
        return sorted(found, key=lambda load: (load.topic_id, load.partition))

    def deleted(self, topic_id: str) -> bool:
        """Return whether a topic with this id was deleted: only its id remains in the registry."""
        assigned = any(key[0] == topic_id for key in self._assignments)
        there = any(topic.id == topic_id for topic in self._topics.values())
        return topic_id in self._used_ids and not (assigned or there)

    # ---- requests ----------------------------------------------------------------------------

    def create_topic(self, topic: Topic) -> RegistryChange:
        """Add a topic with unassigned partitions; its epochs start at 0.

        Raises: AlreadyExistsError when the name exists, or when any earlier topic had the id.
        """
        check_topic(topic)
        if topic.name in self._topics:
            raise AlreadyExistsError(f"topic '{topic.name}' exists already")
        if topic.id in self._used_ids:
            raise AlreadyExistsError(f"topic id {topic.id} was used before", hint="draw a new id; ids are never reused")
        return RegistryChange(stored=(topic,), assignments=_unassigned(topic))

    def alter_topic(self, topic: Topic) -> RegistryChange:
        """Replace a topic by its next version; new partitions are unassigned.

        Raises: VersionConflictError when `topic.version` is not the stored one; InvalidRequestError when a partition
        would be removed; NotFoundError.
        """
        check_topic(topic)
        before = self._current_topic(topic)
        lost = {part.partition for part in before.partitions} - {part.partition for part in topic.partitions}
        if lost:
            raise InvalidRequestError(f"topic '{topic.name}' would lose its partitions {sorted(lost)}")
        added = [entry for entry in _unassigned(topic) if (topic.id, entry.partition) not in self._assignments]
        after = msgspec.structs.replace(topic, version=topic.version + 1)
        return RegistryChange(stored=(after,), assignments=tuple(added))

    def delete_topic(self, topic: Topic) -> RegistryChange:
        """Remove a topic with its assignments.

        Raises: NotFoundError, also when the topic of this name has another id; VersionConflictError.
        """
        return RegistryChange(removed=(self._current_topic(topic),))

    def set_assignment(self, assignment: Assignment, term: int = 0) -> RegistryChange:
        """Replace an assignment by its next version.

        Raises: VersionConflictError; InvalidRequestError for an epoch below the stored one; TermFencedError.
        """
        self._check_term(term)
        before = self.assignment(assignment.topic_id, assignment.partition)
        if assignment.version != before.version:
            raise VersionConflictError(
                f"assignment of partition {assignment.partition} of topic id {assignment.topic_id} "
                f"has version {before.version}, not {assignment.version}"
            )
        if assignment.epoch < before.epoch:
            raise InvalidRequestError(f"epoch {assignment.epoch} is below {before.epoch}: epochs only grow")
        return RegistryChange(assignments=(_next(assignment),))

    def release(self, broker: BrokerEntry) -> RegistryChange:
        """Release partitions that this session opened and, if it is live, those assigned to its broker."""
        live = self._is_live(broker)
        released = [(entry, released_by(entry, broker, live=live)) for entry in self.assignments()]
        return RegistryChange(assignments=tuple(_next(after) for before, after in released if after != before))

    def set_mark(self, mark: str, before: str) -> RegistryChange:
        """Replace the mark of the store if it is `before`."""
        return RegistryChange(mark=mark if self.mark == before else "")

    # ---- events ------------------------------------------------------------------------------

    def apply(self, change: RegistryChange) -> None:
        """Apply a change that was stored."""
        if change.stored or change.removed:
            self._order = None
        for topic in change.removed:
            del self._topics[topic.name]
            for key in [key for key in self._assignments if key[0] == topic.id]:
                del self._assignments[key]
        for topic in change.stored:
            self._topics[topic.name] = topic
            self._used_ids[topic.id] = None
        for entry in change.assignments:
            self._assignments[entry.topic_id, entry.partition] = entry
        self.mark = change.mark or self.mark
        self.rules = change.rules or self.rules

    def register(self, broker: BrokerEntry) -> None:
        """Add a live broker; it replaces an older session of the same id."""
        check_name(broker.id, "broker")
        if not self._is_live(broker):
            self._forget(broker.id)
        self._brokers[broker.id] = broker
        self._takeovers = with_return(self._takeovers, broker.session)

    def unregister(self, broker: BrokerEntry) -> bool:
        """Remove a broker if this is its live session; return whether it was."""
        if not self._is_live(broker):
            return False
        del self._brokers[broker.id]
        self._forget(broker.id)
        return True

    def govern(self, broker: BrokerEntry) -> int:
        """Return the term in which a live session governs; 0 when another session governs.

        Without a governor, this session becomes the governor, in a new term.
        """
        if self._governor is None and self._is_live(broker):
            self._governor = broker
            self._term += 1
        return self._term if self._governor is not None and self._governor.session == broker.session else 0

    def take_over(self, suspect: BrokerEntry, term: int, now_ms: int) -> bool:
        """Remove a suspect; see `Coordinator.take_over`. Raises: TermFencedError."""
        self._check_term(term)
        governs = self._governor is not None and self._governor.session == suspect.session
        if self._brokers.get(suspect.id) != suspect or (not term and not governs):
            return False
        if not may_take_over(self._takeovers, suspect, now_ms) or not has_successor(self._brokers.values(), suspect):
            return False
        self._takeovers = with_takeover(self._takeovers, suspect, now_ms, self._sessions())
        return self.unregister(suspect)

    def _sessions(self) -> frozenset[str]:
        return frozenset(broker.session for broker in self._brokers.values())

    def was_taken_over(self, broker: BrokerEntry) -> bool:
        """Whether this session was removed by an early takeover, and has not registered again."""
        return any(each.session == broker.session and not each.registered_again for each in self._takeovers)

    def report(self, broker: BrokerEntry, loads: Iterable[Load]) -> None:
        """Note the loads of a live broker's partitions."""
        if self._is_live(broker):
            self._loads[broker.id] = tuple(loads)

    def _check_term(self, term: int) -> None:
        if term and (term != self._term or self._governor is None):
            raise TermFencedError(f"term {term} of the governor has ended, the last one is {self._term}")

    def _is_live(self, broker: BrokerEntry) -> bool:
        found = self._brokers.get(broker.id)
        return found is not None and found.session == broker.session

    def _forget(self, broker: str) -> None:
        """Remove everything that belonged to a session."""
        self._loads.pop(broker, None)
        if self._governor is not None and self._governor.id == broker:
            self._governor = None

    def _current_topic(self, topic: Topic) -> Topic:
        found = self._topics.get(topic.name)
        if found is None or found.id != topic.id:
            raise NotFoundError(f"topic '{topic.name}' with id {topic.id} does not exist")
        if found.version != topic.version:
            raise VersionConflictError(f"topic '{topic.name}' has version {found.version}, not {topic.version}")
        return found


def check_topic(topic: Topic) -> Topic:
    """Return `topic` when its name, id, settings and partition map are valid.

    Raises: InvalidNameError, InvalidSettingError, InvalidRequestError.
    """
    check_resource_name(topic.name, internal=topic.name in (AUDIT_TOPIC, STATE_TOPIC))
    topic.settings.check()
    if not _TOPIC_ID.match(topic.id):
        raise InvalidRequestError(f"topic id {topic.id[:60]!a} is not 32 hex digits in lower case")
    numbers = sorted(part.partition for part in topic.partitions)
    if not numbers or numbers != list(range(len(numbers))):
        raise InvalidRequestError(f"partitions of topic '{topic.name}' are {numbers[:20]}, not 0 and up")
    if not all(0 <= part.read_partition < PARTITIONS_MAX for part in topic.partitions):
        raise InvalidRequestError(f"a read partition of topic '{topic.name}' is outside 0 to {PARTITIONS_MAX - 1}")
    expected = 0
    unread = {part.read_partition for part in topic.partitions} - {part.read_partition for part in topic.taking}
    if unread:
        raise InvalidRequestError(f"read partitions {sorted(unread)} of topic '{topic.name}' get no records")
    for part in topic.taking:
        if part.slot_first != expected:
            raise InvalidRequestError(f"slots of topic '{topic.name}' have a gap or an overlap at {expected}")
        expected = part.slot_last + 1
    if expected != SLOTS:
        raise InvalidRequestError(f"slots of topic '{topic.name}' end at {expected - 1}, not {SLOTS - 1}")
    return topic


def released_by(entry: Assignment, broker: BrokerEntry, *, live: bool) -> Assignment:
    """Return the assignment after a broker's departure; `live` says whether its session is the live one.

    A partition in a planned move to another broker only loses the session. A partition that another session of the
    broker opened is not changed.
    """
    if entry.broker == broker.id and (entry.session == broker.session or (live and not entry.session)):
        return msgspec.structs.replace(entry, broker="", session="")
    if entry.session == broker.session:
        return msgspec.structs.replace(entry, session="")
    return entry


def _unassigned(topic: Topic) -> tuple[Assignment, ...]:
    return tuple(Assignment(topic_id=topic.id, partition=part.partition) for part in topic.partitions)


def _next(assignment: Assignment) -> Assignment:
    return msgspec.structs.replace(assignment, version=assignment.version + 1)
