"""Commits of a consumer: each position once, one request at a time, and again after no answer."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import cast

import pytest

from memq.client.consumer.fetch.fetch_scheduler import FetchScheduler
from memq.client.consumer.fetch.ready_batches import ReadyBatches
from memq.client.consumer.group.session import Committer, GroupSession, TakenPositions
from memq.client.consumer.progress import CommitLedger
from memq.errors import QueueError
from memq.runtime.logs import EventLog
from memq.runtime.runtime import Runtime
from memq.topic import Committed, Position, ReadPartition
from tests.contract.manual_clock import ManualClock
from tests.skipping_loop import LongestWait, run_skipping, skip

HERE = ReadPartition("clicks", "0" * 32, 0)
THERE = ReadPartition("clicks", "0" * 32, 1)


@dataclass
class Observer:
    """Notes the steps of a commit as the audit sees them."""

    steps: list[str | Position] = field(default_factory=list)

    def begin_storing(self) -> None:
        self.steps.append("begin")

    def store(self, committed: Committed, now_ms: int) -> None:
        self.steps.append(committed.position)

    def end_storing(self) -> None:
        self.steps.append("end")


@dataclass
class Read:
    """A partition that is read, as the committer sees it."""

    ledger: CommitLedger = field(default_factory=CommitLedger)
    observer: Observer | None = None


class Parts:
    """Reading, group and handouts in one: commits wait for `gate`, and fail while `fails`."""

    def __init__(self) -> None:
        self.assigned = {HERE: Read(), THERE: Read()}
        self.stored: dict[ReadPartition, Committed] = {}
        self.requests: list[dict[ReadPartition, Committed]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.called = asyncio.Event()
        self.fails = False

    member = "m"

    def inside_generation(self) -> int:
        return 4

    def settle(self) -> None:
        """Nothing was handed out that is not done."""

    async def commit(self, positions: dict[ReadPartition, Committed]) -> None:
        self.requests.append(positions)
        self.called.set()
        await self.gate.wait()
        if self.fails:
            raise QueueError("not now")

    def done(self, partition: ReadPartition, offset: int) -> Committed:
        behind = Committed(Position(partition.partition, offset))
        self.assigned[partition].ledger.passed(behind)
        return behind

    def committer(self, chance: random.Random | None = None) -> Committer:
        clock = ManualClock()
        return Committer(
            cast(FetchScheduler, self),
            cast(GroupSession, self),
            cast(ReadyBatches, self),
            Runtime(clock, chance or random.Random(1)),
            EventLog(clock),
        )


def test_all_partitions_go_with_one_request_and_nothing_that_is_stored_goes_again() -> None:
    async def work() -> None:
        parts = Parts()
        committer = parts.committer()
        await committer.commit()
        here, there = parts.done(HERE, 5), parts.done(THERE, 7)
        await committer.commit()
        await committer.commit()
        later = parts.done(THERE, 9)
        await committer.commit([HERE])
        await committer.commit([THERE])
        assert parts.requests == [{HERE: here, THERE: there}, {THERE: later}]
        assert parts.stored == {HERE: here, THERE: later}
        assert committer.commits == 2

    asyncio.run(work())


def test_positions_of_a_failed_commit_are_stored_by_the_next() -> None:
    async def work() -> None:
        parts = Parts()
        committer, here = parts.committer(), parts.done(HERE, 5)
        parts.fails = True
        with pytest.raises(QueueError):
            await committer.commit()
        assert (parts.stored, committer.commits) == ({}, 0)
        await committer.commit_quietly()
        parts.fails = False
        await committer.commit()
        assert parts.requests == [{HERE: here}] * 3
        assert parts.stored == {HERE: here}

    asyncio.run(work())


def test_the_audit_learns_of_each_stored_position_and_of_the_end_of_each_try() -> None:
    """What is read meanwhile is counted behind the position: a try without an end would never count it."""

    async def work() -> None:
        parts = Parts()
        committer, here, observer = parts.committer(), parts.done(HERE, 5), Observer()
        parts.done(THERE, 3)
        parts.assigned[HERE].observer = observer
        parts.fails = True
        with pytest.raises(QueueError):
            await committer.commit()
        assert observer.steps == ["begin", "end"]
        parts.fails = False
        await committer.commit()
        assert observer.steps[2:] == ["begin", here.position, "end"]
        await committer.commit()
        assert len(observer.steps) == 5

    asyncio.run(work())


def test_commits_go_one_after_another() -> None:
    """Of two at once the older one could be stored last, and the group would stand before what is done."""

    async def work() -> None:
        parts = Parts()
        committer, first = parts.committer(), parts.done(HERE, 5)
        parts.gate.clear()
        one = asyncio.create_task(committer.commit())
        await parts.called.wait()
        second = parts.done(HERE, 6)
        two = asyncio.create_task(committer.commit())
        for _ in range(5):
            await asyncio.sleep(0)
        assert parts.requests == [{HERE: first}]
        parts.gate.set()
        await asyncio.gather(one, two)
        assert parts.requests == [{HERE: first}, {HERE: second}]
        assert parts.stored == {HERE: second}

    asyncio.run(work())


def test_a_commit_that_the_user_waits_for_is_tried_again_after_waits_that_double_up_to_a_second(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work() -> None:
        parts = Parts()
        committer, here = parts.committer(LongestWait()), parts.done(HERE, 5)
        parts.fails = True
        waiting = asyncio.create_task(committer.commit_surely())
        tries = []
        for _ in range(300):
            await skip(0.01)
            tries.append(len(parts.requests))
        assert [tries.index(count) for count in range(1, 7)] == pytest.approx([0, 10, 30, 70, 150, 250], abs=1)
        parts.fails = False
        await waiting
        assert parts.stored == {HERE: here}

    run_skipping(work())
    assert "QueueError: not now; trying again" in caplog.text


def test_positions_that_a_transaction_has_moved_are_known_and_none_goes_back() -> None:
    """The end of a transaction without an answer is learned late: other positions may be stored by then."""
    parts = Parts()
    committer, observer = parts.committer(), Observer()
    parts.assigned[HERE].observer = observer
    elsewhere = ReadPartition("clicks", "0" * 32, 2)
    moved = {each: Committed(Position(each.partition, 5)) for each in (HERE, THERE, elsewhere)}
    later = Committed(Position(THERE.partition, 8))
    committer.note_stored({THERE: later})
    committer.note_stored(moved)
    assert [parts.assigned[each].ledger.known for each in (HERE, THERE)] == [moved[HERE], later]
    assert parts.stored == {HERE: moved[HERE], THERE: later, elsewhere: moved[elsewhere]}
    assert (observer.steps, committer.commits) == ([Position(0, 5)], 2)


def test_a_transaction_takes_the_positions_that_are_due_with_those_that_are_stored() -> None:
    parts = Parts()
    committer = parts.committer()
    assert committer.take() == TakenPositions("m", 4, {}, {})
    here, there = parts.done(HERE, 5), parts.done(THERE, 7)
    assert committer.take() == TakenPositions("m", 4, {}, {HERE: here, THERE: there})
    committer.note_stored({HERE: here, THERE: there})
    later = parts.done(THERE, 9)
    assert committer.take() == TakenPositions("m", 4, {THERE: there}, {THERE: later})
    assert parts.requests == []
