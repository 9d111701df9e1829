"""The command: `python -m tests.simulation.run --seeds 100` runs many seeds, `--seed N --trace` shows one in words."""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from memq.runtime.clock import SystemClock
from memq.simulation.ports.faults import LEVELS
from memq.simulation.world.world import SimulationError
from tests.simulation.aspects import ASPECTS
from tests.simulation.coverage import Summary
from tests.simulation.fresh_seeds import fresh_start
from tests.simulation.plan import draw_plan
from tests.simulation.planted_bugs import BUGS, find
from tests.simulation.run_report import Report
from tests.simulation.scenario import run_plan

FAILED_SHOWN_MAX = 20


@dataclass(frozen=True, slots=True)
class Choices:
    """The options of all seeds of one call."""

    level: str | None
    producers: tuple[str, ...]
    aspects: tuple[str, ...] | None
    trace: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one seed: a report, or a finding."""

    seed: int
    level: str
    report: Report | None = None
    finding: str = ""


def main(arguments: list[str] | None = None) -> int:
    """Run the seeds and print what was found; 1 when something was."""
    options = parse(arguments)
    starts = [fresh_start() if start == "fresh" else int(start) for start in options.start.split(",")]
    first = starts[0]
    if options.planted:
        quiet_logs(Choices(None, (), None, trace=False))
        return show_planted(starts, options.seeds)
    seeds = [options.seed] if options.seed is not None else range(first, first + options.seeds)
    aspects = None if options.aspects is None else tuple(filter(None, options.aspects.split(",")))
    choices = Choices(options.level, tuple(options.producers.split(",")), aspects, options.trace)
    failed, summary = list[int](), Summary()
    clock = SystemClock()
    begin = clock.monotonic()
    with running(choices, seeds, min(options.jobs, len(seeds))) as outcomes:
        for count, outcome in enumerate(outcomes, 1):
            if outcome.report is None:
                failed.append(outcome.seed)
                print(f"\nFOUND at level {outcome.level}: {outcome.finding}", flush=True)
                print(f"again: {repeat_command(outcome.seed, outcome.level)}", flush=True)
                continue
            report = outcome.report
            summary.add(report.seconds, report.acked, report.met)
            if not options.quiet:
                show(outcome, f"{count}/{len(seeds)}", clock.monotonic() - begin)
    print("", *summary.lines(), sep="\n")
    shown = sorted(failed)[:FAILED_SHOWN_MAX]
    print(
        f"\n{len(seeds)} seeds from {seeds[0]} on in {clock.monotonic() - begin:.1f} s, {len(failed)} failed: {shown}"
    )
    return 1 if failed else 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.run", description=__doc__)
    parser.add_argument("--seeds", type=int, default=30, help="how many seeds")
    parser.add_argument("--start", default="1", help="the first seed, several for --planted; 'fresh': of the commit")
    parser.add_argument("--seed", type=int, help="this one seed only")
    parser.add_argument("--level", choices=list(LEVELS), help="how sick the world is; else in turn")
    parser.add_argument("--producers", default="plain,product", help="kinds to draw from")
    parser.add_argument("--aspects", help=f"of {','.join(ASPECTS)}; else drawn from the seed")
    parser.add_argument("--jobs", type=int, default=1, help="how many processes run seeds")
    parser.add_argument("--trace", action="store_true", help="print every event")
    parser.add_argument("--planted", action="store_true", help="plant each known bug and look for it")
    parser.add_argument("--quiet", action="store_true", help="only what is found")
    options = parser.parse_args(arguments)
    names = [] if options.aspects is None else options.aspects.split(",")
    unknown = [name for name in names if name not in ("", *ASPECTS)]
    if unknown:
        parser.error(f"no such aspects: {', '.join(unknown)}")
    return options


@contextmanager
def running(choices: Choices, seeds: Iterable[int], jobs: int) -> Iterator[Iterator[Outcome]]:
    """Run the seeds in `jobs` processes; outcomes come as they end."""
    work = partial(run_seed, choices)
    if jobs <= 1:
        quiet_logs(choices)
        yield map(work, seeds)
        return
    # Spawned, not forked: a process of its own repeats a seed exactly, whatever this one has imported or counted.
    with multiprocessing.get_context("spawn").Pool(jobs, quiet_logs, (choices,)) as pool:
        yield pool.imap_unordered(work, seeds)


def quiet_logs(choices: Choices) -> None:
    """Print the product's log with a trace, and not without."""
    if choices.trace:
        logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    logging.getLogger("memq").setLevel(logging.INFO if choices.trace else logging.ERROR)
    logging.getLogger("memq").propagate = choices.trace


def run_seed(choices: Choices, seed: int) -> Outcome:
    """Run one seed."""
    level = choices.level or level_of(seed)
    plan = draw_plan(seed, level, choices.producers, choices.aspects)
    try:
        return Outcome(seed, level, run_plan(plan, echo=print if choices.trace else None))
    except SimulationError as error:
        return Outcome(seed, level, finding=str(error))
    except Exception as error:  # a list of seeds shows no other name of this one
        raise RuntimeError(f"seed {seed} {level}") from error


def level_of(seed: int) -> str:
    """Return the level that a seed has when none is given: they take turns."""
    return list(LEVELS)[seed % len(LEVELS)]


def repeat_command(seed: int, level: str) -> str:
    """Return the command that runs one seed again."""
    return f"make simulate SEED={seed} LEVEL={level}  # TRACE=1 prints every event"


def show_planted(starts: Sequence[int], seeds: int) -> int:
    """Plant each bug and print how many seeds it took to find it from each start; 1 when one was not found."""
    missed = 0
    for bug in BUGS:
        counts = list[int]()
        for start in starts:
            count, found = find(bug, range(start, start + seeds))
            missed += not found
            counts.append(count if found else seeds + 1)
            print(f"{bug.name}: {f'seed {start + count - 1}: {found}' if found else 'NOT FOUND'}", flush=True)
        print(f"| {bug.name} | median {statistics.median(counts):g} | worst {max(counts)} |", flush=True)
    print(f"\n{len(BUGS)} bugs from {len(starts)} starts, {missed} not found within {seeds} seeds")
    return 1 if missed else 0


def show(outcome: Outcome, progress: str, elapsed_s: float) -> None:
    """Print one line per run."""
    report = outcome.report
    assert report is not None
    counts = " ".join(f"{name} {value}" for name, value in report.counts.items())
    print(
        f"{progress} seed {report.seed} {outcome.level}: {report.seconds:.0f} s virtual, {report.steps} steps, "
        f"{report.acked} acked, {report.given_up} given up, {report.pointers} pointers, {counts}, "
        f"{report.trace_hash[:12]}, {elapsed_s:.1f} s",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
