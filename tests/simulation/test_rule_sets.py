"""The history of rules, and decisions that share no code of memq."""

from __future__ import annotations

from itertools import product

from msgspec.structs import replace

from memq.permissions import Permission, Resource, ResourceKind, RuleIndex, RuleSet
from tests.simulation.rule_sets import ALLOWED, PROBES, WITHDRAWN, RuleHistory


def test_decisions_are_those_of_memq() -> None:
    """One of them alone may be wrong: the runs compare both."""
    for wish, rule in product(PROBES, WITHDRAWN):
        rules = replace(ALLOWED, rules=(*ALLOWED.rules, rule))
        resource = Resource(ResourceKind(wish.kind), wish.name)
        found = RuleIndex(rules.rules).decide(wish.principal, Permission(wish.permission), resource)
        assert found.allowed is not wish.is_denied(rules), (wish, rule)
        assert not wish.is_denied(ALLOWED)


def test_each_permission_that_is_withdrawn_is_probed_or_one_of_a_pop_group() -> None:
    probed = {rule for wish, rule in product(PROBES, WITHDRAWN) if wish.is_denied(RuleSet(version=2, rules=(rule,)))}
    assert {rule.principal for rule in set(WITHDRAWN) - probed} == {"popper-*"}


def test_the_history_has_all_rules_of_a_time() -> None:
    history, (first, second, third) = RuleHistory(), [RuleSet(version=number) for number in (1, 2, 3)]
    for now_s, rules in ((1.0, first), (2.0, first), (3.0, second), (5.0, third)):
        history.note(now_s, rules)
    assert history.between(0.0, 9.0) == [first, second, third]
    assert history.between(3.5, 9.0) == [second, third]
    assert history.between(5.0, 9.0) == [second, third]
    assert history.between(6.0, 9.0) == [third]
