"""Where a group's member begins to read a partition that comes, goes and comes again while answers are on their way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from msgspec import Struct

from memq.client.assigned import Assigned
from memq.client.consumer_settings import ConsumerSettings
from memq.client.fetcher import Fetcher
from memq.client.flow import PartitionFlow
from memq.client.membership import MemberState
from memq.client.opener import Opener
from memq.client.reading import Reading
from memq.clock import SystemClock
from memq.errors import DeniedError, InvalidRequestError, MemqError, NotFoundError, PositionExpiredError, QueueError
from memq.format.block import Buffer
from memq.logs import EventLog
from memq.notification import Entries, Membership, Span
from memq.notification.remote import Answer, Polled, RemoteQueue
from memq.protocol.frames import Api
from memq.storage_handlers.confirmed_reads import ConfirmedReads
from memq.tasks import TaskOwner
from memq.topic import Committed, Position, ReadPartition, Topic, TopicSettings, Totals, equal_slots
from tests.skipping_loop import run_skipping, skip, skipping_runtime

TOPIC = Topic(name="t", id="0" * 31 + "1", created_ms=1, settings=TopicSettings(), partitions=equal_slots(2))
SLOW, MOVED = (ReadPartition("t", TOPIC.id, number) for number in range(2))


class NoBroker:
    """An `Ask` that nobody may use."""

    async def __call__(self, api: Api, message: Struct, answer: type[Answer], *, timeout_s: float) -> Answer:
        raise AssertionError(f"a broker is asked for {api.name}")


class Answers(RemoteQueue):
    """What brokers answer: `stored` of the group, and spans; those of `waiting` come when `slow` is set."""

    def __init__(self) -> None:
        super().__init__(NoBroker())
        self.stored: dict[ReadPartition, Committed] = {}
        self.outdated: list[dict[ReadPartition, Committed] | Exception] = []  # answered first, one at a time
        self.slow = asyncio.Event()
        self.waiting = [SLOW]
        self.asked = 0

    async def committed(self, group: str, partitions: Sequence[ReadPartition]) -> dict[ReadPartition, Committed]:
        self.asked += 1
        answer = self.outdated.pop(0) if self.outdated else self.stored
        if isinstance(answer, Exception):
            raise answer
        return {part: answer[part] for part in partitions if part in answer}

    async def span(self, partition: ReadPartition) -> Span:
        if partition in self.waiting:
            await self.slow.wait()
        return Span(0, 1_000)

    async def read(self, partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
        return Entries((), 1_000)

    async def seek_time(self, partition: ReadPartition, time_ms: int) -> int:
        return 1_000

    async def poll(self, offsets: dict[ReadPartition, int], wait_ms: int = 0, bytes_max: int = 0) -> list[Polled]:
        await skip(wait_ms / 1000)
        return []


async def no_read(store: str, key: str, offset: int, length: int) -> Buffer:
    raise AssertionError("no pointer came, so nothing is fetched")


class Member:
    """A member of a group with its opener, which runs in the background."""

    def __init__(self, **settings: Any) -> None:
        runtime = skipping_runtime()
        self.answers, self.state = Answers(), MemberState()
        events = EventLog(runtime.clock)
        self.tasks = TaskOwner(lambda error: None, events)
        fetcher = Fetcher("broker", no_read, lambda store: None, ConfirmedReads(EventLog(SystemClock())))
        self.reading = Reading(runtime, self.answers, fetcher, self.tasks, 1 << 20, lambda: None)
        self.changes = 0
        asked_for = ConsumerSettings(topics=("t",), group="g", **settings)
        wanted: Callable[[], dict[ReadPartition, int]] = lambda: dict(self.state.granted)  # noqa: E731 - one line
        self.opener = Opener(
            asked_for,
            self.answers,
            self.reading,
            {"t": TOPIC},
            wanted,
            self._changed,
            reporter=None,
            tasks=self.tasks,
            events=events,
        )
        self.tasks.start(self.opener.run(), "opener")

    def _changed(self) -> None:
        self.changes += 1

    def heard(self, *memberships: Membership) -> None:
        """Take answers of the group, which come one after the other without a pause."""
        for membership in memberships:
            self.state.answered(membership, self.state.released)
            self.reading.keep(self.state.granted)
            self.opener.kick()

    def store(self, pointer_offset: int) -> None:
        self.answers.stored[MOVED] = committed_at(pointer_offset)

    @property
    def position(self) -> Position:
        return self.reading.assigned[MOVED].flow.position


def committed_at(pointer_offset: int) -> Committed:
    return Committed(Position(1, pointer_offset), Totals())


AWAY_AND_BACK = (Membership(2, (SLOW,), (MOVED,)), Membership(3, (SLOW,)), Membership(4, (SLOW, MOVED)))


def test_a_position_that_was_asked_for_before_the_partition_went_is_not_used() -> None:
    async def work() -> None:
        member = Member(end="end")
        member.answers.waiting = [SLOW, MOVED]
        opened, add = list[Position](), member.reading.add

        def noted(flow: PartitionFlow, topic: Topic, grant: int = 0) -> Assigned:
            opened.append(flow.position)
            return add(flow, topic, grant)

        member.reading.add = noted  # type: ignore[method-assign]  # what is read, if only for a moment
        member.store(100)
        member.heard(Membership(1, (SLOW, MOVED)))
        await skip(1)
        assert (member.answers.asked, list(member.reading.assigned)) == (1, []), "they wait for their ends"
        member.heard(*AWAY_AND_BACK)
        member.store(200)  # another member had it meanwhile
        member.answers.slow.set()
        await skip(1)
        assert member.position == Position(1, 200)
        assert Position(1, 100) not in opened
        await member.tasks.stop()

    run_skipping(work())


def test_a_partition_that_can_not_be_opened_delays_no_other() -> None:
    async def work() -> None:
        member = Member(start="end")
        member.heard(Membership(1, (SLOW, MOVED)))
        await skip(1)
        assert list(member.reading.assigned) == [MOVED]
        member.heard(Membership(2, (SLOW,), (MOVED,)), Membership(3, (SLOW,)))
        await skip(1)
        assert list(member.reading.assigned) == []
        member.answers.slow.set()
        await skip(1)
        assert list(member.reading.assigned) == [SLOW]
        assert member.answers.asked == 1, "what is being opened is not asked for again"
        await member.tasks.stop()

    run_skipping(work())


def test_a_log_that_refuses_is_asked_again_while_others_are_opened() -> None:
    async def work() -> None:
        member = Member(start="end")
        member.answers.slow.set()
        refusals: list[MemqError] = [DeniedError("not you"), QueueError("away")]
        span = member.answers.span

        async def refused(partition: ReadPartition) -> Span:
            if partition == SLOW and refusals:
                raise refusals.pop(0)
            return await span(partition)

        member.answers.span = refused  # type: ignore[method-assign]  # for the first answers
        member.heard(Membership(1, (SLOW, MOVED)))
        await skip(0.1)
        assert list(member.reading.assigned) == [MOVED]
        assert isinstance(member.opener.failure, DeniedError), "the user sees what does not pass by itself"
        await skip(1)
        assert list(member.reading.assigned) == [MOVED, SLOW]
        await member.tasks.stop()

    run_skipping(work())


@pytest.mark.parametrize("told", [True, False])
def test_what_is_read_of_a_partition_ends_when_it_goes_though_it_comes_back_at_once(told: bool) -> None:
    async def work() -> None:
        member = Member()
        member.answers.slow.set()
        member.store(100)
        member.heard(Membership(1, (SLOW, MOVED)))
        await skip(1)
        before = member.reading.assigned[MOVED]
        if told:
            member.state.told_assigned(MOVED)
            member.state.fenced()
            member.heard(Membership(4, (SLOW, MOVED)))
        else:
            member.heard(*AWAY_AND_BACK)
        member.store(200)
        assert before.removed, "what was prefetched of it could still be delivered"
        await skip(1)
        assert member.position == Position(1, 200)
        await member.tasks.stop()

    run_skipping(work())


@pytest.mark.parametrize("outdated", [{}, {MOVED: committed_at(40)}, NotFoundError("no such group")])
def test_an_answer_behind_what_this_member_has_stored_is_asked_for_again(
    outdated: dict[ReadPartition, Committed] | Exception,
) -> None:
    async def work() -> None:
        member = Member()
        member.answers.slow.set()
        member.store(100)
        member.heard(Membership(1, (SLOW, MOVED)))
        await skip(1)
        member.answers.outdated = [outdated] * 3
        member.heard(*AWAY_AND_BACK)
        await skip(5)
        assert (member.position, member.answers.asked) == (Position(1, 100), 5)
        await member.tasks.stop()

    run_skipping(work())


def test_a_position_that_stays_back_is_one_of_a_reset(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        member = Member()
        member.answers.slow.set()
        member.store(100)
        member.heard(Membership(1, (SLOW, MOVED)))
        await skip(1)
        member.store(40)
        member.heard(*AWAY_AND_BACK)
        await skip(8.9)
        assert MOVED not in member.reading.assigned
        await skip(0.2)
        assert member.position == Position(1, 40)
        assert member.answers.asked == 2 + 7
        before = member.answers.asked
        member.heard(Membership(5, (SLOW,), (MOVED,)), Membership(6, (SLOW,)), Membership(7, (SLOW, MOVED)))
        await skip(0.1)
        assert (member.position, member.answers.asked) == (Position(1, 40), before + 1), "the same is not behind"
        await member.tasks.stop()

    run_skipping(work())
    (line,) = [record.getMessage() for record in caplog.records if "consumer.position-back" in record.getMessage()]
    assert "group 'g' in topic 't': 1:100:0 was stored, now it is 1:40:0" in line


def test_a_seek_does_not_take_back_what_went_while_its_place_was_looked_for() -> None:
    async def work() -> None:
        member = Member()
        member.answers.slow.set()
        member.heard(Membership(1, (SLOW, MOVED)))
        await skip(1)
        member.answers.slow.clear()
        seek = asyncio.create_task(member.opener.seek(SLOW, "end"))
        await skip(1)
        member.heard(Membership(2, (MOVED,), (SLOW,)))
        member.state.fenced()
        member.reading.keep(member.state.granted)
        member.answers.slow.set()
        with pytest.raises(InvalidRequestError, match="was taken from this consumer meanwhile"):
            await seek
        assert SLOW not in member.reading.assigned
        await member.tasks.stop()

    run_skipping(work())


def test_an_error_is_no_answer() -> None:
    async def work() -> None:
        member = Member()
        member.answers.slow.set()
        member.store(100)
        member.answers.outdated = [QueueError("the queue is away")]
        member.heard(Membership(1, (SLOW, MOVED)))
        await skip(1)
        assert member.position == Position(1, 100)
        await member.tasks.stop()

    run_skipping(work())


@pytest.mark.parametrize("passes", [True, False])
def test_what_stands_in_the_way_is_tried_again_five_times_a_second(*, passes: bool) -> None:
    async def work() -> None:
        member = Member()
        member.answers.slow.set()
        error = QueueError("away") if passes else DeniedError("not you")
        member.answers.outdated = [error] * 9
        member.heard(Membership(1, (SLOW, MOVED)))
        before = member.changes
        await skip(1.0)
        assert 4 <= member.answers.asked <= 6
        assert member.changes > before, "waiters are notified"
        assert member.opener.failure is (None if passes else error)
        await skip(2.0)
        assert list(member.reading.assigned) == [SLOW, MOVED]
        await member.tasks.stop()

    run_skipping(work())


def test_a_partition_that_is_paused_stays_paused_over_a_seek() -> None:
    async def work() -> None:
        member = Member()
        member.answers.slow.set()
        member.heard(Membership(1, (SLOW, MOVED)))
        await skip(1)
        assert member.position == Position(1, 0)
        for paused in (True, False):
            member.reading.pause(MOVED, paused=paused)
            await member.opener.seek(MOVED, Position(1, 70, 3))
            assert member.position == Position(1, 70, 3)
            assert member.reading.assigned[MOVED].flow.paused is paused
        await member.tasks.stop()

    run_skipping(work())


def test_the_end_is_that_of_the_first_opening_and_policies_are_passed_on() -> None:
    async def work() -> None:
        member = Member(end="end", start="end", on_damaged="skip", on_expired="skip")
        member.answers.slow.set()
        member.heard(Membership(1, (SLOW, MOVED)))
        await skip(1)
        flow = member.reading.assigned[MOVED].flow
        assert (flow.position, flow.end) == (Position(1, 1_000), Position(1, 1_000))
        assert member.reading.ended
        member.heard(*AWAY_AND_BACK)
        await skip(1)
        assert member.reading.assigned[MOVED].flow.end == Position(1, 1_000)
        assert member.reading.assigned[MOVED].grant != 0
        await member.tasks.stop()

    run_skipping(work())


def test_a_stored_position_is_known_to_be_stored() -> None:
    async def work() -> None:
        member = Member()
        member.answers.slow.set()
        member.store(100)
        member.heard(Membership(1, (SLOW, MOVED)))
        await skip(1)
        assigned = member.reading.assigned
        assert assigned[MOVED].ledger.is_stored(Position(1, 100))
        assert not assigned[MOVED].ledger.is_stored(Position(1, 101))
        assert not assigned[SLOW].ledger.is_stored(Position(0, 1))
        assert list(member.reading.stored) == [MOVED]
        assert (assigned[SLOW].flow.position, member.position) == (Position(0, 0), Position(1, 100))
        await member.tasks.stop()

    run_skipping(work())


def test_waiters_are_notified_of_each_round_and_each_failure_before_the_next_begins() -> None:
    async def work() -> None:
        member = Member()
        member.answers.slow.set()
        await skip(0.1)
        assert member.changes == 1, "nothing is wanted, and that is known"
        member.answers.outdated = [DeniedError("not you")]
        member.heard(Membership(1, (SLOW, MOVED)))
        await skip(0.1)
        assert (member.changes, member.opener.failure is None) == (2, False)
        await skip(0.2)
        assert list(member.reading.assigned) == [SLOW, MOVED]
        assert member.changes == 5, "one for the round, and one for each partition"
        await member.tasks.stop()

    run_skipping(work())


@pytest.mark.parametrize("skips", [True, False])
def test_a_start_that_retention_took_is_an_error_unless_it_may_be_skipped(*, skips: bool) -> None:
    async def work() -> None:
        member = Member(on_expired="skip" if skips else "fail")
        member.answers.slow.set()
        member.heard(Membership(1, (SLOW, MOVED)))
        await skip(1)

        async def moved(partition: ReadPartition) -> Span:
            return Span(500, 1_000)

        member.answers.span = moved  # type: ignore[method-assign]  # retention comes
        if skips:
            await member.opener.seek(MOVED, Position(1, 70))
            assert member.position == Position(1, 70), "reading passes over what is missing"
        else:
            with pytest.raises(PositionExpiredError):
                await member.opener.seek(MOVED, Position(1, 70))
            assert member.position == Position(1, 0)
        await member.tasks.stop()

    run_skipping(work())
