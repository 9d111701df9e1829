"""The flight records as jobs in leased queues, with workers and brokers that are killed meanwhile.

Run it with `make queue-demo`. It starts `memq dev` on a fresh folder. Each flight goes into the queue of its airport.
Late flights have priority, cancelled ones a delay. A pool of workers handles them. SIGKILL ends workers and the broker,
each by its own process id. At the end, each job was acked exactly once. The report has all redeliveries, and the audit
is clean.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from flights import flights
from folders import claim, clear
from messaging_demo import DevBroker, require, until

import memq

RECORDS = 100_000  # jobs; two cores handle them in half a minute
WORKERS = 3
LEASE_S = 5
DELAY_S = 5
URGENT, USUAL, DELAYED = 0, 5, 7  # priorities
LATE_MIN = 120
BATCH = 1_000
KILLS = ((0.15, "worker"), (0.3, "broker"), (0.45, "worker"), (0.6, "worker"), (0.75, "broker"))
PROGRAM = Path(__file__).with_name("queue_demo_worker.py")


class Step(NamedTuple):
    """A line of a worker's journal."""

    step: str
    queue: str
    number: int
    attempt: int
    at_ms: int


@dataclass
class Pool:
    """The workers that run, and the journals of all that have run."""

    address: str
    queues: list[str]
    data: Path
    stack: ExitStack
    running: dict[Path, subprocess.Popen[bytes]] = field(default_factory=dict)
    killed: list[Path] = field(default_factory=list)

    @property
    def journals(self) -> list[Path]:
        """The journals of all workers, also of killed ones."""
        return [*self.running, *self.killed]

    def start(self) -> None:
        """Start one worker."""
        journal = self.data / f"worker-{len(self.journals)}.journal"
        journal.touch()
        with journal.with_suffix(".log").open("w", encoding="utf-8") as log:
            process = subprocess.Popen(
                [sys.executable, str(PROGRAM), self.address, str(journal), *self.queues], stderr=log
            )
        self.stack.callback(process.kill)
        self.running[journal] = process

    def kill(self) -> None:
        """Kill the worker with the longest journal with SIGKILL, and start another one."""
        victim = max(self.running, key=lambda each: each.stat().st_size)
        process = self.running.pop(victim)
        process.kill()
        process.wait()
        self.killed.append(victim)
        print(f"  killed {victim.stem} with SIGKILL (process {process.pid})", flush=True)
        self.start()

    def handled(self) -> int:
        """Return how many jobs were handled so far; those of a redelivery count again."""
        return sum(journal.read_bytes().count(b"done ") for journal in self.journals)

    def stop(self) -> None:
        """End all workers with SIGTERM."""
        for journal, process in self.running.items():
            process.terminate()
            require(process.wait() == 0, f"{journal.stem} did not end well")


def steps_of(journal: Path) -> list[Step]:
    """Return the whole lines of a journal."""
    lines = journal.read_text(encoding="utf-8").split("\n")[:-1]
    return [
        Step(step, queue, int(number), int(attempt), int(at_ms))
        for step, queue, number, attempt, at_ms in (line.split() for line in lines)
    ]


@dataclass
class Jobs:
    """The jobs by number: their ids, priorities, and when they are due (Unix ms)."""

    ids: dict[int, str] = field(default_factory=dict)
    priorities: dict[int, int] = field(default_factory=dict)
    due_ms: dict[int, int] = field(default_factory=dict)
    failing: set[int] = field(default_factory=set)
    queues: set[str] = field(default_factory=set)


def enqueue(address: str, records: int) -> Jobs:
    """Put each flight into the queue of its airport, with the terms of its kind."""
    jobs, started = Jobs(), time.perf_counter()
    waiting: dict[tuple[str, int], list[tuple[int, bytes]]] = {}
    with memq.Queue(address) as client:

        def flush(queue: str, priority: int) -> None:
            some = waiting.pop((queue, priority), [])
            delay_s = DELAY_S if priority == DELAYED else 0
            due_ms = time.time_ns() // 1_000_000 + 1_000 * delay_s
            ids = client.enqueue_many(
                queue,
                [line for _, line in some],
                priority=priority,
                deliver_after=delay_s,
                lease=LEASE_S,
                metadata=[{"n": str(number)} for number, _ in some],
            )
            for (number, _), id_ in zip(some, ids, strict=True):
                jobs.ids[number], jobs.priorities[number], jobs.due_ms[number] = id_, priority, due_ms

        for number, ((_, line), _) in enumerate(zip(flights(), range(records), strict=False)):
            flight = json.loads(line)
            queue = f"flights.{flight['origin']}"
            delay_min = flight["dep_delay"]
            priority = DELAYED if delay_min is None else URGENT if delay_min >= LATE_MIN else USUAL
            jobs.queues.add(queue)
            if flight["tailnum"] is None:
                jobs.failing.add(number)
            some = waiting.setdefault((queue, priority), [])
            some.append((number, line))
            if len(some) == BATCH:
                flush(queue, priority)
        for queue, priority in list(waiting):
            flush(queue, priority)
        took_s = time.perf_counter() - started
        kinds = Counter(jobs.priorities.values())
        print(
            f"enqueued {len(jobs.ids):,} flights into {len(jobs.queues)} queues in {took_s:.1f} s: "
            f"{kinds[URGENT]:,} urgent, {kinds[DELAYED]:,} with a delay of {DELAY_S} s",
            flush=True,
        )
    return jobs


def work(broker: DevBroker, jobs: Jobs, pool: Pool) -> None:
    """Let the pool handle all jobs, and kill workers and the broker meanwhile."""
    started = time.perf_counter()
    for _ in range(WORKERS):
        pool.start()
    for part, what in KILLS:
        goal = int(part * len(jobs.ids))
        until(lambda: pool.handled() >= goal, "the workers have handled a part of the jobs")  # noqa: B023
        if what == "broker":
            broker.kill()
        else:
            pool.kill()
    with memq.Queue(broker.address) as client:
        until(lambda: pool.handled() >= len(jobs.ids), "the workers have handled all jobs")
        until(lambda: not client.queues(), "no queue has an item")
    pool.stop()
    took_s = time.perf_counter() - started
    print(f"handled by {WORKERS} workers in {took_s:.1f} s: {len(jobs.ids) / took_s:,.0f} jobs/s", flush=True)


def check_acks(address: str, jobs: Jobs) -> None:
    """Each job was acked: its end is known, and it has one end only."""
    outcomes: Counter[memq.ItemOutcome] = Counter()
    with memq.Queue(address) as client:
        outcomes.update(client.cancel_many(list(jobs.ids.values())))
    require(outcomes == {memq.ItemOutcome.ALREADY_ACKED: len(jobs.ids)}, f"not all jobs are acked: {outcomes}")


def audit(address: str, jobs: Jobs) -> None:
    """The audit has each job as acked once, by the logs and objects of the broker."""
    command = [sys.executable, "-m", "memq", "queue", "audit", "-b", address, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    found = json.loads(done.stdout)
    acked = found["items"]["acked"] + found["ended_before"]
    require(found["verdict"] == "clean", f"the audit has findings: {found['findings']}")
    require(acked == len(jobs.ids), f"the audit has {acked:,} acked items")
    print(f"audit clean: {acked:,} items acked, {found['coverage']['entries']:,} entries of the logs read", flush=True)


def check_order(jobs: Jobs, journal: list[Step]) -> None:
    """In one worker, first attempts of a queue come by priority, and no job comes before it is due."""
    last: dict[str, int] = {}
    for each in journal:
        require(each.at_ms >= jobs.due_ms[each.number], f"job {each.number} came before it was due")
        priority = jobs.priorities[each.number]
        if each.step == "begin" and each.attempt == 1 and priority != DELAYED:
            require(last.get(each.queue, URGENT) <= priority, f"job {each.number} came after one of less priority")
            last[each.queue] = priority


def report(jobs: Jobs, pool: Pool) -> None:
    """Check the journals, and print the redeliveries."""
    journals = {journal: steps_of(journal) for journal in pool.journals}
    done: dict[int, list[Path]] = {}
    attempts: dict[int, int] = {}
    for journal, steps in journals.items():
        check_order(jobs, steps)
        for each in steps:
            attempts[each.number] = max(attempts.get(each.number, 0), each.attempt)
            if each.step == "done":
                done.setdefault(each.number, []).append(journal)
    require(done.keys() == jobs.ids.keys(), "a job was never handled")
    begun = Counter(
        (each.number, each.attempt) for steps in journals.values() for each in steps if each.step == "begin"
    )
    require(set(begun.values()) == {1}, "two workers had the same attempt")
    twice = {number: where for number, where in done.items() if len(where) > 1}
    require(
        all(set(where) & set(pool.killed) for where in twice.values()),
        "a job was handled twice that no killed worker had",
    )
    for line in redeliveries(jobs, attempts, twice):
        print(line)


def redeliveries(jobs: Jobs, attempts: dict[int, int], twice: dict[int, list[Path]]) -> Iterator[str]:
    """Yield the lines of the report."""
    failed = {number for number in jobs.failing if attempts[number] > 1}
    others = {number for number, attempt in attempts.items() if attempt > 1} - failed
    yield f"redeliveries: {len(failed) + len(others):,} of {len(jobs.ids):,} jobs had more than one attempt"
    yield f"  {len(failed):,} after a failure of their handler"
    yield f"  {len(others):,} after the kill of a worker, or of the broker with a grant on its way"
    yield f"  {len(twice):,} were handled twice, all of them by a killed worker first"
    for attempt, count in sorted(Counter(attempts.values()).items()):
        yield f"  {count:,} jobs were done in attempt {attempt}"


def main() -> int:
    """Run the demo; the exit code is 0 when each job was acked exactly once."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("memq-queue-demo"), help="data folder, emptied first")
    parser.add_argument("--records", type=int, default=RECORDS, help="flights that become jobs")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that its programs end with the demo
    with claim(options.data):
        clear(options.data)
        started = time.perf_counter()
        with ExitStack() as stack:
            broker = stack.enter_context(DevBroker(options.data).running())
            jobs = enqueue(broker.address, options.records)
            pool = Pool(broker.address, sorted(jobs.queues), options.data, stack)
            work(broker, jobs, pool)
            check_acks(broker.address, jobs)
            report(jobs, pool)
            audit(broker.address, jobs)
        print(f"each of {len(jobs.ids):,} jobs was acked exactly once, after {time.perf_counter() - started:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
