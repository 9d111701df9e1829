"""Some real brokers of one cluster, on one event loop and on parts in memory; groups are on state logs."""

from __future__ import annotations

import resource
import time

import uvloop

from benchmarks.children.commands import answer, commands_async, options
from memq.broker.broker import Broker
from memq.broker.process import calm_collector
from memq.client.admin import AsyncAdmin
from memq.governor.memory import MemoryCluster, MemoryCoordinator
from memq.limits import MIB
from memq.notification.memory import MemoryQueue
from memq.protocol.messages import PartitionRef
from memq.runtime.runtime import Runtime
from memq.settings import BrokerSettings
from memq.storage_handlers.memory import MemoryHandler


async def main(brokers: int, partitions: int) -> None:
    """Serve until the parent closes the pipe; each command gets the CPU seconds so far."""
    runtime = Runtime()
    cluster, queue, store = MemoryCluster(), MemoryQueue(runtime.clock), MemoryHandler(runtime.clock)
    made: list[Broker] = []
    for number in range(brokers):
        settings = BrokerSettings(port=0, broker_id=f"b{number}", memory_bytes_max=32 * MIB, audit=False)
        broker = Broker(settings, runtime, {"main": store}, queue, MemoryCoordinator(cluster))
        await broker.start()
        made.append(broker)
    async with AsyncAdmin(made[0].address) as admin:
        topic = await admin.create_topic("bench", partitions=partitions)
        await admin.groups()  # creates the topic of the groups
    for broker in made:
        await broker.partitions.refresh()
    calm_collector()
    refs = [PartitionRef(topic=topic.name, topic_id=topic.id, partition=number) for number in range(partitions)]
    answer(addresses=[broker.address for broker in made], topic=refs[0].topic, topic_id=refs[0].topic_id)
    async for _ in commands_async():
        used = resource.getrusage(resource.RUSAGE_SELF)
        answer(cpu_s=used.ru_utime + used.ru_stime, time_s=time.monotonic())
    for broker in made:
        await broker.close()


if __name__ == "__main__":
    uvloop.run(main(**options()))
