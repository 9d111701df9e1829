"""Very many waiting queue items at one broker: its memory, the time of a dequeue, and a restart after kill -9.

    python -m benchmarks.queue_waiting                     # 20 million items in two queues

Items have 1 KB that compress well, and come in calls of 896: a block has 64 of them.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from benchmarks.child import Child, cpu_s, pss_bytes
from benchmarks.dev import dev_broker
from benchmarks.queues import SIZE
from benchmarks.results import percentile

MIB = 1 << 20
MANY, TASKS = 896, 4  # items of a call that enqueues, and calls at the same time
PARTS = 10  # of a queue, with figures of each
PROBES, PROBED = 300, 10  # calls that lease, and items of each


def probe(client: Child, queue: str) -> dict[str, float]:
    """Lease and ack; return the times in ms."""
    found = client.ask("probe", queue=queue, calls=PROBES, many=PROBED)
    delays_s: list[float] = found["delays_s"]
    times = {"p50": percentile(delays_s, 0.5), "p99": percentile(delays_s, 0.99), "first": found["first_s"]}
    return {name: round(value * 1e3, 1) for name, value in times.items()}


def main() -> None:
    """Measure one broker."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=20_000_000)
    parser.add_argument("--queues", type=int, default=2)
    options = parser.parse_args()
    queues = [f"waiting-{number}" for number in range(options.queues)]
    part = options.items // len(queues) // PARTS // (MANY * TASKS) * MANY * TASKS
    terms = {"size": SIZE, "many": MANY, "tasks": TASKS, "items": part}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="memq-bench-"))) / "data"
        with dev_broker(folder) as dev:
            with Child("queue_client", address=dev.address) as client:
                print(f"empty: {pss_bytes(dev.pid) / MIB:.0f} MiB", flush=True)
                for queue in queues:
                    for number in range(1, PARTS + 1):
                        done = client.ask("fill", queue=queue, **terms)
                        rate, memory = done["items"] / done["seconds"], pss_bytes(dev.pid) / MIB
                        print(f"{queue}, {number * part} items: {rate:.0f} items/s, {memory:.0f} MiB", flush=True)
                print(
                    {queue: probe(client, queue) for queue in queues}, f"{pss_bytes(dev.pid) / MIB:.0f} MiB", flush=True
                )
            os.kill(dev.pid, signal.SIGKILL)
        began_s = time.monotonic()
        with dev_broker(folder) as dev, Child("queue_client", address=dev.address) as client:
            print(f"after kill -9: ready line and client after {time.monotonic() - began_s:.1f} s", flush=True)
            for queue in queues:
                found = probe(client, queue)
                print(f"{queue}: {found}, {time.monotonic() - began_s:.1f} s after the kill", flush=True)
            print(f"{pss_bytes(dev.pid) / MIB:.0f} MiB, {cpu_s(dev.pid):.1f} CPU-s", flush=True)


if __name__ == "__main__":
    main()
