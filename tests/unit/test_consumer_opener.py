"""Where a group's member begins to read a partition that is assigned, revoked and assigned again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol

import pytest

from memq.client.consumer.assigned import Assigned
from memq.client.consumer.fetch.fetch_scheduler import FetchScheduler
from memq.client.consumer.fetch.fetcher import BatchFetcher
from memq.client.consumer.fetch.partition_cursor import PartitionCursor
from memq.client.consumer.group.membership import MemberState
from memq.client.consumer.offset_resolver import OffsetResolver
from memq.client.consumer.opener import Opener
from memq.client.consumer.settings import ConsumerSettings
from memq.client.observers.audit_recorder import AuditRecorder, PartRecorder, ReadRecorder
from memq.client.observers.reporter import Named
from memq.errors import DeniedError, InvalidRequestError, MemqError, NotFoundError, PositionExpiredError, QueueError
from memq.format.blocks.header import Buffer
from memq.groups import Membership
from memq.groups.remote import RemoteGroups
from memq.notification import Entries, Span
from memq.notification.remote import Polled, RemoteQueue
from memq.runtime.clock import SystemClock
from memq.runtime.logs import EventLog
from memq.runtime.tasks import TaskOwner
from memq.storage_handlers.confirmed_reads import ConfirmedReads
from memq.topic import Committed, Position, ReadPartition, Topic, TopicSettings, Totals, equal_slots
from tests.brokers import log_lines
from tests.skipping_loop import run_skipping, skip, skipping_runtime
from tests.unit.consumer_world import NoBroker
from tests.unit.cursor_reads import read
from tests.unit.queue_model import Block, Log

TOPIC = Topic(name="t", id="0" * 31 + "1", created_ms=1, settings=TopicSettings(), partitions=equal_slots(2))
SLOW, MOVED = (ReadPartition("t", TOPIC.id, number) for number in range(2))


class Answers(RemoteQueue, RemoteGroups):
    """The answers of brokers: `stored` of the group, and spans; those of `waiting` come when `there` is set."""

    def __init__(self) -> None:
        super().__init__(NoBroker())
        self.stored: dict[ReadPartition, Committed] = {}
        self.outdated: list[dict[ReadPartition, Committed] | Exception] = []  # answered first, one at a time
        self.there = asyncio.Event()
        self.waiting: list[ReadPartition] = []
        self.asked = 0

    async def committed(self, group: str, partitions: Sequence[ReadPartition]) -> dict[ReadPartition, Committed]:
        self.asked += 1
        answer = self.outdated.pop(0) if self.outdated else self.stored
        if isinstance(answer, Exception):
            raise answer
        return {part: answer[part] for part in partitions if part in answer}

    async def span(self, partition: ReadPartition) -> Span:
        if partition in self.waiting:
            await self.there.wait()
        return Span(0, 1_000)

    async def read(self, partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
        return Entries((), 1_000)

    async def seek_time(self, partition: ReadPartition, time_ms: int) -> int:
        return 1_000

    async def poll(
        self,
        offsets: dict[ReadPartition, int],
        wait_ms: int = 0,
        bytes_max: int = 0,
        blocks_bytes_max: int = 0,
        tag_bits: int = 0,
    ) -> list[Polled]:
        await skip(wait_ms / 1000)
        return []


async def no_read(store: str, key: str, offset: int, length: int) -> Buffer:
    raise AssertionError("no pointer came, so nothing is fetched")


class Reports:
    """A reporter that sends nothing: its notes are in `tally`."""

    def __init__(self) -> None:
        self.tally = AuditRecorder(7, "consumer", "g", "host", 1_000, lambda: None)

    def reading(self, topic: Named, writers: Sequence[int], *, commits: bool) -> ReadRecorder:
        return ReadRecorder(partial(self.part, topic), writers, commits=commits)

    async def close(self, timeout_s: float | None) -> None:
        """Nothing is sent."""

    def part(self, topic: Named, partition: int) -> PartRecorder:
        return self.tally.part(topic.name, topic.id, partition, 0)


class Member:
    """A member of a group with its opener, which runs in the background."""

    def __init__(self, observer: Reports | None = None, **settings: Any) -> None:
        runtime = skipping_runtime()
        self.answers, self.state = Answers(), MemberState()
        events = EventLog(runtime.clock)
        self.died: list[BaseException] = []
        self.topics = {"t": TOPIC}
        self.tasks = TaskOwner(self.died.append, events)
        fetcher = BatchFetcher("broker", no_read, lambda store: None, ConfirmedReads(EventLog(SystemClock())))
        self.reading = FetchScheduler(runtime, self.answers, fetcher, self.tasks, 1 << 20, lambda: None)
        self.changes = 0
        asked_for = ConsumerSettings(topics=("t",), group="g", **settings)
        self.opener = Opener(
            asked_for,
            self.answers,
            OffsetResolver(self.answers),
            self.reading,
            self.topics,
            self._wanted,
            self._changed,
            observer=observer,
            tasks=self.tasks,
            events=events,
        )
        self.tasks.start(self.opener.run(), "opener")

    def _wanted(self) -> dict[ReadPartition, int]:
        return {part: grant for part, grant in self.state.granted.items() if part.topic in self.topics}

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
        return self.reading.assigned[MOVED].cursor.position


def committed_at(pointer_offset: int) -> Committed:
    return Committed(Position(1, pointer_offset), Totals())


BOTH = Membership(1, (SLOW, MOVED))
AWAY_AND_BACK = (Membership(2, (SLOW,), (MOVED,)), Membership(3, (SLOW,)), Membership(4, (SLOW, MOVED)))


class Run(Protocol):
    """Runs `work` with a member of which group and logs are as the arguments say."""

    def __call__(self, work: Callable[[Member], Awaitable[None]], **arguments: Any) -> None:
        """See `run`."""


@pytest.fixture
def run() -> Run:
    """Give a member `granted`, with settings, one second before the test's own steps, and stop it behind them.

    `stored` is the group's position of MOVED, `outdated` what comes instead at first, `waiting` has the logs that hang.
    """

    def run_with(
        work: Callable[[Member], Awaitable[None]],
        *,
        granted: Membership | None = BOTH,
        stored: int | None = None,
        outdated: Sequence[dict[ReadPartition, Committed] | Exception] = (),
        waiting: Sequence[ReadPartition] = (),
        **settings: Any,
    ) -> None:
        async def whole() -> None:
            member = Member(**settings)
            member.answers.outdated, member.answers.waiting = list(outdated), list(waiting)
            if stored is not None:
                member.store(stored)
            if granted is not None:
                member.heard(granted)
                await skip(1)
            await work(member)
            await member.tasks.stop()

        run_skipping(whole())

    return run_with


def test_a_position_that_was_asked_for_before_the_partition_went_is_not_used(run: Run) -> None:
    async def work(member: Member) -> None:
        opened, add = list[Position](), member.reading.add

        def noted(cursor: PartitionCursor, topic: Topic, grant: int = 0) -> Assigned:
            opened.append(cursor.position)
            return add(cursor, topic, grant)

        member.reading.add = noted  # type: ignore[method-assign]  # what is read, if only for a moment
        assert (member.answers.asked, list(member.reading.assigned)) == (1, []), "they wait for their ends"
        member.heard(*AWAY_AND_BACK)
        member.store(200)  # another member had it meanwhile
        member.answers.there.set()
        await skip(1)
        assert member.position == Position(1, 200)
        assert Position(1, 100) not in opened

    run(work, stored=100, waiting=[SLOW, MOVED], end="end")


def test_a_partition_that_can_not_be_opened_delays_no_other(run: Run) -> None:
    async def work(member: Member) -> None:
        assert list(member.reading.assigned) == [MOVED]
        member.heard(Membership(2, (SLOW,), (MOVED,)), Membership(3, (SLOW,)))
        await skip(1)
        assert list(member.reading.assigned) == []
        member.answers.there.set()
        await skip(1)
        assert list(member.reading.assigned) == [SLOW]
        assert member.answers.asked == 1, "what is being opened is not asked for again"

    run(work, waiting=[SLOW], start="end")


def test_a_log_that_refuses_is_asked_again_while_others_are_opened(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def work(member: Member) -> None:
        refusals: list[MemqError] = [DeniedError("not you"), QueueError("away")]
        span = member.answers.span

        async def refused(partition: ReadPartition) -> Span:
            if partition == SLOW and refusals:
                raise refusals.pop(0)
            return await span(partition)

        member.answers.span = refused  # type: ignore[method-assign]  # for the first answers
        member.heard(BOTH)
        await skip(0.1)
        assert list(member.reading.assigned) == [MOVED]
        assert isinstance(member.opener.failure, DeniedError), "the user sees what does not pass by itself"
        await skip(1)
        assert list(member.reading.assigned) == [MOVED, SLOW]

    run(work, granted=None, start="end")
    assert log_lines(caplog) == [
        "consumer.retry: DeniedError: not you; trying again",
        "consumer.retry: QueueError: away; trying again",
    ]


@pytest.mark.parametrize("outcome", [True, False])
def test_reading_of_a_revoked_partition_ends_even_if_it_returns_at_once(run: Run, *, outcome: bool) -> None:
    async def work(member: Member) -> None:
        before = member.reading.assigned[MOVED]
        if outcome:
            member.state.confirm_assigned(MOVED)
            member.state.fenced()
            member.heard(Membership(4, (SLOW, MOVED)))
        else:
            member.heard(*AWAY_AND_BACK)
        member.store(200)
        assert before.removed, "what was prefetched of it could still be delivered"
        await skip(1)
        assert member.position == Position(1, 200)

    run(work, stored=100)


@pytest.mark.parametrize("outdated", [{}, {MOVED: committed_at(40)}, NotFoundError("no such group")])
def test_an_answer_behind_what_this_member_has_stored_is_asked_for_again(
    run: Run, outdated: dict[ReadPartition, Committed] | Exception
) -> None:
    async def work(member: Member) -> None:
        member.answers.outdated = [outdated] * 3
        member.heard(*AWAY_AND_BACK)
        await skip(5)
        assert (member.position, member.answers.asked) == (Position(1, 100), 5)

    run(work, stored=100)


def test_a_topic_that_goes_while_its_partition_is_opened_ends_no_consumer(run: Run) -> None:
    async def work(member: Member) -> None:
        member.answers.outdated = [{}] * 3
        member.heard(*AWAY_AND_BACK)
        await skip(0.1)
        member.topics.clear()  # a group of two topics reads on, of the other one
        await skip(10)
        assert (member.died, MOVED in member.reading.assigned) == ([], False)

    run(work, stored=100)


def test_an_error_is_never_taken_for_a_group_that_has_stored_nothing(run: Run) -> None:
    async def work(member: Member) -> None:
        await skip(2)
        assert member.position == Position(1, 100), "at its start it would pass over what it has not read"
        assert (member.answers.asked, member.opener.failure) == (5, None)

    run(work, stored=100, outdated=[NotFoundError("unknown topic or partition")] * 4, start="end")


def test_a_position_that_stays_back_is_one_of_a_reset(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def work(member: Member) -> None:
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

    run(work, stored=100)
    (line,) = [record.getMessage() for record in caplog.records if "consumer.position-back" in record.getMessage()]
    assert "group 'g' in topic 't': 1:100:0 was stored, now it is 1:40:0" in line


def test_a_group_that_was_deleted_is_waited_for_once(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def work(member: Member) -> None:
        member.answers.stored.clear()
        member.heard(*AWAY_AND_BACK)
        await skip(9.1)
        assert member.position == Position(1, 0)
        member.heard(Membership(5, (SLOW,), (MOVED,)), Membership(6, (SLOW,)), Membership(7, (SLOW, MOVED)))
        await skip(0.1)
        assert member.position == Position(1, 0)

    run(work, stored=100)
    (line,) = [record.getMessage() for record in caplog.records if "consumer.position-back" in record.getMessage()]
    assert "1:100:0 was stored, now it is nothing" in line


def test_a_seek_does_not_take_back_what_went_while_its_place_was_looked_for(run: Run) -> None:
    async def work(member: Member) -> None:
        member.answers.waiting = [SLOW]
        seek = asyncio.create_task(member.opener.seek(SLOW, "end"))
        await skip(1)
        member.heard(Membership(2, (MOVED,), (SLOW,)))
        member.state.fenced()
        member.reading.keep(member.state.granted)
        member.answers.there.set()
        with pytest.raises(InvalidRequestError, match="was assigned to another member"):
            await seek
        assert SLOW not in member.reading.assigned

    run(work)


def test_an_error_is_no_answer(run: Run) -> None:
    async def work(member: Member) -> None:
        assert member.position == Position(1, 100)

    run(work, stored=100, outdated=[QueueError("the queue is away")])


@pytest.mark.parametrize("passes", [True, False])
def test_failed_opening_is_retried_five_times_a_second(run: Run, *, passes: bool) -> None:
    error = QueueError("away") if passes else DeniedError("not you")

    async def work(member: Member) -> None:
        member.heard(BOTH)
        before = member.changes
        await skip(1.0)
        assert 4 <= member.answers.asked <= 6
        assert member.changes > before, "waiters are notified"
        assert member.opener.failure is (None if passes else error)
        await skip(2.0)
        assert list(member.reading.assigned) == [SLOW, MOVED]

    run(work, granted=None, outdated=[error] * 9)


def test_a_partition_that_is_paused_stays_paused_over_a_seek(run: Run) -> None:
    async def work(member: Member) -> None:
        assert member.position == Position(1, 0)
        for paused in (True, False):
            member.reading.pause(MOVED, paused=paused)
            await member.opener.seek(MOVED, Position(1, 70, 3))
            assert member.position == Position(1, 70, 3)
            assert member.reading.assigned[MOVED].cursor.paused is paused

    run(work)


def test_the_end_is_that_of_the_first_opening_and_policies_are_passed_on(run: Run) -> None:
    async def work(member: Member) -> None:
        cursor = member.reading.assigned[MOVED].cursor
        assert (cursor.position, cursor.end) == (Position(1, 1_000), Position(1, 1_000))
        assert member.reading.ended
        member.heard(*AWAY_AND_BACK)
        await skip(1)
        assert member.reading.assigned[MOVED].cursor.end == Position(1, 1_000)
        assert member.reading.assigned[MOVED].grant != 0

    run(work, end="end", start="end", on_damaged="skip", on_expired="skip")


def test_a_stored_position_is_known_to_be_stored(run: Run) -> None:
    async def work(member: Member) -> None:
        assigned = member.reading.assigned
        assert assigned[MOVED].ledger.is_stored(Position(1, 100))
        assert not assigned[MOVED].ledger.is_stored(Position(1, 101))
        assert not assigned[SLOW].ledger.is_stored(Position(0, 1))
        assert list(member.reading.stored) == [MOVED]
        assert (assigned[SLOW].cursor.position, member.position) == (Position(0, 0), Position(1, 100))

    run(work, stored=100)


def test_waiters_are_notified_of_each_round_and_each_failure_before_the_next_begins(run: Run) -> None:
    async def work(member: Member) -> None:
        await skip(0.1)
        assert member.changes == 1, "nothing is wanted, and that is known"
        member.answers.outdated = [DeniedError("not you")]
        member.heard(BOTH)
        await skip(0.1)
        assert (member.changes, member.opener.failure is None) == (2, False)
        await skip(0.2)
        assert list(member.reading.assigned) == [SLOW, MOVED]
        assert member.changes == 5, "one for the round, and one for each partition"

    run(work, granted=None)


@pytest.mark.parametrize("skips", [True, False])
def test_a_start_that_retention_took_is_an_error_unless_it_may_be_skipped(run: Run, *, skips: bool) -> None:
    async def work(member: Member) -> None:
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

    run(work, on_expired="skip" if skips else "fail")


@pytest.mark.parametrize("skips", [True, False])
def test_retention_under_a_reader_is_an_error_unless_it_may_be_skipped(run: Run, *, skips: bool) -> None:
    log = Log()
    for first in (0, 3, 6):
        log.batch(Block(1, first))
    del log.entries[:2]

    async def work(member: Member) -> None:
        await member.opener.seek(MOVED, Position(1, 0))
        (delivery,) = read(log, member.reading.assigned[MOVED].cursor)
        assert isinstance(delivery.failure, type(None) if skips else PositionExpiredError)
        assert len(delivery.slices) == skips

    run(work, on_expired="skip" if skips else "fail")


def test_the_audit_learns_where_reading_begins_and_why(run: Run) -> None:
    reports = Reports()

    async def work(member: Member) -> None:
        await member.opener.seek(MOVED, Position(1, 70, 3))

    run(work, stored=100, observer=reports)
    parts = [part for _, report in reports.tally.take(0, 1) for part in report.parts]
    begins = {(part.partition, begin.at, begin.reason) for part in parts for begin in part.begins}
    assert begins >= {(0, "0:0:0", "start"), (1, "1:100:0", "stored"), (1, "1:70:3", "seek")}


def test_a_member_reads_from_a_position_that_came_with_the_partition_and_asks_for_none(run: Run) -> None:
    async def work(member: Member) -> None:
        member.opener.take_position = member.state.take_position
        member.heard(Membership(1, (MOVED,), positions={MOVED: committed_at(7)}))
        await skip(1)
        assert (member.position.pointer_offset, member.answers.asked) == (7, 0)
        member.store(9)
        member.heard(Membership(2, (SLOW,), (MOVED,)), Membership(3, (SLOW,)), Membership(4, (SLOW, MOVED)))
        await skip(1)
        assert (member.position.pointer_offset, member.answers.asked) == (9, 1), "the later grant came without one"

    run(work, granted=None)


def test_a_member_asks_for_the_positions_that_did_not_come(run: Run) -> None:
    async def work(member: Member) -> None:
        member.opener.take_position = member.state.take_position
        member.store(3)
        member.heard(Membership(1, (SLOW, MOVED), positions={SLOW: Committed(Position(0, 7))}))
        await skip(1)
        assert (member.position.pointer_offset, member.answers.asked) == (3, 1)
        assert member.reading.assigned[SLOW].cursor.position.pointer_offset == 7

    run(work, granted=None)
