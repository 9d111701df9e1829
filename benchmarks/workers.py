"""Eight workers of one queue, with `memq dev` on a real disk; five of them are killed meanwhile.

The workers are processes that sleep for each job. The time begins with the enqueue, when all workers wait. It ends with
the ack of the last job. The ideal time is that of the sleeps, divided by eight. Five times, a worker is killed with
SIGKILL and another one started: after each eighth of the jobs.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import memq
from benchmarks.dev import dev_broker
from benchmarks.results import Figure, Options

NAME = "workers"
QUEUE = "jobs"
WORKERS, KILLS = 8, 5
JOBS, QUICK_JOBS = 10_000, 1_600
JOB_S = 0.05
LEASE_S = 5.0
FACTOR_MAX = 1.3
GAP_S = 0.02
WAIT_S = 600.0


@dataclass(frozen=True, slots=True)
class PoolResult:
    """The result of a pool: its time over the ideal one, and which jobs began or ended more than once."""

    factor: float
    seconds: float
    acked: int
    handled_twice: int
    begun_twice: int
    strays: int  # jobs that began twice, and that no killed worker had


class Pool:
    """The worker processes, and their journals."""

    def __init__(self, address: str, folder: Path, stack: ExitStack, job_s: float) -> None:
        self.killed: list[Path] = []
        self._address, self._folder, self._stack, self._job_s = address, folder, stack, job_s
        self._running: dict[Path, subprocess.Popen[bytes]] = {}

    def start(self) -> Path:
        """Start a worker; return its journal."""
        journal = self._folder / f"{len(self._running) + len(self.killed)}.journal"
        journal.touch()
        command = [sys.executable, "-m", "benchmarks.children.queue_worker", self._address, str(journal), QUEUE]
        process = subprocess.Popen([*command, str(self._job_s)])
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        self._running[journal] = process
        return journal

    def kill(self) -> None:
        """Kill the worker that has run for longest, and start another one."""
        victim = next(iter(self._running))
        process = self._running.pop(victim)
        process.kill()
        process.wait()
        self.killed.append(victim)
        self.start()

    def lines(self, word: str) -> dict[Path, list[str]]:
        """Return the jobs of the lines that begin with a word, by journal."""
        found: dict[Path, list[str]] = {}
        for journal in (*self._running, *self.killed):
            lines = journal.read_text(encoding="utf-8").split("\n")[:-1]
            found[journal] = [line.split()[1] for line in lines if line.startswith(f"{word} ")]
        return found

    def is_ready(self) -> bool:
        """Whether all workers wait for jobs."""
        return all(journal.read_text(encoding="utf-8").startswith("ready") for journal in self._running)


def work(address: str, folder: Path, jobs: int, job_s: float = JOB_S, kills: int = KILLS) -> PoolResult:
    """Let a pool of workers handle jobs, and kill some of them."""
    with ExitStack() as stack, memq.Queue(address) as queue:
        pool = Pool(address, folder, stack, job_s)
        for _ in range(WORKERS):
            pool.start()
        _wait(pool.is_ready)
        began_s = time.perf_counter()
        ids = queue.enqueue_many(QUEUE, [b"%d" % number for number in range(jobs)], lease=LEASE_S)
        for number in range(1, kills + 1):
            goal = jobs * number // WORKERS
            _wait(lambda: sum(map(len, pool.lines("done").values())) >= goal)  # noqa: B023
            pool.kill()
        _wait(lambda: QUEUE not in queue.queues())
        seconds = time.perf_counter() - began_s
        outcomes = Counter(queue.cancel_many(ids))
        return _result(pool, seconds, jobs * job_s / WORKERS, outcomes[memq.ItemOutcome.ALREADY_ACKED])


def _result(pool: Pool, seconds: float, ideal_s: float, acked: int) -> PoolResult:
    begun, done = pool.lines("begin"), pool.lines("done")
    twice = {job for job, count in _counted(begun.values()).items() if count > 1}
    of_killed = {job for journal in pool.killed for job in begun[journal]}
    handled = sum(count > 1 for count in _counted(done.values()).values())
    return PoolResult(seconds / ideal_s, seconds, acked, handled, len(twice), len(twice - of_killed))


def _counted(jobs: Iterable[list[str]]) -> Counter[str]:
    return Counter(job for some in jobs for job in some)


def _wait(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > until_s:
            raise TimeoutError(f"the pool has not come so far in {WAIT_S:g} s")
        time.sleep(GAP_S)


def run(options: Options) -> list[Figure]:
    """Measure one pool."""
    jobs = QUICK_JOBS if options.quick else JOBS
    with tempfile.TemporaryDirectory(prefix="memq-bench-") as folder, dev_broker(Path(folder) / "data") as dev:
        found = work(dev.address, Path(folder), jobs)
    detail: dict[str, float | str] = {"s": found.seconds, "jobs": jobs, "begun twice": found.begun_twice}
    detail["handled twice"] = found.handled_twice
    figures = [
        Figure(NAME, "time over the ideal", found.factor, "times", FACTOR_MAX, detail=detail),
        Figure(NAME, "jobs without an ack", jobs - found.acked, "jobs", 0),
        Figure(NAME, "repeated, of no killed worker", found.strays, "jobs", 0),
    ]
    for figure in figures:
        options.say(figure.line())
    return figures
