"""The verdict of an audit of queue items: faults by kind, and the account of the items. Pure values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Self

from memq.audit.finding import Outcome

NAMED_MAX = 10  # named findings of one kind; its count is exact
STATES = ("waiting", "leased", "acked", "expired", "dead", "cancelled")


class ItemFault(Enum):
    """The kinds of findings, with their outcome.

    LOST: an item disappeared without a decision that ends it. MISSING, CORRUPT: the payload of a live item is not in
    the store, or damaged. AGAIN: an item was delivered after its ack. FORMER: an ack under a former lease ended an
    item. NUMBER: a grant number was used twice. FAULT: another contradiction of log and snapshot. UNREAD: store or
    queue did not answer. UNNAMED: an object has items that no decision names, as their enqueue got no answer.
    """

    LOST = ("lost", Outcome.LOST)
    MISSING = ("missing payload", Outcome.LOST)
    CORRUPT = ("damaged payload", Outcome.DAMAGED)
    FORMER = ("ended by a former lease", Outcome.DAMAGED)
    NUMBER = ("grant number used twice", Outcome.DAMAGED)
    FAULT = ("contradiction", Outcome.DAMAGED)
    AGAIN = ("acked, and came again", Outcome.DOUBLED)
    UNREAD = ("not read", Outcome.INCOMPLETE)
    UNNAMED = ("not in the log", Outcome.INCOMPLETE)

    def __new__(cls, title: str, outcome: Outcome) -> Self:
        """Make a kind whose value is its title."""
        kind = object.__new__(cls)
        kind._value_, kind.outcome = title, outcome
        return kind

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class ItemFinding:
    """One fault of an item, or of `items` items of a block. An empty `queue` or `item` is not known."""

    fault: ItemFault
    shard: int
    cause: str
    queue: str = ""
    item: str = ""
    items: int = 1

    def __str__(self) -> str:
        where = f"item {self.item}" if self.item else f"queue {self.queue}" if self.queue else f"shard {self.shard}"
        more = f" and {self.items - 1} more of its block" if self.items > 1 else ""
        return f"{where}{more}: {self.cause}"

    def to_json(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        words = {"finding": self.fault.value, "cause": self.cause, "queue": self.queue, "item": self.item}
        return {**words, "shard": self.shard, "items": self.items}


@dataclass(slots=True)
class ItemVerdict:
    """Findings and account of an audit.

    `states` counts the items of `queue`, of all queues if it is empty.
    `former` counts items that ended before the first snapshot that the audit could read: no log has their ends.
    """

    queue: str = ""
    shards: int = 0
    entries: int = 0
    snapshots: int = 0
    objects: int = 0
    bytes: int = 0
    former: int = 0
    states: Counter[str] = field(default_factory=Counter)
    counts: Counter[ItemFault] = field(default_factory=Counter)
    findings: list[ItemFinding] = field(default_factory=list)

    def add(self, found: Iterable[ItemFinding]) -> None:
        """Add findings; those of other queues are left out."""
        for each in found:
            if not self.queue or each.queue in ("", self.queue):
                if self.counts[each.fault] < NAMED_MAX:
                    self.findings.append(each)
                self.counts[each.fault] += each.items

    @property
    def outcome(self) -> Outcome:
        """The gravest outcome of the findings."""
        outcomes = {fault.outcome for fault, count in self.counts.items() if count}
        return next((outcome for outcome in Outcome if outcome in outcomes), Outcome.CLEAN)

    @property
    def passed(self) -> bool:
        """Whether there is no fault: the verdict is clean or incomplete."""
        return self.outcome in (Outcome.CLEAN, Outcome.INCOMPLETE)

    @property
    def basis(self) -> str:
        """The number of shards, entries, snapshots and payloads that were read."""
        read = f"{self.shards} shards, {self.entries:,} entries, {self.snapshots} snapshots"
        former = f"; {self.former:,} items of all queues ended before the first snapshot" if self.former else ""
        return f"{read}, payloads of {self.objects:,} blocks ({self.bytes:,} bytes){former}"

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as JSON values."""
        return {
            "queue": self.queue,
            "verdict": self.outcome.value,
            "items": {state: self.states[state] for state in STATES},
            "ended_before": self.former,
            "counts": {fault.value: self.counts[fault] for fault in ItemFault if self.counts[fault]},
            "findings": [each.to_json() for each in self.findings],
            "coverage": {name: getattr(self, name) for name in ("shards", "entries", "snapshots", "objects", "bytes")},
        }

    def __str__(self) -> str:
        subject = f"queue '{self.queue}'" if self.queue else "all queues"
        items = ", ".join(f"{self.states[state]:,} {state}" for state in STATES if self.states[state])
        return f"{self.outcome.value}: {subject}, {sum(self.states.values()):,} items" + (f": {items}" if items else "")
