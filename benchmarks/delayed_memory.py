"""Memory of waiting delayed records, and how long a snapshot stops the event loop.

    python -m benchmarks.delayed_memory                              # the 8 service partitions of a cluster
    python -m benchmarks.delayed_memory --holds 0 --near 250000 --partitions 1   # all are due within the hour

The owner's parts run without a broker: the decisions of the machine, its runs in a folder, and its snapshots.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from memq.format.held_object import HeldBlock, HeldLane, HoldId, Target
from memq.format.held_sequences import delayed_sequence
from memq.format.key import held_object_key, run_key
from memq.format.state_log.entry import OpenedState, StateEntry
from memq.format.state_log.snapshot import encode_snapshot
from memq.holds.decisions import HOLDS_MACHINE, HoldDecision, HoldsDecision, encode_decision
from memq.holds.machine import HoldMachine
from memq.holds.run_keeper import RunKeeper, RunKeeperParts
from memq.runtime.clock import SystemClock
from memq.runtime.logs import EventLog
from memq.runtime.runtime import Runtime
from memq.state_log import Answer
from memq.state_log.fold import StateFold
from memq.storage_handlers.filesystem import FilesystemHandler

BATCH = 200  # records of one held object
TARGETS = [Target(f"topic-{number}", f"{number:032x}", number % 8) for number in range(16)]
DAYS_MS = 30 * 86_400_000


def rss_mib() -> float:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4_096 / (1 << 20)


class ArrivalClock(SystemClock):
    """A wall clock on which records arrive at a rate, however long the measurement takes."""

    def __init__(self) -> None:
        self._now_ms = float(super().wall_ms())

    def wall_ms(self) -> int:
        """Return the time of the last record (Unix ms)."""
        return int(self._now_ms)

    def pass_time(self, milliseconds: float) -> None:
        """Let so much time pass."""
        self._now_ms += milliseconds


class Owner:
    """The owner of one service partition: its machine, and the keeper of its runs."""

    def __init__(self, folder: Path, partition: int, clock: ArrivalClock, merging: asyncio.Semaphore) -> None:
        self.runtime = Runtime(clock=clock, random=random.Random(partition))
        self._partition = partition
        self.machine = HoldMachine()
        self.fold = StateFold({HOLDS_MACHINE: self.machine})
        self.fold.meet(0, StateEntry(1, 0, OpenedState(1, "benchmark")))
        for name in ("objects", "tmp"):
            (folder / name).mkdir(exist_ok=True)
        self.store = FilesystemHandler(folder / "objects", folder / "tmp")
        self.brought = self.puts = 0
        self.runs = RunKeeper(
            RunKeeperParts(
                machine=self.machine,
                store=self.store,
                runtime=self.runtime,
                events=EventLog(SystemClock()),
                key_valid_s=1_800.0,
                merging=merging,
                propose=self._propose,
                brought=self._count,
                moved=self._no_call,
                new_key=self._new_key,
            )
        )

    def _new_key(self) -> str:
        self.puts += 1
        return run_key("memq", "_memq_state", "ab" * 16, self._partition, self.runtime.random.getrandbits(64))

    async def _propose(self, decision: HoldsDecision) -> Answer:
        return self.machine.apply(encode_decision(decision))

    def _no_call(self) -> None:
        pass

    def _count(self, holds: Iterable[object]) -> None:
        self.brought += len(list(holds))

    def hold(self, count: int, least_ms: int, span_ms: int) -> None:
        """Hold blocks of one object, which are due between `least_ms` and `span_ms` later."""
        draw, now_ms = self.runtime.random, self.runtime.clock.wall_ms()
        key = held_object_key("memq", draw.getrandbits(64), now_ms)
        lanes: dict[Target, list[HeldBlock]] = {}
        for number in range(count):
            due_ms = now_ms + least_ms + draw.randrange(span_ms)
            block = HeldBlock(
                HoldId(draw.getrandbits(63), delayed_sequence(due_ms)),
                delayed_sequence(due_ms) + 1,
                due_ms,
                number * 300,
                300,
            )
            lanes.setdefault(draw.choice(TARGETS), []).append(block)
        index = tuple(HeldLane(target, "", tuple(blocks)) for target, blocks in lanes.items())
        self.machine.apply(encode_decision(HoldDecision(key, now_ms - 300_000, index)))


class Stops:
    """Measures the longest time in which the event loop does nothing else."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            before_s = time.thread_time()  # other processes do not count
            await asyncio.sleep(0)
            self.longest_s = max(self.longest_s, time.thread_time() - before_s)


async def snapshot(owner: Owner) -> tuple[float, float, int]:
    """Return the longest stop and the whole time of encoding a snapshot, in ms, and its bytes."""
    stops = Stops()
    watch = asyncio.create_task(stops.run())
    await asyncio.sleep(0)
    began_s, size = time.thread_time(), 0
    for step in owner.fold.begin_save():
        if step is None:
            await asyncio.sleep(0)
            continue
        size = sum(len(state) for state in step.machines.values())
        await asyncio.sleep(0)
        encode_snapshot(step, "key")
    whole_s = time.thread_time() - began_s
    await asyncio.sleep(0)
    watch.cancel()
    return stops.longest_s * 1_000, whole_s * 1_000, size


async def measure(holds: int, near: int, partitions: int, rate: int, folder: Path) -> None:
    """Hold records, and print the figures."""
    clock, merging = ArrivalClock(), asyncio.Semaphore(1)
    owners = [Owner(folder, number, clock, merging) for number in range(partitions)]
    owner = owners[0]
    gc.collect()
    empty_mib, began_s = rss_mib(), time.process_time()
    for _ in range(0, near, BATCH):
        owner.hold(BATCH, 60_000, 3_000_000)
    work = [asyncio.create_task(each.runs.run()) for each in owners]
    greatest_mib = 0.0
    for number in range(0, holds, BATCH):
        owner = owners[number // BATCH % partitions]
        owner.hold(BATCH, 2 * 3_600_000, DAYS_MS)
        owner.runs.wake()
        clock.pass_time(BATCH * 1_000 / rate)
        await asyncio.sleep(0)
        while len(owner.machine.open) > near + 20_000:  # noqa: ASYNC110  # the keeper sets no event for others
            await asyncio.sleep(0)
        if number % (BATCH * 500) == 0:
            greatest_mib = max(greatest_mib, rss_mib())
            print(f"{number} held, {rss_mib() - empty_mib:.0f} MiB more than empty", file=sys.stderr, flush=True)
    before = -1
    while before != sum(each.puts for each in owners):  # the last merges
        before = sum(each.puts for each in owners)
        await asyncio.sleep(2)
    seconds = time.process_time() - began_s
    gc.collect()
    grown_mib, runs = rss_mib() - empty_mib, [run for each in owners for run in each.machine.spilled.runs.values()]
    waiting = sum(each.machine.waiting_count for each in owners)
    print(f"{waiting} wait, {sum(len(each.machine.open) for each in owners)} in memory, {len(runs)} objects of runs")
    print(f"memory {grown_mib:.1f} MiB more than empty ({greatest_mib - empty_mib:.1f} MiB at most meanwhile)")
    print(f"ids of moved records: {sum(len(each.machine.spilled.save().recent) for each in owners)} sets")
    print(f"{before} PUTs of runs, {sum(each.run.size for each in runs) / (1 << 20):.1f} MiB in them")
    print(f"{seconds:.0f} CPU seconds for all, with merges")
    owner = owners[0]
    stop_ms, whole_ms, size = await snapshot(owner)
    print(f"snapshot of {size / 1e6:.2f} MB: {whole_ms:.0f} ms, and no stop over {stop_ms:.1f} ms")
    began_s = time.thread_time()
    HoldMachine().restore(owner.machine.snapshot())
    print(f"a snapshot and a restore in one go: {(time.thread_time() - began_s) * 1_000:.0f} ms")
    for each in work:
        each.cancel()


def main() -> None:
    """Run the measurement in a folder that is removed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--holds", type=int, default=10_000_000, help="records that are due in 2 hours to 30 days")
    parser.add_argument("--partitions", type=int, default=8, help="service partitions")
    parser.add_argument("--near", type=int, default=0, help="records of one partition that are due within the hour")
    parser.add_argument("--rate", type=int, default=5_000, help="records that arrive in a second")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(options.holds, options.near, options.partitions, options.rate, Path(folder)))


if __name__ == "__main__":
    main()
