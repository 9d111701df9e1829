"""Send and read on asyncio. Run it with the address of a broker, or alone on a cluster in memory."""

from __future__ import annotations

import asyncio
import sys

import memq.aio
from memq.testing import Cluster

RECORDS = 1_000


async def produce(address: str) -> None:
    async with memq.aio.Producer(address) as producer:
        for number in range(RECORDS - 1):
            await producer.send("ticks", b"tick %d" % number)  # waits for room in the buffer only
        last = await producer.send("ticks", b"tick %d" % (RECORDS - 1))
        ack = await last
        print(f"sequence {ack.first_sequence + ack.records - 1} is stored")


async def consume(address: str) -> int:
    count = 0
    async with memq.aio.Consumer(address, ["ticks"], group="charts") as consumer:
        async for batch in consumer:
            count += len(batch.values())
            await consumer.commit(batch)
            if count == RECORDS:
                break
    return count


async def main(address: str) -> int:
    async with memq.aio.Admin(address) as admin:
        await admin.create_topic("ticks", exist_ok=True)
    count, _ = await asyncio.gather(consume(address), produce(address))
    return count


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(asyncio.run(main(sys.argv[1])), "records came back")
    else:
        with Cluster() as cluster:
            assert asyncio.run(main(cluster.address)) == RECORDS
