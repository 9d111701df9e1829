"""Workers of queues: handlers, leases that are extended or lost, acks, nacks, and the drain."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections import Counter
from collections.abc import Awaitable, Iterator
from pathlib import Path

import pytest

import memq
from memq.client.queue import worker_processes
from memq.client.queue.items import QueueItem
from memq.client.queue.queue import AsyncQueue
from memq.client.queue.worker import AsyncWorker
from memq.errors import ClosedError, InvalidRequestError, NotReadyError, OutcomeUnknownError, TooLargeError
from memq.queues.decisions import ItemOutcome
from memq.testing import Cluster
from tests.brokers import run
from tests.brokers import until as later
from tests.shell import until

WAIT_S = 30.0


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


def test_a_worker_acks_what_its_handler_returns_for_and_gives_back_what_it_raises_for(cluster: Cluster) -> None:
    seen = list[tuple[str, int, bytes]]()

    def handler(item: memq.QueueItem) -> object:
        seen.append((item.payload.decode(), item.attempt, item.note))
        if item.payload == b"bad" and item.attempt == 1:
            raise ValueError("not today")
        if item.payload == b"later" and item.attempt == 1:
            return memq.Retry(after=0.01, reason="half done")
        return memq.DeadLetter("never") if item.payload == b"dead" else None

    with memq.Queue(cluster.address) as queue:
        queue.enqueue_many("jobs", [b"good", b"bad", b"later", b"dead"])
        queue.enqueue("once", b"at most once", at_most_once=True)
        with memq.Worker(
            handler, ["jobs", "once"], brokers=cluster.address, concurrency=2, retry_delays_s=[0.01]
        ) as worker:
            worker.start()
            until(lambda: worker.stats().done == 4)
            until(lambda: worker.stats().dead == 1)
        found = worker.stats()
        assert (found.done, found.retried, found.dead, found.lost, found.working) == (4, 2, 1, 0, 0)
        assert Counter(seen) == Counter(
            [
                ("good", 1, b""),
                ("bad", 1, b""),
                ("bad", 2, b"ValueError: not today"),
                ("later", 1, b""),
                ("later", 2, b"half done"),
                ("dead", 1, b""),
                ("at most once", 1, b""),
            ]
        )
        counts = queue.queues()
        assert list(counts) == ["jobs"]
        assert (counts["jobs"].ready, counts["jobs"].leased, counts["jobs"].dead) == (0, 0, 1)


@pytest.mark.parametrize("ended", [SystemExit(3), KeyboardInterrupt()], ids=["SystemExit", "KeyboardInterrupt"])
def test_a_handler_that_ends_its_thread_fails_and_the_worker_continues(cluster: Cluster, ended: BaseException) -> None:
    notes = list[bytes]()

    def handler(item: memq.QueueItem) -> object:
        notes.append(item.note)
        if item.attempt == 1:
            raise ended
        return None

    with memq.Queue(cluster.address) as queue:
        queue.enqueue("jobs", b"job")
        with memq.Worker(handler, "jobs", brokers=cluster.address, retry_delays_s=[0.01]) as worker:
            worker.start()
            until(lambda: worker.stats().done == 1)
    assert notes[0] == b""
    assert f"the function ended with {type(ended).__name__}".encode() in notes[1]


def test_leases_are_extended_while_handlers_run_and_items_wait(cluster: Cluster) -> None:
    async def work() -> None:
        begun, leave = asyncio.Event(), asyncio.Event()

        async def handler(item: QueueItem) -> None:
            begun.set()
            await leave.wait()

        async with AsyncQueue(cluster.address) as queue:
            await queue.enqueue_many("jobs", [b"1", b"2"], lease=1)
            async with AsyncWorker(handler, "jobs", brokers=cluster.address, prefetch=1) as worker:
                await worker.start()
                await begun.wait()
                assert await queue.dequeue("jobs", wait=2.5) == [], "no lease has ended"
                leave.set()
                await later(lambda: worker.stats().done == 2)
            assert (worker.stats().lost, worker.stats().retried) == (0, 0)
            assert await queue.queues() == {}

    run(work())


def test_an_item_whose_lease_is_lost_is_marked_and_not_acked(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(self: AsyncQueue, items: object, lease: float) -> list[ItemOutcome]:
        raise NotReadyError("no owner")

    async def work() -> None:
        begun, other = asyncio.Event(), asyncio.Event()
        marks = list[bool]()

        async def handler(item: QueueItem) -> None:
            begun.set()
            await other.wait()
            marks.append(item.lost)

        async with AsyncQueue(cluster.address) as queue:
            await queue.enqueue("jobs", b"1", lease=1)
            async with AsyncWorker(handler, "jobs", brokers=cluster.address, prefetch=0) as worker:
                await worker.start()
                await begun.wait()
                with monkeypatch.context() as patch:
                    patch.setattr(AsyncQueue, "extend_many", refused)
                    (item,) = await queue.dequeue("jobs", wait=5)
                    assert item.attempt == 2
                other.set()
            assert marks == [True]
            assert (worker.stats().done, worker.stats().lost) == (0, 1)
            await queue.ack(item)

    run(work())


def test_an_ack_is_repeated_until_the_broker_has_answered(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    real, left = AsyncQueue.ack_many, [2]

    async def unsure(self: AsyncQueue, items: list[QueueItem]) -> list[ItemOutcome]:
        outcomes = await real(self, items)
        if left[0]:
            left[0] -= 1
            raise OutcomeUnknownError("the answer is lost")
        return outcomes

    async def work() -> None:
        async def handler(item: QueueItem) -> None: ...

        async with AsyncQueue(cluster.address) as queue:
            await queue.enqueue("jobs", b"1")
            with monkeypatch.context() as patch:
                patch.setattr(AsyncQueue, "ack_many", unsure)
                async with AsyncWorker(handler, "jobs", brokers=cluster.address) as worker:
                    await worker.start()
                    await later(lambda: worker.stats().done == 1)
            assert (worker.stats().done, worker.stats().lost) == (1, 0)

    run(work())


def test_a_worker_that_stops_ends_what_runs_and_gives_back_what_it_has_not_begun(cluster: Cluster) -> None:
    begun, leave = threading.Event(), threading.Event()

    def handler(item: memq.QueueItem) -> None:
        begun.set()
        assert leave.wait(WAIT_S)

    with memq.Queue(cluster.address) as queue:
        queue.enqueue_many("jobs", [b"1", b"2", b"3"], attempts_max=1)
        worker = memq.Worker(handler, "jobs", brokers=cluster.address, prefetch=2)

        def operate() -> None:
            begun.wait(WAIT_S)
            os.kill(os.getpid(), signal.SIGTERM)
            until(lambda: worker.stats().returned == 2)
            leave.set()

        operator = threading.Thread(target=operate)
        operator.start()
        worker.run()
        operator.join()
        found = worker.stats()
        assert (found.done, found.returned, found.dead) == (1, 2, 0)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        again = queue.dequeue({"jobs": 5}, wait=5)
        assert [item.attempt for item in again] == [1, 1], "what was not begun is no attempt"
        with pytest.raises(ClosedError):
            worker.start()
        worker.close()


def test_handlers_that_take_longer_than_the_drain_end_without_an_ack(cluster: Cluster) -> None:
    async def work() -> None:
        begun = asyncio.Event()

        async def handler(item: QueueItem) -> None:
            begun.set()
            await asyncio.Event().wait()

        async with AsyncQueue(cluster.address) as queue:
            await queue.enqueue("jobs", b"1")
            async with AsyncWorker(handler, "jobs", brokers=cluster.address, drain_s=0.1) as worker:
                await worker.start()
                await begun.wait()
            assert worker.stats().retried == 1
            (item,) = await queue.dequeue("jobs", wait=5)
            assert (item.attempt, item.note) == (2, b"the worker was stopped")

    run(work())


def test_an_error_that_does_not_pass_stops_the_worker(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = AsyncQueue.dequeue, Counter[str]()

    async def refused(self: AsyncQueue, queues: object, **bounds: object) -> list[QueueItem]:
        calls["dequeue"] += 1
        if calls["dequeue"] == 2:
            raise NotReadyError("moves")
        if calls["dequeue"] == 3:
            raise TooLargeError("planted")
        return await real(self, "jobs")

    with monkeypatch.context() as patch:
        patch.setattr(AsyncQueue, "dequeue", refused)
        with memq.Worker(lambda item: None, "jobs", brokers=cluster.address) as worker:
            with pytest.raises(TooLargeError, match="planted"):
                worker.run()
            with pytest.raises(TooLargeError, match="planted"):
                worker.start()


def note_process(item: memq.QueueItem) -> None:
    """Write the process of each attempt; the process of a first attempt at `kill` is killed."""
    folder = Path(item.metadata[0][1].decode())  # type: ignore[union-attr]
    (folder / f"{item.payload.decode()}.{item.attempt}.{os.getpid()}").touch()
    if item.payload == b"kill" and item.attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def test_items_of_a_killed_process_come_again_and_the_process_is_replaced(cluster: Cluster, tmp_path: Path) -> None:
    with memq.Queue(cluster.address) as queue:
        payloads = [b"kill", *(f"{number}".encode() for number in range(40))]
        where = [{"folder": str(tmp_path).encode()}] * len(payloads)
        queue.enqueue_many("jobs", payloads, lease=2, metadata=where)
        with memq.Worker(note_process, "jobs", brokers=cluster.address, processes=2, concurrency=2) as worker:
            worker.start()
            until(lambda: queue.queues() == {})
            until(lambda: worker.stats().restarts == 1)
        names = [path.name.split(".") for path in tmp_path.iterdir()]
        assert {name for name, _, _ in names} == {payload.decode() for payload in payloads}
        assert ["kill", "2"] in [name[:2] for name in names]
        (killed,) = (pid for name, attempt, pid in names if (name, attempt) == ("kill", "1"))
        again = {name for name, attempt, _ in names if attempt != "1"}
        twice = [name for name, count in Counter(name for name, _, _ in names).items() if count > 1]
        assert {pid for name, attempt, pid in names if attempt == "1" and name in twice} == {killed}
        assert again >= set(twice)
        assert str(os.getpid()) not in {pid for _, _, pid in names}


def end_process(item: memq.QueueItem) -> None:
    os._exit(3)


def test_processes_that_always_end_stop_the_worker(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_processes, "SHORT_LIVES_MAX", 2)
    with memq.Queue(cluster.address) as queue:
        queue.enqueue_many("jobs", [b"1", b"2", b"3"])
        with (
            memq.Worker(end_process, "jobs", brokers=cluster.address, processes=1, prefetch=0) as worker,
            pytest.raises(InvalidRequestError, match="exit code 3"),
        ):
            worker.run()


def test_wrong_handlers_are_refused(cluster: Cluster) -> None:
    async def coroutine(item: memq.QueueItem) -> None: ...

    with pytest.raises(InvalidRequestError, match="coroutine function"):
        memq.Worker(coroutine, "jobs", brokers=cluster.address)
    with pytest.raises(InvalidRequestError, match="can't be sent to another process"):
        memq.Worker(lambda item: None, "jobs", brokers=cluster.address, processes=1)
    with pytest.raises(TypeError, match="handler must be a function"):
        memq.Worker(None, "jobs", brokers=cluster.address)  # type: ignore[arg-type]
    assert memq.aio.Worker is AsyncWorker


def test_a_nack_may_take_its_attempt_back_or_be_the_last_one(cluster: Cluster) -> None:
    async def leased(queue: AsyncQueue) -> QueueItem:
        (item,) = await queue.dequeue("jobs", wait=5)
        return item

    async def work() -> None:
        async with AsyncQueue(cluster.address) as queue:
            await queue.enqueue("jobs", b"1", attempts_max=1)
            for _ in range(3):
                item = await leased(queue)
                assert item.attempt == 1
                assert await queue.nack(item, kind="unused") is ItemOutcome.RETURNED
            item = await leased(queue)
            assert await queue.nack_many([item], kind=memq.NackKind.DEAD, metadata=b"why") == [ItemOutcome.DEAD]
            assert (await queue.queues())["jobs"].dead == 1
            assert await queue.extend_many([item], 60) == [ItemOutcome.DEAD]
            wrong: Awaitable[object] = queue.nack(item, kind="maybe")
            with pytest.raises(InvalidRequestError, match="kind = 'maybe' is not one of"):
                await wrong

    run(work())
