"""A log was cut and no longer names an instance of a producer: a new instance fences the old one all the same."""

from __future__ import annotations

import pytest

from memq.broker.partition import ownership
from memq.client.producer.producer import AsyncProducer
from memq.errors import ObjectExistsError, ProducerFencedError
from memq.notification.memory import MemoryQueue
from memq.topic import TopicSettings, read_partitions
from tests.brokers import run, running_broker
from tests.component.test_block_identity import values_of
from tests.partition_owners import processor_of


def test_an_instance_that_its_log_has_lost_is_fenced_by_the_next_one() -> None:
    """Both had the same number: the records of both were accepted, or the newer one was in conflict with the older."""

    async def work() -> None:
        async with running_broker(audit=False) as broker:
            topic = await broker.partitions.create("clicks", 1, TopicSettings(), exist_ok=False)
            queue = broker.services.queue
            assert isinstance(queue, MemoryQueue)
            async with AsyncProducer(broker.address, name="job", audit=False) as older:
                await (await older.send("clicks", b"older 0"))
                del queue.logs[read_partitions(topic)[0]].entries[1:]  # an empty log would be refused
                processor_of(broker, topic).fence(ObjectExistsError("in a test"))
                async with AsyncProducer(broker.address, name="job", audit=False) as newer:
                    assert await newer.resume_points("clicks") == {0: 0}
                    await (await newer.send("clicks", b"newer 0"))
                    with pytest.raises(ProducerFencedError):
                        await (await older.send("clicks", b"older 1"))
                    await (await newer.send("clicks", b"newer 1"))
            assert await values_of(broker) == [b"newer 0", b"newer 1"]

    run(work())


def test_an_instance_after_the_last_number_of_an_epoch_has_a_number_that_no_cut_frees(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its number was one of the next epoch: after a cut the first instance of that epoch got it, too."""
    monkeypatch.setattr(ownership, "INSTANCES_PER_EPOCH", 2)

    async def work() -> None:
        async with running_broker(audit=False) as broker:
            topic = await broker.partitions.create("clicks", 1, TopicSettings(), exist_ok=False)
            queue = broker.services.queue
            assert isinstance(queue, MemoryQueue)
            for _ in range(2):
                async with AsyncProducer(broker.address, name="job", audit=False) as early:
                    assert await early.resume_points("clicks") == {0: 0}
            async with AsyncProducer(broker.address, name="job", audit=False) as older:
                await (await older.send("clicks", b"older 0"))
                assert processor_of(broker, topic).owned().epoch == 2
                del queue.logs[read_partitions(topic)[0]].entries[1:]
                processor_of(broker, topic).fence(ObjectExistsError("in a test"))
                async with AsyncProducer(broker.address, name="job", audit=False) as newer:
                    assert await newer.resume_points("clicks") == {0: 0}
                    with pytest.raises(ProducerFencedError):
                        await (await older.send("clicks", b"older 1"))
                    await (await newer.send("clicks", b"newer 0"))
            assert await values_of(broker) == [b"newer 0"]

    run(work())
