"""Several logs that were cut at the same time: a program handles them one after the other."""

from __future__ import annotations

from memq.client.consumer.consumer import AsyncConsumer
from memq.client.producer.producer import AsyncProducer
from memq.errors import PositionLostError
from memq.notification.memory import MemoryQueue
from memq.topic import TopicSettings, read_partitions
from tests.brokers import run, running_broker, until
from tests.component.test_cut_log import READ, WAIT_S, reader, take

PARTITIONS = 2


async def seek_while_an_error_waits(consumer: AsyncConsumer, partition: int) -> None:
    """Seek when the next error waits for a poll, because each log fails again until a seek."""
    failures = consumer.stats().retries
    await until(lambda: consumer.stats().retries > failures)
    await consumer.commit()
    consumer.pause("clicks", partition)
    consumer.resume("clicks", partition)
    assert len(await consumer.lag()) == len(await consumer.committed()) == PARTITIONS
    await until(lambda: consumer.stats().retries > failures + 1)
    await consumer.seek("clicks", partition, "beginning")


def test_an_error_of_one_partition_is_raised_by_no_call_for_another_one() -> None:
    """A seek raised it, so that a program with several lost positions never came to seek in all partitions."""

    async def work() -> None:
        async with running_broker(audit=False) as broker:
            topic = await broker.partitions.create("clicks", PARTITIONS, TopicSettings(), exist_ok=False)
            queue = broker.services.queue
            assert isinstance(queue, MemoryQueue)

            async def fill(first: int) -> None:
                async with AsyncProducer(broker.address, audit=False, codec="none") as producer:
                    for number in range(first, first + READ):
                        for partition in range(PARTITIONS):
                            await (await producer.send("clicks", b"%04d" % number, partition=partition))

            await fill(0)
            async with reader(broker, "g") as consumer:
                await take(consumer, READ * PARTITIONS)
                await consumer.commit()
            for partition in read_partitions(topic):
                del queue.logs[partition].entries[1:]
            await fill(100)
            async with reader(broker, "g", auto_commit=False) as consumer:
                found, sought = list[bytes](), 0
                while len(found) < PARTITIONS * READ:
                    try:
                        batch = await consumer.poll(WAIT_S)
                    except PositionLostError:
                        assert sought < PARTITIONS, "an error of a position before a seek"
                        await seek_while_an_error_waits(consumer, sought)
                        sought += 1
                    else:
                        assert batch is not None
                        found += [record.value or b"" for record in batch]
                new = [b"%04d" % number for number in range(100, 100 + READ)]
                assert sorted(found) == sorted(new * PARTITIONS)

    run(work())
