"""Planted bugs of permissions: withdrawn ones last, old rules come back, and answers of the coordinator get lost."""

from __future__ import annotations

from tests.simulation.bug import Planted, body, omit, swap

RULES = ("rules",)
CHECKS, BROKER = "memq.broker.permissions.checks", "memq.broker.broker"

RULES_BUGS = (
    Planted(
        "decisions in memory outlive a change of rules",
        CHECKS,
        "PermissionChecks.apply",
        omit("self._cache.clear"),
        level="calm",
        aspects=RULES,
    ),
    Planted(
        "rules are read each minute",
        CHECKS,
        "PermissionChecks.follow",
        swap("READ_INTERVAL_S", "60.0"),
        level="calm",
        aspects=RULES,
    ),
    Planted(
        "older rules are taken without a second read",
        CHECKS,
        "PermissionChecks.refresh",
        swap("again != found", "False"),
        level="breezy",
        aspects=(*RULES, "lies"),
    ),
    Planted(
        "rules are forgotten while they can't be read",
        CHECKS,
        "PermissionChecks.follow",
        swap("self._unread.failed", "(lambda text: self.apply(RuleSet()))"),
        level="breezy",
        aspects=RULES,
    ),
    Planted(
        "an open stream outlives the right to write",
        BROKER,
        "Broker._rules_changed",
        body("pass"),
        level="calm",
        aspects=RULES,
    ),
    Planted(
        "the first error ends the reading of rules",
        CHECKS,
        "PermissionChecks.follow",
        swap("self._unread.failed", "(lambda text: (_ for _ in ()).throw(asyncio.CancelledError()))"),
        level="breezy",
        aspects=RULES,
    ),
)
