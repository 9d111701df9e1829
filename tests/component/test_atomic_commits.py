"""Atomic commits of staged batches: all partitions show a batch by one decision, once, over kills of drivers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from memq.broker.broker import Broker
from memq.client.admin import AsyncAdmin
from memq.client.bulk.staged_writer import StagedCommits, StagedWriter
from memq.client.transactions.core import TransactionalCore
from memq.client.transactions.open_transaction import OpenTransaction
from memq.errors import InvalidRequestError, TopicSealedError
from memq.format.key import is_staged_object
from memq.format.pointer import Pointer
from memq.format.staged_manifest import StagedObject
from memq.notification.memory import MemoryQueue
from memq.runtime.clock import SystemClock
from memq.topic import Topic
from tests.brokers import run, running_broker
from tests.component.test_broker_restore import BATCHES, fill, restore
from tests.component.test_transactions import cluster_of, stored
from tests.partition_owners import pointers

WRITER = "nightly"
PARTITIONS = 3


class Job:
    """A job of a writer in a cluster: its topic has three partitions."""

    def __init__(self, brokers: list[Broker], topic: Topic) -> None:
        self.brokers = brokers
        self.topic = topic
        self.store = brokers[0].services.store

    async def staged(self, tasks: int, name: str) -> list[StagedObject]:
        """Stage a record for each partition in each of some tasks."""
        found: list[StagedObject] = []
        for task in range(tasks):
            writer = StagedWriter("memq", {"out": self.topic}, self.store, WRITER)
            for partition in range(PARTITIONS):
                await writer.add("out", f"{name}-{task}-{partition}", partition=partition)
            found += await writer.finish()
        return found

    async def commit(self, batch_id: int, objects: list[StagedObject], *, atomic: bool = True) -> None:
        """Commit as a new driver."""
        async with StagedCommits([each.address for each in self.brokers], WRITER) as commits:
            await commits.topics(["out"])
            await commits.commit(batch_id, objects, self.store, atomic=atomic)

    async def data(self) -> list[Pointer]:
        found = [await pointers(self.brokers[0], self.topic, number) for number in range(PARTITIONS)]
        return [each for log in found for each in log if each.kind == "data"]


def of(name: str, tasks: int = 2) -> list[str]:
    return sorted(f"{name}-{task}-{partition}" for task in range(tasks) for partition in range(PARTITIONS))


class KilledError(BaseException):
    """The driver dies."""


@asynccontextmanager
async def job_in(count: int) -> AsyncIterator[Job]:
    async with cluster_of(count) as (_, brokers):
        yield Job(brokers, await brokers[0].partitions.current_topic("out"))


def on_job(work: Callable[[Job], Awaitable[None]], count: int = 1) -> None:
    async def begin() -> None:
        async with job_in(count) as job:
            await work(job)

    run(begin())


def test_a_job_commits_all_partitions_once_however_often_it_repeats_the_commit() -> None:
    async def work(job: Job) -> None:
        objects = await job.staged(2, "a")
        await job.commit(7, objects)
        assert await stored(job.brokers, "out") == of("a")
        pointers_before = len(await job.data())
        assert pointers_before == 2 * PARTITIONS, "each piece is published where it lies"
        assert all(is_staged_object(each.locations[0].key) for each in await job.data())
        for repeated in (objects, []):
            await job.commit(7, repeated)
        await job.commit(8, await job.staged(1, "b"))
        assert await stored(job.brokers, "out") == sorted(of("a") + of("b", 1))
        assert len(await job.data()) == pointers_before + PARTITIONS
        with pytest.raises(InvalidRequestError, match="committed before with other rows"):
            await job.commit(7, await job.staged(1, "c"))
        assert await stored(job.brokers, "out") == sorted(of("a") + of("b", 1))

    on_job(work, 3)


@pytest.mark.parametrize("decided", [False, True])
def test_a_driver_that_dies_around_the_decision_leaves_all_partitions_or_none(
    monkeypatch: pytest.MonkeyPatch, *, decided: bool
) -> None:
    async def work(job: Job) -> None:
        objects, commit = await job.staged(2, "a"), TransactionalCore.commit

        async def dies(core: TransactionalCore, transaction: OpenTransaction) -> None:
            transaction.visible = False
            if decided:
                await commit(core, transaction)
            raise KilledError

        async def no_abort(core: TransactionalCore, transaction: OpenTransaction, *, after: object = None) -> None:
            """A dead driver rolls nothing back."""

        with monkeypatch.context() as patched:
            patched.setattr(TransactionalCore, "commit", dies)
            patched.setattr(TransactionalCore, "abort", no_abort)
            with pytest.raises(KilledError):
                await job.commit(7, objects)
        if decided:
            async with asyncio.timeout(20):
                while await stored(job.brokers, "out") != of("a"):
                    pass
        else:
            assert await stored(job.brokers, "out") == []
            async with AsyncAdmin(job.brokers[0].address) as admin:
                (left,) = await admin.transactions()
                assert (left.transactional_id, left.blocks) == (f"staged.{WRITER}", {"out": PARTITIONS})
        await job.commit(7, objects)  # as the next driver
        assert await stored(job.brokers, "out") == of("a")
        assert len(await job.data()) == 2 * PARTITIONS

    on_job(work)


def test_two_drivers_that_commit_the_same_batch_publish_it_once() -> None:
    async def work(job: Job) -> None:
        objects = await job.staged(3, "a")
        await asyncio.gather(*(job.commit(7, objects) for _ in range(3)), return_exceptions=True)  # some are fenced
        await job.commit(7, objects)
        assert await stored(job.brokers, "out") == of("a", 3)
        records = [each.records for each in await job.data() if not each.skip]
        assert sum(records) == 3 * PARTITIONS

    on_job(work, 3)


def test_the_first_commit_decides_whether_a_batch_is_atomic() -> None:
    async def work(job: Job) -> None:
        await job.commit(1, await job.staged(1, "a"), atomic=False)
        await job.commit(1, [], atomic=True)
        await job.commit(2, await job.staged(1, "b"), atomic=True)
        await job.commit(2, [], atomic=False)
        assert await stored(job.brokers, "out") == sorted(of("a", 1) + of("b", 1))
        marks = [entry.key async for entry in job.store.list("memq/staged/") if "/decided/" in entry.key]
        assert [key.rsplit("/", 1)[1] for key in marks] == [f"{2:019d}"]

    on_job(work)


def test_a_refusal_by_one_topic_leaves_no_part_visible() -> None:
    async def work(job: Job) -> None:
        objects = await job.staged(1, "a")
        async with AsyncAdmin(job.brokers[0].address) as admin:
            await admin.seal_topic("out")
            with pytest.raises(TopicSealedError):
                await job.commit(7, objects)
            await admin.unseal_topic("out")
        assert await stored(job.brokers, "out") == []
        await job.commit(7, objects)
        assert await stored(job.brokers, "out") == of("a", 1)

    on_job(work)


def test_an_atomic_commit_needs_a_writer_with_a_name() -> None:
    async def work(job: Job) -> None:
        objects = await job.staged(1, "a")
        async with StagedCommits(job.brokers[0].address, WRITER) as commits:
            await commits.topics(["out"])
            with pytest.raises(InvalidRequestError, match="a writer with a name"):
                await commits.commit(7, objects, job.store, atomic=True, remember=False)

    on_job(work)


def test_a_restore_takes_the_pieces_of_committed_batches_alone() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            topic = await fill(broker)
            store, queue = broker.services.store, MemoryQueue(SystemClock())
            async with StagedCommits(broker.address, WRITER) as commits:
                await commits.topics([topic.name])
                writer = StagedWriter(commits.cluster, {topic.name: topic}, store, WRITER)
                await writer.add(topic.name, b"once")
                objects = await writer.finish()
                await commits.decide(7, objects, store, atomic=True)
                assert (await restore(broker, MemoryQueue(SystemClock()), topic)).pointers == BATCHES
                await commits.commit(7, objects, store)
            assert (await restore(broker, queue, topic)).pointers == BATCHES + 1

    run(work())
