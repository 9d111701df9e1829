"""The command: `python -m tests.mutation.run --module memq/broker/partition/ring.py --sample 50` tries mutants."""

from __future__ import annotations

import argparse
import importlib
import os
import random
import sys
from collections.abc import Iterable

import pytest

from memq.runtime.clock import SystemClock
from tests.mutation.equivalents import load_equivalents, reason_of
from tests.mutation.fork_pool import Ended, Task, run_tasks
from tests.mutation.hand_made import hand_made
from tests.mutation.live_code import LiveCode
from tests.mutation.map_tests import complete_map
from tests.mutation.mutant import BY_HAND, ROOT, Mutant
from tests.mutation.nearest import FOLDER, Near, load_map, load_near, near_of, store_near
from tests.mutation.operators import mutants_of
from tests.mutation.report import FLOOR, Verdict, clearly_below, load, score, store, table
from tests.mutation.scope import fast_files, files_of
from tests.mutation.trial import SIMULATION_CPU_S, Course, try_mutant

# The tests of the S3 store run on a server of their own loop: they start no process.
MODELS = tuple(f"tests/model/test_{name}_model.py" for name in ("holds", "pop", "state_log", "transaction"))
TESTS = ("tests/unit", "tests/component", "tests/contract", "tests/integration/test_s3_faults.py", *MODELS)
GATE_CPU_S = 12.0  # for a mutant: twice what a survivor usually takes
GATE_LIMIT_S = 8.0  # for a test: none of those that the gate runs takes a second
RESULTS = FOLDER / "results.json"
KEPT_EVERY = 20


class Session:
    """A pytest plugin: instead of running the tests that were collected it tries mutants on them."""

    def __init__(self, options: argparse.Namespace, mutants: list[Mutant], near: Near | None = None) -> None:
        self._status = 1
        self._options = options
        self._mutants = mutants
        self._near = near
        self._clock = SystemClock()

    def run(self, tests: Iterable[str]) -> int:
        """Collect tests and try the mutants on them; 1 when the tests are not good enough."""
        quiet = ["-qq", "-s", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not thorough"]
        code = pytest.main([*quiet, *tests], plugins=[self])
        return self._status or int(code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Try the mutants that were asked for."""
        assert not session.testsfailed, "the tests were not collected"
        self._items = session.items
        self._node_ids = [item.nodeid for item in session.items]
        self._map = load_map()
        if not self._near:
            complete_map(self._map, session.items, self._options.jobs)
        if self._options.keep_near:
            store_near(near_of(self._map, fast_files()))
        files = {node_id.partition("::")[0] for node_id in self._node_ids}
        self._texts = {file: (ROOT / file).read_text(encoding="utf-8") for file in files}
        for module in sorted({mutant.module for mutant in self._mutants}):
            importlib.import_module(module)  # some are imported only where they are used
        self._live = LiveCode()
        self._status = self._try_all(self._mutants)
        return True

    def _try_all(self, mutants: list[Mutant]) -> int:
        known = load_equivalents()
        verdicts = [verdict_of_equivalent(mutant, why) for mutant in mutants if (why := reason_of(mutant, known))]
        left = [mutant for mutant in mutants if not reason_of(mutant, known)]
        by_key = {mutant.key: mutant for mutant in left}
        begin_s = self._clock.monotonic()
        tasks = map(self._task, left)
        for count, ended in enumerate(run_tasks(tasks, self._options.jobs, self._options.seconds), 1):
            verdict = judge(by_key[ended.task.name], ended)
            verdicts.append(verdict)
            print(f"{count}/{len(left)} {verdict.text()}", flush=True)
            if count % KEPT_EVERY == 0 and not self._near:
                keep(verdicts)
        if not self._near:  # what survives a part of the tests says little
            keep(verdicts)
        print(f"\n{table(verdicts)}\n{self._clock.monotonic() - begin_s:.0f} s")
        judged = {verdict.key for verdict in verdicts if verdict.outcome != "unjudged"}
        left_out = sum(mutant.key not in judged for mutant in mutants)
        if left_out:
            print(f"not judged, for lack of time: {left_out} of {len(mutants)} mutants")
        return self._judge_all(verdicts)

    def _task(self, mutant: Mutant) -> Task:
        if self._near:
            near = self._near.order(mutant, self._node_ids)
            course = Course(near, [], 0.0, lambda node_id: GATE_LIMIT_S, GATE_CPU_S)
            return Task(mutant.key, lambda send: try_mutant(mutant, course, self._items, self._live, send))
        nearest, fast = self._map.order(mutant, self._node_ids, self._texts)
        reached = not self._map.numbers_of(mutant).isdisjoint(self._map.simulation)
        cpu_s = self._options.simulation if reached else 0.0
        course = Course(nearest, fast, cpu_s, self._map.limit_s)
        return Task(mutant.key, lambda send: try_mutant(mutant, course, self._items, self._live, send))

    def _judge_all(self, verdicts: list[Verdict]) -> int:
        """Return 1 when the score is clearly below the target, or a mutant made by hand survived all tests."""
        found, count = score(verdicts)
        by_hand = [verdict for verdict in verdicts if verdict.operator == BY_HAND and verdict.outcome == "survived"]
        if clearly_below(found, count):
            print(
                f"{found} of {count} found: clearly below {FLOOR:.0%}, which earlier samples reached;"
                " see docs/test-results.md"
            )
        for verdict in by_hand:
            print(f"the tests let this rule be broken: {verdict.reason} [{verdict.key}]")
        if by_hand and self._near:
            print("tests of other files may hold it: then name such a file in tests/mutation/near.toml")
        return int(bool(by_hand) or clearly_below(found, count))


def judge(mutant: Mutant, ended: Ended) -> Verdict:
    """Return what became of a mutant."""
    outcome, stage, by, why = "unknown", ended.find("stage") or "", "", ended.find("error") or "its process died"
    if ended.find("unfit"):
        outcome, why = "unfit", ended.find("unfit")
    elif ended.find("unjudged"):
        outcome, why = "unjudged", ended.find("unjudged")
    elif ended.killed:
        outcome, stage, by, why = "timeout", ended.last.get("stage_now", ""), ended.last.get("at", ""), "a limit"
    elif stage:
        outcome, by, why = "killed", ended.find("by"), ended.find("why")
    elif ended.find("stage") == "":
        outcome, why = "survived", ""
    elif ended.last:  # it ended the interpreter
        outcome, stage, by = "killed", ended.last["stage_now"], ended.last["at"]
    tests = sum("at" in message and not message["at"].startswith("seed ") for message in ended.messages)
    seeds = sum("at" in message and message["at"].startswith("seed ") for message in ended.messages)
    return Verdict(
        mutant.key,
        mutant.path,
        mutant.line,
        mutant.function,
        mutant.operator,
        outcome,
        stage,
        by,
        why,
        mutant.diff(),
        f"{tests} tests, {seeds} seeds",
        round(ended.cpu_s, 1),
        round(ended.wall_s, 1),
        mutant.reason,
    )


def verdict_of_equivalent(mutant: Mutant, why: str) -> Verdict:
    """Return the verdict on a mutant that is known to make no difference."""
    place = (mutant.key, mutant.path, mutant.line, mutant.function, mutant.operator)
    return Verdict(*place, "equivalent", why=why, diff=mutant.diff(), reason=mutant.reason)


def keep(verdicts: list[Verdict]) -> None:
    """Put verdicts into the results of all runs, in place of earlier ones."""
    new = {verdict.key for verdict in verdicts}
    store([*(each for each in load(RESULTS) if each.key not in new), *verdicts], RESULTS)


def choose(options: argparse.Namespace) -> list[Mutant]:
    """Return the mutants to try: those of the files that were asked for, or a sample of them."""
    files = fast_files(options.module) if options.gate else files_of(options.module)
    by_hand = [mutant for mutant in hand_made() if mutant.path in files]
    made = [] if options.by_hand else [mutant for path in files for mutant in mutants_of(path)]
    if options.only:
        return [mutant for mutant in (*by_hand, *made) if mutant.key in options.only.split(",")]
    rng = random.Random(options.seed)
    if options.sample and not options.by_hand:
        made = rng.sample(made, min(options.sample, len(made)))
    if options.sample:
        by_hand = rng.sample(by_hand, min(options.hand_sample or options.sample, len(by_hand)))
    chosen = [*by_hand, *made]
    rng.shuffle(chosen)  # what time does not suffice for is drawn by lot
    return chosen


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation.run", description=__doc__)
    parser.add_argument("--module", default="memq/", help="a part (broker, client, …), a folder or a file; else all")
    parser.add_argument("--sample", type=int, default=0, help="so many mutants, drawn by --seed; 0: all")
    parser.add_argument("--hand-sample", type=int, default=0, help="so many made by hand among them")
    parser.add_argument("--seed", default="0", help="draws the sample: a number, or the hash of a commit")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--seconds", type=float, default=1e9, help="what is not done by then is left out")
    parser.add_argument("--simulation", type=float, default=SIMULATION_CPU_S, help="CPU seconds of it for each mutant")
    parser.add_argument(
        "--gate", action="store_true", help="only the tests of near.toml; leave out what only real servers show"
    )
    parser.add_argument("--keep-near", action="store_true", help="write near.toml from the map of the tests")
    parser.add_argument("--by-hand", action="store_true", help="those made by hand alone")
    parser.add_argument("--only", default="", help="mutants by key, with commas")
    parser.add_argument("--list", action="store_true", help="print the mutants, try none")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Try mutants; 1 when the tests are not good enough."""
    options = parse(arguments)
    mutants = choose(options)
    if options.list:
        for mutant in mutants:
            print(f"{mutant}\n{mutant.diff()}")
        return 0
    os.environ["HYPOTHESIS_PROFILE"] = "quick"
    if not options.gate:
        return Session(options, mutants).run(TESTS)
    near = load_near()
    tests = {test for mutant in mutants for test in near.files_of(mutant)}
    return Session(options, mutants, near).run(sorted(tests) or TESTS)


if __name__ == "__main__":
    sys.exit(main())
