"""Memory and CPU of waiting queue items, and how long a snapshot stops the event loop.

    python -m benchmarks.queue_memory                                  # a million single items
    python -m benchmarks.queue_memory --items 20000000 --block 1000    # in blocks of 1,000

Machine and scheduler run without a broker, a log and payloads.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import TypeVar

from benchmarks.delayed_memory import rss_mib
from memq.broker.process import calm_collector
from memq.format.held_object import HeldBlock, HeldLane, HoldId, Target
from memq.format.key import held_object_key
from memq.queues.decisions import (
    AckDecision,
    EnqueueDecision,
    GrantDecision,
    ItemTerms,
    LeasedItems,
    QueueDecision,
    encode_decision,
)
from memq.queues.machine import QueueMachine
from memq.queues.scheduler import Bounds, ItemScheduler, Moment
from memq.state_log import Answer

Value = TypeVar("Value")
BLOCKS_OF_AN_OBJECT = 100
BLOCK_BYTES = 1_000
LEASED = 500  # items of one grant
TERMS = ItemTerms(5, 300_000, 0, 0)
BEGIN = Moment(1_000_000, 0.0)
READY = Moment(2_000_000, 1_000.0)


class Shard:
    """A shard whose decisions count at once."""

    def __init__(self, block: int) -> None:
        self.block = block  # items of a block
        self.machine = QueueMachine()
        self.scheduler = ItemScheduler(self.machine, BEGIN)
        self._random = random.Random(1)
        self._grant = 0

    def enqueue(self, blocks: int) -> None:
        """Put blocks that are due later into a queue, those of an object at a time."""
        for first in range(0, blocks, BLOCKS_OF_AN_OBJECT):
            due_ms = BEGIN.wall_ms + 1 + first % 1_000
            held = tuple(
                HeldBlock(
                    HoldId(self._random.randrange(1, 1 << 63), 0), self.block, due_ms, at * BLOCK_BYTES, BLOCK_BYTES
                )
                for at in range(min(BLOCKS_OF_AN_OBJECT, blocks - first))
            )
            key = held_object_key("memq", self._random.getrandbits(64), BEGIN.wall_ms)
            self._decide(EnqueueDecision(key, 0, (HeldLane(Target("jobs", "", 0), TERMS.lane(), held),)))
            for each in held:
                self.scheduler.enqueued(each.id.producer, BEGIN)

    def lease(self, count: int) -> list[tuple[LeasedItems, ...]]:
        """Lease items."""
        found: list[tuple[LeasedItems, ...]] = []
        left = count
        while left > 0:
            items = self.scheduler.take({"jobs": min(LEASED, left)}, Bounds(1 << 30), READY)
            self._grant += 1
            blocks = self._decide(GrantDecision(self._grant, READY.wall_ms, tuple(items)))
            self.scheduler.granted(items, blocks, READY.steady_s)  # type: ignore[arg-type]  # as the machine says
            found.append(tuple(LeasedItems(each, self._grant) for each in items))
            left -= sum(map(len, items))
        return found

    def ack(self, leases: tuple[LeasedItems, ...]) -> None:
        """Ack items."""
        items = [each.items for each in leases]
        self.scheduler.hold(items)
        outcomes = self._decide(AckDecision(READY.wall_ms, leases))
        self.scheduler.released(items, outcomes, READY.steady_s)  # type: ignore[arg-type]  # as the machine says

    def _decide(self, decision: QueueDecision) -> Answer:
        return self.machine.apply(encode_decision(decision))


@contextmanager
def cpu_of(name: str, items: int) -> Iterator[None]:
    """Print the CPU that some work takes for an item."""
    began_s = time.process_time()
    yield
    print(f"{name}: {(time.process_time() - began_s) / items * 1e6:.3f} us of an item")


def say_memory(name: str, before_mib: float, blocks: int, block: int) -> None:
    """Print the memory of a block and of an item."""
    gc.collect()
    size = (rss_mib() - before_mib) * (1 << 20) / blocks
    print(f"{name}: {size:.0f} bytes of a block, {size / block:.2f} of an item, {size * blocks / (1 << 20):.0f} MiB")


def say_snapshot(machine: QueueMachine) -> None:
    """Print size and times of a snapshot, and of the steps in which an owner opens it."""
    pieces, wrote = timed(machine.begin_snapshot())
    state, again = b"".join(pieces), QueueMachine()
    print(f"snapshot: {len(state) / (1 << 20):.1f} MiB, {wrote}")
    print(f"read: {timed(again.begin_restore(state))[1]}")
    print(f"scheduled: {timed(ItemScheduler.in_slices(again, READY))[1]}")


def timed(steps: Iterator[Value]) -> tuple[list[Value], str]:
    """Return what some steps yield, and the CPU seconds that they take."""
    times, values, began_s = [0.0], list[Value](), time.process_time()
    for value in steps:
        values.append(value)
        times.append(time.process_time() - began_s)
    times.append(time.process_time() - began_s)
    longest_s = max(later - former for former, later in pairwise(times))
    return values, f"in {times[-1]:.2f} s, the longest step {longest_s * 1e3:.0f} ms"


def main() -> None:
    """Measure one shard."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--block", type=int, default=1, help="items of a block")
    options = parser.parse_args()
    blocks, leased = options.items // options.block, options.items // 10
    calm_collector()
    shard = Shard(options.block)
    gc.collect()
    before_mib = rss_mib()
    with cpu_of("enqueue", options.items):
        shard.enqueue(blocks)
    say_memory("waiting, not due", before_mib, blocks, options.block)
    with cpu_of("become due", options.items):
        shard.scheduler.pass_time(READY)
    say_memory("waiting, ready", before_mib, blocks, options.block)
    with cpu_of("lease", leased):
        leases = shard.lease(leased)
    say_memory("a tenth leased", before_mib, blocks, options.block)
    say_snapshot(shard.machine)
    with cpu_of("ack", leased):
        for each in leases:
            shard.ack(each)


if __name__ == "__main__":
    main()
