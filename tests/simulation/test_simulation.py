"""The whole cluster under seeded chaos: short here, `make simulate` for longer."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from itertools import product

import pytest

from memq.simulation.world.world import SimulationError
from tests.simulation.aspects import ASPECTS
from tests.simulation.fresh_seeds import fresh_start, some_of
from tests.simulation.plan import draw_plan
from tests.simulation.run import level_of, repeat_command
from tests.simulation.scenario import run_plan
from tests.soak import repetitions


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("level", ["calm", "breezy", "stormy", "sleepy"])
def test_a_cluster_keeps_its_promises(level: str, seed: int) -> None:
    reports = (run_plan(draw_plan(each, level)) for each in range(seed, 10, 2))
    report = next(report for report in reports if report.acked)  # a storm may be too much for anything to land
    assert report.pointers > 0


def traces() -> list[str]:
    """Return the traces of a run with nearly all aspects, and of one with compacted parts, which take long."""
    others = tuple(aspect for aspect in ASPECTS if aspect != "cold")
    # More blocks take many times as long, twice over; a longer storm lands no more of them.
    stormy = replace(draw_plan(3, "stormy", aspects=others), blocks=8, active_s=75.0)
    plans = (stormy, draw_plan(3, "calm", aspects=("cold",)))
    return [run_plan(plan).trace_hash for plan in plans]


@pytest.mark.thorough
def test_a_cluster_has_the_same_trace_in_every_process() -> None:
    other = "1" if os.environ.get("PYTHONHASHSEED") == "0" else "0"
    command = [sys.executable, "-c", f"from {__name__} import traces; print(*traces())"]
    environment = {**os.environ, "PYTHONHASHSEED": other}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as ran:
        here = traces()
        assert ran.communicate()[0].split() == here
    assert ran.returncode == 0


@pytest.mark.thorough
@pytest.mark.parametrize(("aspect", "level"), some_of(product(ASPECTS, ["calm", "stormy"]), part=3))
def test_a_cluster_keeps_its_promises_in_every_aspect(aspect: str, level: str) -> None:
    aspects = {
        "retired": ("house", "cold", "waiting", "operator"),
        "cold": ("cold",),
        "reports": ("reports", "auditor"),
    }
    wanted = [count for count, having in aspects.items() if aspect in having]
    reports = (run_plan(draw_plan(seed, level, aspects=(aspect,))) for seed in range(3, 11))
    # A storm may be too much for anything to land, or to be compacted.
    report = next(each for each in reports if each.acked and all(each.counts[count] for count in wanted))
    assert [count for count in aspects if report.counts[count]] == wanted


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(repetitions(1, 200)))
def test_the_live_audit_names_what_was_done_and_nothing_else(seed: int) -> None:
    report = run_plan(draw_plan(seed, ("calm", "stormy")[seed % 2], aspects=("reports",)))
    assert len(report.live_faults) > 3  # where little landed few faults have a place


@pytest.mark.thorough
@pytest.mark.thorough
def test_a_broker_whose_session_ends_right_after_it_came_is_entered_again() -> None:
    aspects = ("jumps", "wander", "named", "lies", "thin", "part")
    run_plan(draw_plan(903311200, "calm", aspects=aspects))


@pytest.mark.thorough
@pytest.mark.parametrize(("seed", "level"), [(4, "calm"), (5, "breezy"), (102, "stormy"), (7, "sleepy")])
def test_the_auditor_says_what_landed_and_names_what_is_done_to_it(seed: int, level: str) -> None:
    report = run_plan(draw_plan(seed, level, aspects=("auditor",)))
    assert sum(name.startswith("auditor") for name in report.live_faults) == 3


@pytest.mark.thorough
def test_the_auditor_names_the_batch_of_a_damage_whose_index_does_not_answer() -> None:
    """The store lied for as long as the auditor asked for the index: no finding can name the records."""
    run_plan(draw_plan(881400, "calm", aspects=("wander", "shared", "cold", "lies", "part", "churn", "auditor")))


@pytest.mark.thorough
def test_the_auditor_need_not_count_what_retention_took_before_it_was_read() -> None:
    aspects = ("house", "levels", "jumps", "shared", "seize", "staged", "disk", "reports", "cold", "thin", "auditor")
    run_plan(draw_plan(725230131, "sleepy", aspects=aspects))


@pytest.mark.thorough
def test_the_live_audit_names_a_whole_batch_though_a_block_of_it_was_damaged_before() -> None:
    run_plan(draw_plan(881400, "breezy", aspects=("wander", "shared", "cold", "lies", "part", "churn", "auditor")))


@pytest.mark.parametrize("seed", [7, 27])
def test_lag_is_exact_where_a_repetition_adopts_what_its_first_try_had_not_met(seed: int) -> None:
    run_plan(draw_plan(seed, "sleepy", aspects=()))


FRESH = range(fresh_start(), fresh_start() + repetitions(40, 400))


@pytest.mark.thorough
@pytest.mark.parametrize("seed", FRESH, ids=lambda seed: f"{seed}-{level_of(seed)}")
def test_a_seed_that_no_run_had_before(seed: int) -> None:
    level = level_of(seed)
    try:
        run_plan(draw_plan(seed, level))
    except SimulationError as error:
        pytest.fail(f"level {level}: {error}\nagain: {repeat_command(seed, level)}", pytrace=False)
