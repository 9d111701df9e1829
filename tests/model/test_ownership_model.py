"""The rules of ownership keep the promises in every schedule; with one rule left out some schedule breaks one."""

from __future__ import annotations

import random

import pytest

from tests.model.directed_schedules import DIRECTED, follow
from tests.model.ownership import Model
from tests.model.parts import Block, Forwarder, Rules
from tests.model.promises import BrokenPromiseError
from tests.model.schedules import ACKED_WITH_1, ALL_RULES, FOUND_BY, NAMED, VARIANTS, find, run, start
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
    assert kinds == set(Model(ALL_RULES, ()).kinds)
    models = [model_after(ALL_RULES, seed) for seed in range(120)]
    assert sum(any(entry.blocks for entry in model.log) for model in models) > 20
    blocks = [{block for block in model.blocks() if block.state == "acked"} for model in models]
    assert sum(any(not block.instance and not block.acked_by for block in acked) for acked in blocks) > 1
    assert sum(any(block.acked_by for block in acked) for acked in blocks) > 20
    assert sum(any(block.instance for block in acked) for acked in blocks) > 1


def test_instances_of_a_name_follow_on_each_other() -> None:
    models = [model_after(NAMED, seed) for seed in range(200)]
    assert sum(all(producer.blocks for producer in model.producers) for model in models) > 3
    assert sum(any(producer.fenced for producer in model.producers) for model in models) > 1
    acked = [block for model in models for block in model.blocks() if block.state == "acked"]
    assert {block.instance for block in acked if block.sequence} == {1, 2}


def test_brokers_forward_to_each_other() -> None:
    """A block that the queue did not hold when a broker read it comes to it by way of another broker."""
    landed = 0
    for seed in range(200):
        model, brought = start(ACKED_WITH_1, random.Random(seed)), set[Block]()
        for action in run(ACKED_WITH_1, seed):
            client = model.clients[action[1]] if action[0] == "send" else None
            if isinstance(client, Forwarder):
                brought.update(block for block in client.held if not _in_queue(model, block))
            model.step(action)
        landed += any(_in_queue(model, block) for block in brought)
    assert landed > 3


def _in_queue(model: Model, block: Block) -> bool:
    return any(block in entry.blocks for entry in model.log)


def model_after(rules: Rules, seed: int) -> Model:
    """Return the model behind one schedule."""
    model = start(rules, random.Random(seed))
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
