"""The rules of ownership keep the promises in every schedule; with one rule left out some schedule breaks one."""

from __future__ import annotations

import pytest

from tests.model.directed import DIRECTED, follow
from tests.model.ownership import BrokenPromiseError, Model
from tests.model.parts import Rules
from tests.model.schedules import ALL_RULES, FOUND_BY, VARIANTS, find, run
from tests.soak import repetitions, report

SEARCH_MAX = 200_000


@pytest.mark.soak
def test_all_rules_keep_the_promises() -> None:
    schedules = repetitions(3_000, 1_000_000)
    _, found = find(ALL_RULES, range(schedules))
    assert not found


def test_the_schedules_reach_what_matters() -> None:
    """A model in which nothing happens would break no promise."""
    kinds = {action[0] for seed in range(60) for action in run(ALL_RULES, seed)}
    assert kinds == set(Model(ALL_RULES).kinds)
    logs = [model_after(ALL_RULES, seed) for seed in range(60)]
    assert sum(any(entry.blocks for entry in model.log) for model in logs) > 10
    assert sum(any(block.state == "acked" for block in model.blocks) for model in logs) > 3


def model_after(rules: Rules, seed: int) -> Model:
    """Return the model behind one schedule."""
    model = Model(rules)
    for action in run(rules, seed):
        model.step(action)
    return model


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_each_rule_is_needed(variant: str) -> None:
    with pytest.raises(BrokenPromiseError):
        run(VARIANTS[variant], FOUND_BY[variant])
    run(ALL_RULES, FOUND_BY[variant])


@pytest.mark.parametrize("variant", list(DIRECTED))
def test_a_directed_schedule_needs_its_rule(variant: str) -> None:
    directed = DIRECTED[variant]
    with pytest.raises(BrokenPromiseError):
        follow(directed.without, directed.steps)
    follow(directed.rules, directed.steps)


@pytest.mark.soak
@pytest.mark.thorough
def test_each_rule_is_needed_from_other_seeds() -> None:
    for variant in list(VARIANTS)[: repetitions(2, len(VARIANTS))]:
        count, found = find(VARIANTS[variant], range(1_000_000, 1_000_000 + SEARCH_MAX))
        report(f"{variant}: {count} schedules: {found[:100]}")
        assert found, variant


def test_same_seed_same_schedule() -> None:
    assert run(ALL_RULES, 7) == run(ALL_RULES, 7)
