"""Measures variants in turns: wall time, and CPU seconds of the JVM and of its Python processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.results import Figure, median

NAME = "spark"


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of one pass, and CPU seconds of the JVM and of its Python processes."""

    wall_s: float
    jvm_s: float
    python_s: float

    @property
    def cpu_s(self) -> float:
        """CPU seconds of all processes."""
        return self.jvm_s + self.python_s


@dataclass(frozen=True, slots=True)
class Meter:
    """Takes what work costs; `jvm` is the id of Spark's process."""

    jvm: int

    def take_turns(
        self, ways: Mapping[str, Callable[[], object]], *, rounds: int, warm_ups: int
    ) -> dict[str, list[Cost]]:
        """Do all the ways one after another, again and again; what the first rounds cost is not counted.

        The JVM compiles what it runs often, for a while: a first pass costs three times what a tenth one does.
        """
        costs: dict[str, list[Cost]] = {name: [] for name in ways}
        for number in range(warm_ups + rounds):
            for name, way in ways.items():
                cost = self.take(way)
                if number >= warm_ups:
                    costs[name].append(cost)
        return costs

    def take(self, work: Callable[[], object]) -> Cost:
        """Take what one piece of work costs."""
        before, started_s = cpu_of(self.jvm), time.monotonic()
        work()
        wall_s = time.monotonic() - started_s
        after = cpu_of(self.jvm)
        return Cost(wall_s, after[0] - before[0], after[1] - before[1])


def rate(case: str, costs: Sequence[Cost], size: int, *, records: int = 0) -> Figure:
    """Return MB/s of `size` bytes, or rows/s of so many records, with the CPU seconds per GB of JVM and Python."""
    wall_s = median([cost.wall_s for cost in costs])
    detail: dict[str, float | str] = {
        "JVM CPU-s/GB": median([cost.jvm_s for cost in costs]) / size * 1e9,
        "Python CPU-s/GB": median([cost.python_s for cost in costs]) / size * 1e9,
    }
    if records:
        return Figure(NAME, case, records / wall_s, "rows/s", detail={"MB/s": size / 1e6 / wall_s, **detail})
    return Figure(NAME, case, size / 1e6 / wall_s, "MB/s", detail=detail)


def beside(case: str, costs: Sequence[Cost], peer: Sequence[Cost], bound: float | None = None) -> Figure:
    """Return how many times as fast it is as its peer in the same rounds, and by how much less CPU."""
    wall = median([other.wall_s / cost.wall_s for cost, other in zip(costs, peer, strict=True)])
    cpu = median([other.cpu_s / cost.cpu_s for cost, other in zip(costs, peer, strict=True)])
    return Figure(NAME, case, wall, "x", bound, "higher", {"of the CPU": f"{1 / cpu:.2f}"})


def cpu_of(jvm: int) -> tuple[float, float]:
    """Return the CPU seconds so far of the JVM, and of its Python processes that live or that it has waited for."""
    stats = [_stat_of(path) for path in Path("/proc").iterdir() if path.name.isdigit()]
    below = {jvm}
    for _ in range(3):  # the daemon, its workers
        below |= {pid for pid, parent, _, _ in stats if parent in below}
    own = sum(cpu for pid, _, cpu, _ in stats if pid == jvm)
    ended = sum(ended for pid, _, _, ended in stats if pid in below)
    return own, ended + sum(cpu for pid, _, cpu, _ in stats if pid in below and pid != jvm)


def _stat_of(path: Path) -> tuple[int, int, float, float]:
    """Return a process: its id, its parent's, its own CPU seconds, and those of its children that have ended."""
    try:
        fields = (path / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return int(path.name), -1, 0.0, 0.0
    tick = os.sysconf("SC_CLK_TCK")
    own, ended = (sum(map(int, fields[at : at + 2])) / tick for at in (11, 13))
    return int(path.name), int(fields[1]), own, ended
