"""One mutant in a fork: the nearest tests, all other fast tests that can meet it, then the simulation."""

from __future__ import annotations

import gc
import math
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pytest

from memq.runtime.clock import SystemClock
from memq.simulation.ports.faults import LEVELS
from tests.mutation.fork_pool import Send
from tests.mutation.live_code import LiveCode, UnreachableError
from tests.mutation.mutant import Mutant
from tests.simulation.plan import draw_plan
from tests.simulation.scenario import run_plan

SIMULATION_CPU_S = 20.0
SEED_LIMIT_S = 300.0
SEEDS = 1_000_000  # the mutant's own are drawn below this


@dataclass(frozen=True, slots=True)
class Course:
    """What one mutant has to pass: tests by their places in the session, and CPU seconds of simulation.

    Behind `cpu_s_max` the trial ends without a verdict.
    """

    nearest: list[int]
    fast: list[int]
    simulation_cpu_s: float
    limit_s: Callable[[str], float]
    cpu_s_max: float = math.inf


class OutOfTimeError(Exception):
    """A mutant has passed all tests that its course had time for."""


class Failures:
    """A pytest plugin that keeps the last failure."""

    def __init__(self) -> None:
        self.last = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note how a test failed."""
        if report.failed:
            lines = str(report.longrepr).strip().splitlines()
            marked = [line for line in lines if line.startswith("E ")]
            self.last = (marked or lines or ["failed"])[0][:300]


def run_test(item: pytest.Item, following: pytest.Item | None) -> str:
    """Run one test; return how it failed, "" when it passed or was skipped."""
    failures = Failures()
    plugins = item.config.pluginmanager
    plugins.register(failures)
    try:
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
    finally:
        plugins.unregister(failures)
    return failures.last


def free_leftovers() -> None:
    """Free what a failed test holds, and ignore the warnings about unclosed clients, which would fail its next run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("last_type", "last_value", "last_traceback", "last_exc"):  # pytest keeps the failure in these
            vars(sys).pop(name, None)
        gc.collect()


def run_seed(seed: int) -> str:
    """Run one simulation; return what it finds, "" for nothing."""
    try:
        run_plan(draw_plan(seed, list(LEVELS)[seed % len(LEVELS)]))
    except Exception as error:  # noqa: BLE001 - a run that dies of anything is a finding
        return repr(error)[:300]
    return ""


def seeds_of(mutant: Mutant | None) -> Iterable[int]:
    """Yield seeds without end, other ones for each mutant."""
    rng = random.Random(mutant.key if mutant else "none")
    while True:
        yield rng.randrange(SEEDS)


def try_mutant(mutant: Mutant, course: Course, items: list[pytest.Item], live: LiveCode, send: Send) -> None:
    """Say which stage kills the mutant, by what; a stage that finds nothing leads to the next."""
    try:
        live.plant(mutant)
    except (SyntaxError, UnreachableError) as error:
        send({"unfit": str(error)})
        return
    for stage, numbers in (("nearest", course.nearest), ("fast", course.fast)):
        try:
            by = _by_tests(mutant, [items[number] for number in numbers], course, live, send, stage)
        except OutOfTimeError:
            send({"unjudged": f"passed what it was given {course.cpu_s_max:.0f} CPU s for"})
            return
        if by:
            send({"stage": stage, "by": by[0], "why": by[1]})
            return
    if by := _by_simulation(mutant, course.simulation_cpu_s, live, send):
        send({"stage": "simulation", "by": by[0], "why": by[1]})
        return
    send({"stage": ""})


def _by_tests(
    mutant: Mutant, tests: list[pytest.Item], course: Course, live: LiveCode, send: Send, stage: str
) -> tuple[str, str] | None:
    for item in tests:
        if process_cpu_s() > course.cpu_s_max:  # of this fork
            raise OutOfTimeError
        limit_s = course.limit_s(item.nodeid)
        send({"at": item.nodeid, "stage_now": stage, "limit_s": limit_s})
        if why := run_test(item, None):
            live.restore()
            free_leftovers()
            send({"at": f"{item.nodeid}, without the mutant", "stage_now": stage, "limit_s": limit_s})
            if not run_test(item, None):  # else it says nothing about the mutant
                return item.nodeid, why
            live.plant(mutant)
    return None


def _by_simulation(mutant: Mutant, cpu_s_max: float, live: LiveCode, send: Send) -> tuple[str, str] | None:
    clock = SystemClock()
    spent = process_cpu_s()
    since_s = clock.monotonic()
    for seed in seeds_of(mutant):
        if process_cpu_s() - spent >= cpu_s_max or clock.monotonic() - since_s > 10 * cpu_s_max:
            return None
        send({"at": f"seed {seed}", "stage_now": "simulation", "limit_s": SEED_LIMIT_S})
        if why := run_seed(seed):
            live.restore()
            if not run_seed(seed):
                return f"seed {seed}", why
            live.plant(mutant)
    return None


def process_cpu_s() -> float:
    """Return the CPU time of this process."""
    times = os.times()
    return times.user + times.system
