"""Rules, roles and decisions: deny wins, without a rule nothing is allowed, bad rules are refused."""

from __future__ import annotations

import pytest

from memq.errors import InvalidRequestError, TooLargeError
from memq.permissions import (
    KINDS,
    ROLES,
    AccessRule,
    Permission,
    Resource,
    ResourceKind,
    RuleIndex,
    RuleSet,
    changed_rules,
    decode_rules,
    encode_rules,
    rules_of_role,
)

CLICKS = Resource(ResourceKind.TOPIC, "clicks")


def rule(effect: str, principal: str, permission: str, name: str, kind: str = "topic") -> AccessRule:
    assert effect in ("allow", "deny")
    return AccessRule(effect=effect, principal=principal, permission=permission, kind=kind, name=name)  # type: ignore[arg-type]


@pytest.mark.parametrize("permission", [each for each in Permission if each is not Permission.ALL])
def test_without_a_rule_nothing_is_allowed_and_with_one_only_what_it_names(permission: Permission) -> None:
    assert not RuleIndex(()).decide("ann", permission, CLICKS).allowed
    given = rule("allow", "ann", permission.value, "clicks")
    assert RuleIndex([given]).decide("ann", permission, CLICKS) == (True, given)
    for principal, resource in (
        ("anna", CLICKS),
        ("an", CLICKS),
        ("ann", Resource(ResourceKind.TOPIC, "clicks2")),
        ("ann", Resource(ResourceKind.TOPIC, "click")),
        ("ann", Resource(ResourceKind.GROUP, "clicks")),
        ("ann", Resource(ResourceKind.CLUSTER)),
    ):
        assert RuleIndex([given]).decide(principal, permission, resource) == (False, None)


def test_a_rule_for_one_permission_allows_no_other_but_the_description() -> None:
    for given in Permission:
        rules = [rule("allow", "a", given.value, "*")]
        allowed = {wanted for wanted in Permission if RuleIndex(rules).decide("a", wanted, CLICKS).allowed}
        implied = {Permission.READ, Permission.WRITE, Permission.ALTER, Permission.DELETE}
        if given is Permission.ALL:
            assert allowed == set(Permission) - {Permission.PEER}
        else:
            assert allowed == {given} | ({Permission.DESCRIBE} if given in implied else set())


@pytest.mark.parametrize("first", [True, False])
def test_a_deny_wins_over_each_allow_in_any_order(first: bool) -> None:
    allow, deny = rule("allow", "*", "all", "*"), rule("deny", "team-*", "read", "cl*")
    rules = [deny, allow] if first else [allow, deny]
    assert RuleIndex(rules).decide("team-a", Permission.READ, CLICKS) == (False, deny)
    assert RuleIndex(rules).decide("team-a", Permission.WRITE, CLICKS) == (True, allow)
    assert RuleIndex(rules).decide("team-a", Permission.DESCRIBE, CLICKS).allowed, "a denied read denies no description"
    assert RuleIndex(rules).decide("other", Permission.READ, CLICKS).allowed
    everything = [allow, rule("deny", "team-a", "all", "clicks")]
    assert not any(RuleIndex(everything).decide("team-a", each, CLICKS).allowed for each in Permission)


def test_a_partition_has_the_permissions_of_its_topic() -> None:
    given = [rule("allow", "ann", "write", "team/clicks")]
    assert RuleIndex(given).decide("ann", Permission.WRITE, Resource(ResourceKind.PARTITION, "team/clicks/3")).allowed
    assert not RuleIndex(given).decide("ann", Permission.WRITE, Resource(ResourceKind.PARTITION, "team/3")).allowed


def test_all_resources_are_allowed_without_any_denied_one() -> None:
    allow = rule("allow", "ann", "read", "*")
    assert RuleIndex([allow]).decide_on_all("ann", Permission.READ, ResourceKind.TOPIC).allowed
    assert not RuleIndex([]).decide_on_all("ann", Permission.READ, ResourceKind.TOPIC).allowed
    assert (
        not RuleIndex([rule("allow", "ann", "read", "a*")])
        .decide_on_all("ann", Permission.READ, ResourceKind.TOPIC)
        .allowed
    )
    denied = [allow, rule("deny", "ann", "read", "secret")]
    assert not RuleIndex(denied).decide_on_all("ann", Permission.READ, ResourceKind.TOPIC).allowed
    assert not RuleIndex(denied).decide_on_all("bob", Permission.READ, ResourceKind.TOPIC).allowed


@pytest.mark.parametrize("other", [rule("deny", "bob", "read", "*"), rule("allow", "ann", "read", "*", "queue")])
def test_rules_of_others_between_hide_no_deny(other: AccessRule) -> None:
    allow, deny = rule("allow", "ann", "read", "*"), rule("deny", "ann", "read", "clicks")
    for rules in ([allow, other, deny], [other, allow, deny], [other, deny, allow]):
        assert RuleIndex(rules).decide("ann", Permission.READ, CLICKS) == (False, deny)
        assert RuleIndex(rules).decide_on_all("ann", Permission.READ, ResourceKind.TOPIC) == (False, deny)
    assert RuleIndex([other, allow]).decide("ann", Permission.READ, CLICKS) == (True, allow)
    assert RuleIndex([other, allow]).decide_on_all("ann", Permission.READ, ResourceKind.TOPIC) == (True, allow)


@pytest.mark.parametrize(
    "bad",
    [
        rule("allow", "", "read", "a"),
        rule("allow", "a*b", "read", "a"),
        rule("allow", "a", "read", ""),
        rule("allow", "a", "read", "*a"),
        rule("allow", "a", "read", "a\n"),
        rule("allow", "a" * 257, "read", "a"),
        rule("allow", "a", "fly", "a"),
        rule("allow", "a", "read", "a", "partition"),
        rule("allow", "a", "read", "a", "object"),
        rule("allow", "a", "describe", "a", "cluster"),
    ],
)
def test_a_rule_that_is_not_sound_is_refused(bad: AccessRule) -> None:
    with pytest.raises(InvalidRequestError):
        changed_rules(RuleSet(), [bad], [])
    with pytest.raises(InvalidRequestError):
        decode_rules(encode_rules(RuleSet(version=1, rules=(bad,))))


def test_a_change_has_the_next_version_and_none_changes_nothing() -> None:
    a, b = rule("allow", "a", "read", "x"), rule("deny", "b", "read", "x")
    one = changed_rules(RuleSet(), [b, a, a], [])
    assert one == RuleSet(version=1, rules=(a, b))
    assert changed_rules(one, [a], []) is one
    assert changed_rules(one, [], [rule("allow", "c", "read", "x")]) is one
    assert changed_rules(one, [], [a]) == RuleSet(version=2, rules=(b,))
    assert decode_rules(encode_rules(one)) == one


def test_rules_have_a_bound() -> None:
    with pytest.raises(TooLargeError, match="prefixes"):
        changed_rules(RuleSet(), [rule("allow", f"{number}" * 40, "read", "x") for number in range(5_000)], [])


@pytest.mark.parametrize("role", list(ROLES))
def test_each_role_gives_its_permissions_on_the_named_resources_alone(role: str) -> None:
    kinds = {kind for _, kind in ROLES[role]} - {ResourceKind.CLUSTER}
    rules = rules_of_role(role, "ann", {kind: ["team.*"] for kind in kinds})
    for kind in KINDS:
        for permission in Permission:
            resource = Resource(kind, "" if kind is ResourceKind.CLUSTER else "team.x")
            given = {each for each, of in ROLES[role] if of is kind}
            wanted = any(
                RuleIndex([rule("allow", "ann", each.value, "*")]).decide("ann", permission, CLICKS).allowed
                for each in given
            )
            assert RuleIndex(rules).decide("ann", permission, resource).allowed == wanted, (permission, resource)
            if kind is not ResourceKind.CLUSTER:
                assert not RuleIndex(rules).decide("ann", permission, Resource(kind, "other")).allowed
    assert not any(RuleIndex(rules).decide("ann", Permission.PEER, Resource(kind, "team.x")).allowed for kind in KINDS)


def test_a_role_refuses_names_that_it_does_not_use() -> None:
    for role, names in (
        ("nobody", {ResourceKind.TOPIC: ["a"]}),
        ("producer", {}),
        ("producer", {ResourceKind.TOPIC: ["a"], ResourceKind.GROUP: ["g"]}),
    ):
        with pytest.raises(InvalidRequestError):
            rules_of_role(role, "ann", names)
