"""What a governor plans from and what it plans: the words between the strategies (pure) and the governor's shell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memq.governor import Assignment, BrokerEntry, Load
from memq.topic import Topic


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """The cluster as the coordinator showed it, not all at one moment: what a plan changes is compared and set."""

    topics: Sequence[Topic]
    brokers: Sequence[BrokerEntry]
    assignments: Sequence[Assignment]
    loads: Sequence[Load] = ()
    now_ms: int = 0  # wall clock of who looks


@dataclass(frozen=True, slots=True)
class Change:
    """One assignment to set, with the version that it replaces, and why."""

    assignment: Assignment
    before: str  # the broker that has it until then, "" when nobody has
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What to change, in this order, and what an operator should know: brokers over their capacity, nobody there."""

    changes: tuple[Change, ...] = ()
    notes: tuple[str, ...] = ()


Strategy = Callable[[ClusterView], Plan]
