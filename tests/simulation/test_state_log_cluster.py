"""State logs of real brokers on virtual time keep their promises, whatever queue and store answer."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.model.state_log_bugs import SHELL_BUGS, first_found, planted
from tests.simulation.state_log_cluster import run
from tests.soak import repetitions, report

FOUND_BY = {  # a seed that fails
    "S2: the log is read before `opened` is published": 1,
    "S5: a log that is closed says that nothing was done": 2,
    "S6: a read of the queue is a proof": 18,
    "S7: a snapshot is named that is not stored": 5,
}


@pytest.mark.soak
def test_brokers_keep_all_promises_of_a_state_log() -> None:
    seeds = repetitions(10, 3_000)
    assert first_found(range(seeds), run) is None
    report(f"{seeds} seeds of state logs on virtual time without a finding")


def test_the_runs_reach_what_matters() -> None:
    met: Counter[str] = Counter()
    for seed in range(100, 106):
        met.update(run(seed))
    assert met["told counts"] > 40
    assert met["reads"] > 80
    assert met["trimmed"] > 3
    assert min(met["told void"], met["told unknown"], met["lost: EpochFencedError"], met["lost: LogLostError"]) > 0


@pytest.mark.parametrize("name", list(SHELL_BUGS))
def test_the_shell_of_a_state_log_needs_each_rule(name: str) -> None:
    seeds = range(FOUND_BY[name], FOUND_BY[name] + 1)
    with planted(name):
        assert first_found(seeds, run), "no promise is broken"
    assert first_found(seeds, run) is None


def test_a_run_of_state_logs_repeats() -> None:
    assert run(3) == run(3)
