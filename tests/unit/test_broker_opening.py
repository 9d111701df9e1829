"""Openings and releases when the coordinator or the queue says no: what is tried again, named, or given to another."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from memq.broker.broker import Broker
from memq.broker.opening import open_partition, release_partition
from memq.errors import (
    DeniedError,
    DrainingError,
    FencedError,
    MemqError,
    MovedError,
    NotFoundError,
    QueueError,
    VersionConflictError,
)
from memq.format.pointer import ProducerEnd
from memq.topic import Topic, TopicSettings, read_partitions
from tests.brokers import BareClient, block_of, run, running_broker, write_frame
from tests.unit.test_broker_epochs import connected, pointers, processor_of


@asynccontextmanager
async def owning() -> AsyncIterator[tuple[Broker, BareClient, Topic]]:
    """Run a broker that has opened the only partition of a topic."""
    async with running_broker() as broker:
        client, topic = await connected(broker, TopicSettings())
        await client.open(topic)
        yield broker, client, topic
        await client.close()


def failing(part: Any, name: str, *errors: Exception) -> list[Exception]:
    """Let the first calls of a method fail; return what is left of the errors."""
    method, left = getattr(part, name), list(errors)

    async def call(*arguments: Any) -> Any:
        if left:
            raise left.pop(0)
        return await method(*arguments)

    setattr(part, name, call)
    return left


def events_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line.partition(":")[0] for line in caplog.messages]


@pytest.mark.parametrize("error", [QueueError("not now"), DeniedError("not you"), TimeoutError()], ids=repr)
def test_an_opening_that_fails_is_named_and_its_epoch_is_never_used_again(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        async with owning() as (broker, _, topic):
            left = failing(broker.services.queue, "publish", error)
            own = await open_partition(broker.services, topic, 0, read_partitions(topic)[0])
            counters = broker.services.counters
            assert (own.epoch, left, counters.opening_retries, counters.openings) == (3, [], 1, 2)
            assert [each.epoch for each in await pointers(broker, topic)] == [1, 3]

    run(work())
    assert "opening-retry" in events_of(caplog)


def test_a_claim_that_another_change_came_before_is_made_again() -> None:
    async def work() -> None:
        async with owning() as (broker, _, topic):
            left = failing(broker.services.coordinator, "set_assignment", VersionConflictError("it has changed"))
            own = await open_partition(broker.services, topic, 0, read_partitions(topic)[0])
            assert (own.epoch, left, broker.services.counters.opening_retries) == (2, [], 0)

    run(work())


@pytest.mark.parametrize(("owner", "words"), [("two", "belongs to broker 'two'"), ("", "belongs to nobody")])
def test_a_partition_of_another_broker_is_not_opened(owner: str, words: str) -> None:
    async def work() -> None:
        async with owning() as (broker, _, topic):
            coordinator = broker.services.coordinator
            current = await coordinator.assignment(topic.id, 0)
            await coordinator.set_assignment(msgspec.structs.replace(current, broker=owner, epoch=current.epoch + 1))
            with pytest.raises(MovedError, match=words):
                await open_partition(broker.services, topic, 0, read_partitions(topic)[0])

    run(work())


def test_a_partition_that_is_gone_is_not_opened() -> None:
    async def work() -> None:
        async with owning() as (broker, _, topic):
            failing(broker.services.coordinator, "assignment", NotFoundError("no such topic"))
            with pytest.raises(MovedError, match="partition 0 is gone: no such topic"):
                await open_partition(broker.services, topic, 0, read_partitions(topic)[0])

    run(work())


def test_a_release_says_closed_and_gives_the_session_back() -> None:
    async def work() -> None:
        async with owning() as (broker, client, topic):
            client.write(write_frame(block_of(topic, 0, [b"v", b"w"])))
            assert (await client.frame()).argument == 2
            await processor_of(broker, topic).drain()
            last = (await pointers(broker, topic))[-1]
            assert (last.kind, last.epoch, last.totals.records) == ("closed", 1, 2)
            current = await broker.services.coordinator.assignment(topic.id, 0)
            assert (current.session, current.epoch) == ("", 1)

    run(work())


def test_a_release_that_fails_is_named_and_keeps_nobody_waiting(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with owning() as (broker, _, topic):
            processor = processor_of(broker, topic)
            failing(broker.services.queue, "publish", DeniedError("not you"))
            await release_partition(broker.services, processor._publisher(patient=False), topic)
            assert (await pointers(broker, topic))[-1].kind == "opened"
            session = (await broker.services.coordinator.assignment(topic.id, 0)).session
            assert session == broker.services.session, "its next owner waits until this broker has left"

    run(work())
    assert events_of(caplog) == ["release-failed"]


def test_the_first_failure_of_a_partition_is_the_one_that_all_get() -> None:
    async def work() -> None:
        async with owning() as (broker, _, topic):
            processor = processor_of(broker, topic)
            processor.fail(FencedError("first"))
            processor.fail(MovedError("second"))
            asks = (
                processor.ready(),
                processor.end_producer(ProducerEnd(producer=7, next_sequence=0)),
                processor.begin_producer(7),
            )
            errors: list[MemqError] = []
            for ask in asks:
                with pytest.raises(MemqError) as caught:
                    await ask
                errors.append(caught.value)
            assert [str(error) for error in errors[:2]] == ["first", "first"]
            await processor.restate()
            assert [each.kind for each in await pointers(broker, topic)] == ["opened"]

    run(work())


def test_a_partition_that_drains_takes_no_new_stream() -> None:
    async def work() -> None:
        async with owning() as (broker, _, topic):
            processor = processor_of(broker, topic)
            await processor.ready()
            processor.start_draining()
            with pytest.raises(DrainingError, match="partition 0 of topic 'clicks' is being drained"):
                await processor.ready()

    run(work())
