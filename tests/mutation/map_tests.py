"""Makes the map of the tests: every test file in a fork of its own, under a trace."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest

from memq.runtime.clock import SystemClock
from tests.mutation.fork_pool import Ended, Send, Task, run_tasks
from tests.mutation.nearest import TestMap, TracedTest, hash_of, store_map, traced
from tests.mutation.trial import SIMULATION_CPU_S, process_cpu_s, run_seed, run_test, seeds_of

LIMIT_S = 300.0
SLOWER = 4  # with a trace


def complete_map(found: TestMap, items: list[pytest.Item], jobs: int) -> None:
    """Trace the test files that are new or have changed since they were, and the simulation once."""
    by_file = {
        file: list(group) for file, group in itertools.groupby(items, key=lambda item: item.nodeid.partition("::")[0])
    }
    stale = [file for file in by_file if found.files.get(file) != hash_of(file)]
    tasks = [_task_of(file, by_file[file]) for file in stale]
    if not found.simulation:
        tasks.append(Task("simulation", _trace_simulation))
    for count, ended in enumerate(run_tasks(tasks, jobs), 1):
        _take(found, ended)
        print(f"map {count}/{len(tasks)} {ended.task.name} {ended.cpu_s:.1f} CPU-s", flush=True)
        if count % 20 == 0 or count == len(tasks):
            store_map(found)


def _task_of(file: str, tests: list[pytest.Item]) -> Task:
    return Task(file, lambda send: _trace_tests(tests, send))


def _trace_tests(tests: Iterable[pytest.Item], send: Send) -> None:
    clock = SystemClock()
    with traced() as names:
        for item in tests:
            send({"at": item.nodeid, "limit_s": LIMIT_S})
            begin_s = clock.monotonic()
            failed = run_test(item, None)
            send({"test": item.nodeid, "wall_s": clock.monotonic() - begin_s, "failed": failed, "functions": names()})


def _trace_simulation(send: Send) -> None:
    begin_s = process_cpu_s()
    with traced() as names:
        for seed in seeds_of(None):
            send({"at": f"seed {seed}", "limit_s": LIMIT_S})
            run_seed(seed)
            if process_cpu_s() - begin_s > SLOWER * SIMULATION_CPU_S:
                break
        send({"simulation": names()})


def _take(found: TestMap, ended: Ended) -> None:
    file = ended.task.name
    for node_id in [node_id for node_id in found.tests if node_id.startswith(f"{file}::")]:
        del found.tests[node_id]
    for message in ended.messages:
        if "test" in message:
            numbers = [found.number(name) for name in message["functions"]]
            found.tests[message["test"]] = TracedTest(numbers, round(message["wall_s"], 3), not message["failed"])
            if message["failed"]:
                print(f"map: {message['test']} fails without a mutant: {message['failed']}", flush=True)
        elif "simulation" in message:
            found.simulation = [found.number(name) for name in message["simulation"]]
    if ended.killed or ended.find("error"):
        print(f"map: {file} did not end: {ended.last} {ended.find('error') or ''}", flush=True)
    elif file != "simulation":
        found.files[file] = hash_of(file)
