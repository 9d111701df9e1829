"""Requests to the owner of a partition: followed to another broker, and repeated until one answers."""

from __future__ import annotations

import asyncio
import random

import pytest

from memq.client import owner_requests
from memq.client.metadata import ClusterMetadata
from memq.client.owner_requests import OwnerRequests
from memq.client.producer.core import BEGINNINGS_AT_ONCE_MAX, InstanceFencing
from memq.client.producer.settings import ProducerSettings
from memq.errors import (
    MemqError,
    MovedError,
    NotReadyError,
    ProducerFencedError,
    ProtocolError,
    QueueError,
    TimedOutError,
)
from memq.notification import Span
from memq.protocol.admin_messages import AdminAnswer, AdminRequest, BeginProducer, WireInstance
from memq.protocol.frames import Api, Frame
from memq.protocol.messages import PartitionEntries, PollAnswer, PollRequest, PollSpans, decode_message
from memq.topic import ReadPartition
from tests.stepped_time import step, stepped_runtime
from tests.unit.toy_broker import ToyBroker, ToyConnection, pool_of, run, toy_topic, turns

TOPIC = toy_topic()
LOG = ReadPartition(TOPIC.name, TOPIC.id, 0)


class Owner:
    """The script of an owner: `errors` first, then `epoch`; it may be silent, or say nothing of an instance."""

    def __init__(self) -> None:
        self.errors: list[MemqError] = []
        self.begun: list[int] = []
        self.metadata = 0
        self.silent = 0
        self.mute = False
        self.spans: list[int | None] = []

    def __call__(self, connection: ToyConnection, frame: Frame) -> bool:
        if frame.api == Api.METADATA:
            self.metadata += 1
        if frame.api == Api.POLL:
            self._show_span(connection, frame)
            return True
        if frame.api != Api.ADMIN:
            return False
        ask = decode_message(frame.body, AdminRequest).ask
        assert isinstance(ask, BeginProducer)
        self.begun.append(ask.partition)
        if self.silent:
            self.silent -= 1
        elif self.errors:
            connection.refuse(frame, self.errors.pop(0))
        else:
            instance = None if self.mute else WireInstance(epoch=3, next_sequence=10 + ask.partition)
            connection.answer(frame, AdminAnswer(instance=instance))
        return True

    def _show_span(self, connection: ToyConnection, frame: Frame) -> None:
        ask = decode_message(frame.body, PollRequest).ask
        assert isinstance(ask, PollSpans)
        self.spans.append(ask.writer)
        if self.silent:
            return
        if self.errors:
            connection.refuse(frame, self.errors.pop(0))
        else:
            part = PartitionEntries(partition=ask.partitions[0], begin=1, end=7)
            connection.answer(frame, PollAnswer(partitions=[part]))


async def asked(broker: ToyBroker, owner: Owner, answer_s: float = 5.0) -> tuple[OwnerRequests, ClusterMetadata]:
    broker.script = owner
    pool = pool_of(broker)
    metadata = ClusterMetadata(stepped_runtime(), pool)
    await metadata.refresh("clicks")
    return OwnerRequests(stepped_runtime(), pool, metadata, answer_s), metadata


def begin(partition: int = 0) -> BeginProducer:
    return BeginProducer(topic="clicks", topic_id=TOPIC.id, partition=partition, producer="07")


async def answer_of(work: asyncio.Task[AdminAnswer]) -> AdminAnswer:
    """Let time pass until there is an answer."""
    while not work.done():
        await turns()
        step(1.0)
    return await work


def test_an_owner_that_is_not_ready_is_asked_again_after_the_time_it_names() -> None:
    async def test(broker: ToyBroker) -> None:
        owner = Owner()
        owners, _ = await asked(broker, owner)
        owner.errors = [NotReadyError("opening", retry_after_ms=20_000)]
        work = asyncio.create_task(owners.ask(TOPIC, 0, begin()))
        await broker.until(lambda: len(owner.begun) == 1)
        await turns()
        step(19)
        await turns()
        assert len(owner.begun) == 1
        step(2)
        answer = await work
        assert answer.instance is not None
        assert (answer.instance.epoch, len(owner.begun)) == (3, 2)
        assert owner.metadata == 2, "who owns it is asked for again"
        owner.errors = [ProducerFencedError("newer")]
        with pytest.raises(ProducerFencedError):
            await owners.ask(TOPIC, 0, begin())

    run(test)


def test_tries_are_counted_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []

    def noted(chance: random.Random, tries: int, *, base_s: float, most_s: float) -> float:
        counted.append(tries)
        return 0.5

    monkeypatch.setattr(owner_requests, "backoff_s", noted)

    async def test(broker: ToyBroker) -> None:
        owner = Owner()
        owners, _ = await asked(broker, owner)
        for _ in range(2):
            owner.errors = [NotReadyError("opening") for _ in range(3)]
            await answer_of(asyncio.create_task(owners.ask(TOPIC, 0, begin())))
        assert counted == [1, 2, 3] * 2

    run(test)


def test_a_partition_that_moved_is_asked_for_where_it_is() -> None:
    async def test(broker: ToyBroker) -> None:
        async with ToyBroker() as other:
            here, there = Owner(), Owner()
            other.script = there
            owners, _ = await asked(broker, here)
            moved = MovedError("moved")
            moved.address = other.address
            here.errors = [moved]
            await answer_of(asyncio.create_task(owners.ask(TOPIC, 0, begin())))
            assert (here.begun, there.begun) == ([0], [0])
            assert here.metadata == 1, "the refusal names the owner: nobody else is asked"
            there.errors = [MovedError("moved, and nobody knows where")]
            await answer_of(asyncio.create_task(owners.ask(TOPIC, 0, begin())))
            assert here.metadata + there.metadata >= 2

    run(test)


def test_a_client_that_two_brokers_send_to_each_other_asks_who_the_owner_is() -> None:
    """Both may be cut off from the coordinator, and a third one owns the partition by now."""

    async def test(broker: ToyBroker) -> None:
        async with ToyBroker() as other:
            here, there = Owner(), Owner()
            other.script = there
            owners, _ = await asked(broker, here)
            for owner, address in ((here, other.address), (there, broker.address)):
                for _ in range(2):
                    moved = MovedError("moved")
                    moved.address = address
                    owner.errors.append(moved)
            await answer_of(asyncio.create_task(owners.ask(TOPIC, 0, begin())))
            assert here.metadata + there.metadata == 2, "the fourth answer is doubted"

    run(test)


def test_the_time_that_an_owner_names_comes_on_top_of_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner_requests, "backoff_s", lambda *_, **__: 500.0)

    async def test(broker: ToyBroker) -> None:
        owner = Owner()
        owners, _ = await asked(broker, owner)
        owner.errors = [NotReadyError("opening", retry_after_ms=300_000)]
        work = asyncio.create_task(owners.ask(TOPIC, 0, begin()))
        await broker.until(lambda: owner.metadata == 2)
        await turns()
        step(600)
        await turns()
        assert len(owner.begun) == 1
        step(250)
        assert (await work).instance is not None
        assert len(owner.begun) == 2

    run(test)


def test_a_partition_without_an_owner_is_asked_for_until_it_has_one() -> None:
    async def test(broker: ToyBroker) -> None:
        owner = Owner()
        broker.owners["clicks", 0] = ""
        owners, _ = await asked(broker, owner)
        work = asyncio.create_task(owners.ask(TOPIC, 0, begin()))
        for _ in range(5):
            await turns()
            step(1)
        assert owner.begun == []
        assert owner.metadata >= 3
        broker.owners.clear()
        assert (await answer_of(work)).instance is not None

    run(test)


def test_an_owner_that_does_not_answer_is_asked_again() -> None:
    async def test(broker: ToyBroker) -> None:
        owner = Owner()
        owner.silent = 2
        owners, _ = await asked(broker, owner, answer_s=5.0)
        work = asyncio.create_task(owners.ask(TOPIC, 0, begin()))
        await broker.until(lambda: len(owner.begun) == 1)
        await turns()
        step(5.0)
        await broker.until(lambda: owner.metadata == 2)
        assert (await answer_of(work)).instance is not None
        assert len(owner.begun) == 3
        assert owner.metadata == 3

    run(test)


# ---- spans as owners have them -------------------------------------------------------------------


def test_each_owner_that_writes_to_a_log_shows_its_span_also_after_a_move_and_a_refusal() -> None:
    async def test(broker: ToyBroker) -> None:
        async with ToyBroker() as other:
            here, there = Owner(), Owner()
            other.script = there
            owners, _ = await asked(broker, here)
            moved = MovedError("moved")
            moved.address = other.address
            here.errors, there.errors = [moved], [QueueError("no leader")]
            work = asyncio.create_task(owners.spans(LOG, [0, 0]))
            while not work.done():
                await turns()
                step(1.0)
            assert await work == [Span(1, 7)]
            assert here.spans[0] == there.spans[0] == 0
            assert len(here.spans) + len(there.spans) == 3

    run(test)


@pytest.mark.parametrize(
    "error", [None, NotReadyError("its log is lost", retry_after_ms=9)], ids=["silent", "not ready"]
)
def test_an_owner_that_does_not_answer_in_time_is_named_and_no_span_goes_without_it(error: MemqError | None) -> None:
    """The others' spans were taken for all: a bounded read left its records out without a word."""

    async def test(broker: ToyBroker) -> None:
        owner = Owner()
        owner.silent = 1 if error is None else 0
        owner.errors = [] if error is None else [error] * 1_000
        owners, _ = await asked(broker, owner, answer_s=30.0)
        said = "" if error is None else ": its log is lost"
        text = f"the owner of partition 0 of topic 'clicks' did not prove its end within 30 s{said}"
        work = asyncio.create_task(owners.spans(LOG, [0]))
        while not work.done():
            await turns()
            step(2.0)
        with pytest.raises(TimedOutError) as caught:
            await work
        assert str(caught.value) == text, "with its last answer"
        assert owner.spans[0] == 0

    run(test)


# ---- instances of a named producer ---------------------------------------------------------------


def test_an_instance_begins_in_each_partition_a_few_at_a_time() -> None:
    wide = toy_topic(partitions=3 * BEGINNINGS_AT_ONCE_MAX)

    async def test(broker: ToyBroker) -> None:
        owner = Owner()
        owners, _ = await asked(broker, owner)
        naming = InstanceFencing(owners, 7)
        settings = ProducerSettings(name="job", delivery_timeout_s=30.0)
        assert await naming.begin(wide, [], settings) == []
        assert await naming.begin(wide, [5, 2], settings) == [(3, 15), (3, 12)]
        every = list(range(len(wide.partitions)))
        owner.begun.clear()
        owner.silent = BEGINNINGS_AT_ONCE_MAX
        work = asyncio.create_task(naming.begin(wide, every, settings))
        await broker.until(lambda: len(owner.begun) == BEGINNINGS_AT_ONCE_MAX)
        await turns()
        assert len(owner.begun) == BEGINNINGS_AT_ONCE_MAX
        step(30)
        with pytest.raises(TimedOutError, match="producer 'job' did not begin in topic 'clicks' in 30 s"):
            await work
        owner.mute = True
        with pytest.raises(ProtocolError, match="no start of the named producer"):
            await naming.begin(wide, [0], settings)
        owner.errors = [ProducerFencedError("newer")]
        with pytest.raises(ProducerFencedError):
            await naming.begin(wide, [0], settings)

    run(test, ToyBroker(wide))
