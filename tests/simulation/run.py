"""The command: `python -m tests.simulation.run --seeds 100` runs many seeds, `--seed N --trace` shows one in words."""

from __future__ import annotations

import argparse
import logging
import sys

from memq.clock import SystemClock
from tests.simulation.faults import LEVELS
from tests.simulation.plan import ASPECTS, draw_plan
from tests.simulation.planted import BUGS, find
from tests.simulation.scenario import Report, run_plan
from tests.simulation.world import SimulationError


def main(arguments: list[str] | None = None) -> int:
    """Run the seeds and say what was found; 1 when something was."""
    options = parse(arguments)
    if options.trace:
        logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    logging.getLogger("memq").setLevel(logging.INFO if options.trace else logging.ERROR)
    logging.getLogger("memq").propagate = options.trace
    kinds = tuple(options.producers.split(","))
    if options.planted:
        return show_planted(options.start, options.seeds)
    seeds = [options.seed] if options.seed is not None else range(options.start, options.start + options.seeds)
    failed: list[int] = []
    clock = SystemClock()
    begin = clock.monotonic()
    for count, seed in enumerate(seeds, 1):
        level = options.level or list(LEVELS)[seed % len(LEVELS)]
        aspects = None if options.aspects is None else tuple(filter(None, options.aspects.split(",")))
        plan = draw_plan(seed, level, kinds, aspects)
        try:
            report = run_plan(plan, echo=print if options.trace else None)
        except SimulationError as error:
            failed.append(seed)
            print(f"\nFOUND with --level {level}: {error}", flush=True)
        else:
            show(report, level, count, len(seeds), clock.monotonic() - begin, quiet=options.quiet)
    print(f"\n{len(seeds)} seeds in {clock.monotonic() - begin:.1f} s, {len(failed)} failed: {failed[:20]}")
    return 1 if failed else 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.run", description=__doc__)
    parser.add_argument("--seeds", type=int, default=30, help="how many seeds")
    parser.add_argument("--start", type=int, default=1, help="the first seed")
    parser.add_argument("--seed", type=int, help="this one seed only")
    parser.add_argument("--level", choices=list(LEVELS), help="how sick the world is; else in turn")
    parser.add_argument("--producers", default="plain,product", help="kinds to draw from")
    parser.add_argument("--aspects", help=f"of {','.join(ASPECTS)}; else drawn from the seed")
    parser.add_argument("--trace", action="store_true", help="print every event")
    parser.add_argument("--planted", action="store_true", help="plant each known bug and look for it")
    parser.add_argument("--quiet", action="store_true", help="only what is found")
    return parser.parse_args(arguments)


def show_planted(start: int, seeds: int) -> int:
    """Plant each bug and say how many seeds it took to find it; 1 when one was not found."""
    missed = 0
    for bug in BUGS:
        count, found = find(bug, range(start, start + seeds))
        missed += not found
        print(f"{bug.name}: {f'seed {start + count - 1}: {found}' if found else 'NOT FOUND'}", flush=True)
    print(f"\n{len(BUGS)} bugs, {missed} not found within {seeds} seeds")
    return 1 if missed else 0


def show(report: Report, level: str, count: int, total: int, elapsed_s: float, *, quiet: bool) -> None:
    """Print one line per run."""
    if quiet:
        return
    counts = " ".join(f"{name} {value}" for name, value in report.counts.items())
    print(
        f"{count}/{total} seed {report.seed} {level}: {report.seconds:.0f} s virtual, {report.steps} steps, "
        f"{report.acked} acked, {report.given_up} given up, {report.pointers} pointers, {counts}, "
        f"{report.trace_hash[:12]}, {elapsed_s:.1f} s",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
