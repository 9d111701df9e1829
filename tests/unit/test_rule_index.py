"""The index of rules decides as a scan of all rules, and in a time that does not grow with their number."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from memq.patterns import EVERY, matches
from memq.permissions import KINDS, AccessDecision, AccessRule, Permission, Resource, ResourceKind, RuleIndex

NAMES = st.text("ab*", max_size=4)
PATTERNS = st.builds(str.__add__, st.text("ab", max_size=3), st.sampled_from(["", EVERY])).filter(bool)
RULES = st.builds(
    AccessRule,
    effect=st.sampled_from(["allow", "deny"]),
    principal=PATTERNS,
    permission=st.sampled_from([each.value for each in Permission]),
    kind=st.sampled_from([each.value for each in KINDS[:2]]),
    name=PATTERNS,
)
KINDS_OF_REQUESTS = st.sampled_from([*KINDS[:2], ResourceKind.PARTITION])
_IMPLYING = {each.value for each in (Permission.READ, Permission.WRITE, Permission.ALTER, Permission.DELETE)}


def covers(named: str, permission: Permission) -> bool:
    return named == permission.value or (named == "all" and permission is not Permission.PEER)


def allows(named: str, permission: Permission) -> bool:
    return covers(named, permission) or (permission is Permission.DESCRIBE and named in _IMPLYING)


def scanned(denying: Sequence[AccessRule], allowing: Sequence[AccessRule], permission: Permission) -> AccessDecision:
    """Return the decision of the first rule that denies, else that of the first one that allows."""
    for rule in denying:
        if rule.effect == "deny" and covers(rule.permission, permission):
            return AccessDecision(False, rule)
    for rule in allowing:
        if rule.effect == "allow" and allows(rule.permission, permission):
            return AccessDecision(True, rule)
    return AccessDecision(False)


@given(st.lists(RULES, max_size=12), NAMES, st.sampled_from(Permission), KINDS_OF_REQUESTS, NAMES)
def test_the_index_decides_on_a_resource_as_a_scan_of_all_rules(
    rules: list[AccessRule], principal: str, permission: Permission, kind: ResourceKind, name: str
) -> None:
    partition = kind is ResourceKind.PARTITION
    resource = Resource(kind, f"{name}/7" if partition else name)
    subject = ResourceKind.TOPIC if partition else kind
    matching = [
        rule
        for rule in rules
        if rule.kind == subject.value and matches(rule.principal, principal) and matches(rule.name, name)
    ]
    assert RuleIndex(rules).decide(principal, permission, resource) == scanned(matching, matching, permission)


@given(st.lists(RULES, max_size=12), NAMES, st.sampled_from(Permission), st.sampled_from(KINDS[:2]))
def test_the_index_decides_on_all_resources_as_a_scan_of_all_rules(
    rules: list[AccessRule], principal: str, permission: Permission, kind: ResourceKind
) -> None:
    denying = [rule for rule in rules if rule.kind == kind.value and matches(rule.principal, principal)]
    allowing = [rule for rule in denying if rule.name == EVERY]
    assert RuleIndex(rules).decide_on_all(principal, permission, kind) == scanned(denying, allowing, permission)


def test_thousands_of_rules_do_not_slow_a_request_with_thousands_of_names() -> None:
    rules = [
        AccessRule(effect="allow", principal=f"u{number % 500}", permission="read", kind="topic", name=f"t{number}.*")
        for number in range(4_000)
    ]
    index, calls = RuleIndex(rules), 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        found = [
            index.decide("u7", Permission.READ, Resource(ResourceKind.TOPIC, f"t{number}.x")).allowed
            for number in range(4_000)
        ]
    finally:
        sys.setprofile(None)
    assert sum(found) == 8
    assert calls < 200 * len(found), "a scan of all rules makes 4,000 and more for each name"
