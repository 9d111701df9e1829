"""A worker of the queue demo: `queue_demo_worker.py BROKER JOURNAL QUEUE...`. It may be killed at any moment.

Each step is one line of the journal: `begin` or `done`, queue, number of the job, attempt, and Unix ms.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time

import memq.aio

RETRY_DELAYS_S = (0.2,)
CONCURRENCY, PREFETCH = 64, 192


async def main(broker: str, journal: str, queues: list[str]) -> None:
    """Work until SIGTERM. A job without an aircraft fails in its first attempt."""
    out = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(step: str, item: memq.QueueItem) -> None:
        number = dict(item.metadata)["n"] or b""
        text = f"{step} {item.queue} {number.decode()} {item.attempt} {time.time_ns() // 1_000_000}\n"
        os.write(out, text.encode())  # a line is written whole, and survives the process

    async def handle(item: memq.QueueItem) -> None:
        note("begin", item)
        if b'"tailnum": null' in item.payload and item.attempt == 1:
            raise ValueError("no aircraft is assigned")
        note("done", item)

    async with memq.aio.Worker(
        handle,
        queues,
        brokers=broker,
        concurrency=CONCURRENCY,
        prefetch=PREFETCH,
        retry_delays_s=RETRY_DELAYS_S,
    ) as worker:
        await worker.run()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
