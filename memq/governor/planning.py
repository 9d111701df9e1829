"""Input and output of a governor's plan: words between pure strategies and the shell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memq.governor import Assignment, BrokerEntry, Load
from memq.topic import Topic


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """The cluster as the coordinator showed it, not at one moment: changes are compare-and-set."""

    topics: Sequence[Topic]
    brokers: Sequence[BrokerEntry]
    assignments: Sequence[Assignment]
    loads: Sequence[Load] = ()
    now_ms: int = 0  # wall clock of who looks


@dataclass(frozen=True, slots=True)
class AssignmentChange:
    """One assignment to set, with the version that it replaces, and why."""

    assignment: Assignment
    before: str  # the broker that has it until then, "" when nobody has
    reason: str


@dataclass(frozen=True, slots=True)
class AssignmentPlan:
    """Changes in order, and notes for an operator: overloaded brokers, no broker at all."""

    changes: tuple[AssignmentChange, ...] = ()
    notes: tuple[str, ...] = ()


Strategy = Callable[[ClusterView], AssignmentPlan]
