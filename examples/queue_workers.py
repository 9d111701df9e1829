"""Jobs in a queue, and two workers. Run it with the address of a broker, or alone on a cluster in memory."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter

import memq.aio
from memq.testing import Cluster

JOBS = 40


async def work(address: str, done: Counter[bytes]) -> None:
    """Work until no job is left; each job fails once."""
    async with memq.aio.Queue(address) as queue:
        while items := await queue.dequeue({"jobs": 4}, wait=2):
            for item in items:
                if item.attempt == 1:
                    await queue.nack(item, after=0.1, metadata=b"failed once")
                else:
                    await queue.ack(item)
                    done[item.payload] += 1


async def main(address: str) -> int:
    done: Counter[bytes] = Counter()
    async with memq.aio.Queue(address) as queue:
        await queue.enqueue("jobs", b"urgent", priority=0, lease=30)
        await queue.enqueue_many("jobs", [b"job %d" % number for number in range(JOBS - 1)], lease=30)
        await asyncio.gather(work(address, done), work(address, done))
        assert await queue.queues() == {}, "a queue goes with its last item"
    assert len(done) == sum(done.values()) == JOBS, "each job is acked once"
    return len(done)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        count = asyncio.run(main(sys.argv[1]))
    else:
        with Cluster() as cluster:
            count = asyncio.run(main(cluster.address))
    print(f"{count} jobs are done")
