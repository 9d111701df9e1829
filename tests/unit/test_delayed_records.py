"""The delayed records of a producer: requests, retries, refusals and one end each. On virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from memq.client.producer import delayed as delayed_module
from memq.client.producer.delayed import CancelOutcome, DelayedRecord, DelayedRecords, ack_of
from memq.client.producer.delivery import Ack
from memq.client.producer.send_buffer import BLOCK_COST_BYTES
from memq.client.producer.settings import ProducerSettings
from memq.errors import (
    InvalidRequestError,
    MemqError,
    NotReadyError,
    OutcomeUnknownError,
    TimedOutError,
    TooLargeError,
    TopicSealedError,
    UnreachableError,
)
from memq.format.blocks.header import parse_header
from memq.format.held_sequences import delayed_sequence
from memq.limits import HOLD_BYTES_MAX, SLOTS
from memq.protocol.admin_messages import AdminAnswer, AdminRequest
from memq.protocol.frames import AckLevel, Api
from memq.protocol.hold_messages import CancelHolds, HoldRecords, WireHoldId
from memq.runtime.runtime import Runtime
from memq.runtime.tasks import TaskOwner
from memq.topic import Position, Topic
from tests.skipping_loop import LoopClock, now_s, run_skipping, skip
from tests.unit.transactional_cluster import TOPIC, Least, Way, fields

SETTINGS = ProducerSettings(codec="none", delivery_timeout_s=20.0)
SEALED = TopicSealedError("topic 'clicks' is sealed")


class Link:
    """A connection; its clock is 100 s ahead."""

    open = True

    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers

    def clock_ms(self, at_s: float) -> int:
        return round((at_s + 100) * 1_000)

    async def request(self, api: Api, message: AdminRequest, answer: type, *, timeout_s: float) -> AdminAnswer:
        assert (api, answer, timeout_s) == (Api.ADMIN, AdminAnswer, SETTINGS.open_timeout_s)
        return await self._brokers.answer(message.ask)


class Brokers:
    """Answers requests of a producer after `delay_s`; `errors` of the next ones, None for success."""

    def __init__(self, **settings: Any) -> None:
        self.asked: list[tuple[float, Any]] = []
        self.errors: list[MemqError | None] = []
        self.refuse: Callable[[Any], MemqError | None] = lambda ask: None
        self.unreachable: list[MemqError] = []
        self.states = ["dropped"]
        self.delay_s = 0.0
        self.at_once = self.most_at_once = 0
        self.given_up: list[MemqError] = []
        self.link_made = Link(self)
        self.claimed = 0
        self.sleeps = False  # its loop is busy
        self.ends: dict[int, MemqError | None] = {}  # by delivery
        self.last: DelayedRecord | None = None
        self.clock = LoopClock()
        self.failures: list[BaseException] = []
        self.tasks = TaskOwner(self.failures.append, cast(Any, self))
        self.deliveries = 0
        runtime = Runtime(clock=self.clock, random=Least(1))
        self.noted: list[tuple[int, str, int, int]] = []  # partition, stage, minute and records of reports
        ways = (self.make, self.wake, self.settled, self.note)
        parts = (cast(Any, self), cast(Any, self), cast(Any, self), self.tasks, *ways)
        self.records = DelayedRecords(replace(SETTINGS, **settings), runtime, *parts)

    # the parts of the producer

    def claim(self, count: int) -> None:
        self.claimed += count

    def give_back(self, count: int) -> None:
        self.claimed -= count

    async def topic(self, name: str, *, timeout_s: float) -> Any:
        assert (name, timeout_s) == ("clicks", SETTINGS.metadata_timeout_s)
        return SimpleNamespace(topic=TOPIC)

    def make(self) -> Any:
        self.deliveries += 1
        return self.deliveries

    def wake(self) -> None:
        if not self.sleeps:
            asyncio.get_running_loop().call_soon(self.records.drain)

    def settled(self, record: DelayedRecord, error: MemqError | None) -> None:
        delivery = cast(int, record.delivery)
        assert delivery not in self.ends, "it has one end"
        self.ends[delivery] = error
        self.last = record

    def note(self, topic: Topic, partition: int, stage: str, minute: int, records: int) -> None:
        assert topic is TOPIC
        self.noted.append((partition, stage, minute, records))

    async def link(self) -> Link:
        if self.unreachable:
            raise self.unreachable.pop(0)
        return self.link_made

    def give_up(self, link: Link, error: MemqError) -> None:
        assert link is self.link_made
        self.given_up.append(error)

    async def __call__(self, api: Api, message: AdminRequest, answer: type, *, timeout_s: float) -> AdminAnswer:
        return await self.link_made.request(api, message, answer, timeout_s=timeout_s)

    async def answer(self, ask: Any) -> AdminAnswer:
        self.asked.append((now_s(), ask))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await skip(self.delay_s)
        self.at_once -= 1
        error = (self.errors.pop(0) if self.errors else None) or self.refuse(ask)
        if error is not None:
            raise error
        return AdminAnswer(holds=self.states)

    # for tests

    def add(self, value: bytes = b"x", *, key: bytes | None = None, partition: int | None = 1, due_ms: int = 7) -> int:
        return cast(int, self.records.add(cast(Any, Way()), fields(value, key), partition, due_ms))

    def unsettled(self) -> list[int]:
        return cast(list[int], self.records.unsettled())

    def held(self) -> list[tuple[float, int, int]]:
        """Return time, partition and number of records of each request to hold."""
        return [(at_s, ask.partition, len(ask.holds)) for at_s, ask in self.asked if isinstance(ask, HoldRecords)]


def on_brokers(work: Callable[[Brokers], Awaitable[None]], **settings: Any) -> None:
    """Run a test, and end the tasks of the producer."""

    async def run() -> None:
        await skip(1)
        brokers = Brokers(**settings)
        try:
            await work(brokers)
        finally:
            await brokers.tasks.stop()
        assert brokers.failures == []

    run_skipping(run())


# ---- blocks and requests ---------------------------------------------------------------------------


def test_a_delayed_record_is_a_block_with_its_own_producer_id() -> None:
    async def work(brokers: Brokers) -> None:
        sent_s = now_s()
        brokers.delay_s = 0.5
        assert brokers.add(b"a", key=b"\x01", partition=2, due_ms=11) == 1
        assert brokers.add(b"b", key=b"\x06", partition=None, due_ms=12) == 2
        assert brokers.unsettled() == [1, 2]
        await skip(0.1)
        assert brokers.unsettled() == [1, 2]
        assert brokers.claimed > 2 * BLOCK_COST_BYTES
        await skip(1)
        (ask,) = (ask for _, ask in brokers.asked)
        assert (ask.topic, ask.topic_id, ask.partition) == ("clicks", TOPIC.id, 2)
        assert ask.sent_ms == round((sent_s + 100) * 1_000)
        assert [each.due_ms for each in ask.holds] == [11, 12]
        headers = [parse_header(each.block) for each in ask.holds]
        assert [(each.first_sequence, each.count) for each in headers] == [
            (delayed_sequence(due_ms), 1) for due_ms in (11, 12)
        ]
        assert [(each.slot_first, each.slot_last) for each in headers] == [(0, SLOTS - 1), (2, 7)]
        assert all(each.producer_id >= 1 for each in headers)
        assert brokers.ends == {1: None, 2: None}
        assert (brokers.claimed, brokers.unsettled()) == (0, [])

    on_brokers(work)


def test_a_request_has_the_records_of_one_partition_with_the_time_of_its_oldest_one() -> None:
    async def work(brokers: Brokers) -> None:
        first_s = now_s()
        for partition in (1, 2, 1, 2, 2):
            brokers.add(partition=partition)
        await skip(0.1)
        assert brokers.held() == [(first_s, 1, 2), (first_s, 2, 3)]
        assert list(brokers.ends) == [1, 3, 2, 4, 5]

    on_brokers(work)


def test_a_request_has_a_bound_on_records_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(brokers: Brokers) -> None:
        for _ in range(7):
            brokers.add()
        await skip(0.1)
        assert [count for *_, count in brokers.held()] == [3, 3, 1]
        brokers.add(b"y" * 500)
        await skip(0.1)
        size = len(brokers.asked[-1][1].holds[0].block)
        brokers.asked.clear()
        monkeypatch.setattr(delayed_module, "REQUEST_BYTES_MAX", 2 * size)
        for _ in range(3):
            brokers.add(b"y" * 500)
        brokers.add(b"y" * (3 * size))
        await skip(0.1)
        assert [count for *_, count in brokers.held()] == [2, 1, 1]

    monkeypatch.setattr(delayed_module, "HOLDS_PER_REQUEST_MAX", 3)
    on_brokers(work)


def test_a_producer_has_a_few_requests_at_once_and_the_others_follow() -> None:
    async def work(brokers: Brokers) -> None:
        brokers.delay_s = 1
        for number in range(3 * delayed_module.REQUESTS_AT_ONCE):
            brokers.add(partition=number % 4)
            await skip(0.001)
        assert brokers.most_at_once == delayed_module.REQUESTS_AT_ONCE
        assert len(brokers.held()) == delayed_module.REQUESTS_AT_ONCE
        await skip(0.99)
        assert len(brokers.held()) == delayed_module.REQUESTS_AT_ONCE + 4, "the others, one for each partition"
        await skip(2)
        assert brokers.most_at_once <= delayed_module.REQUESTS_AT_ONCE
        assert len(brokers.ends) == 3 * delayed_module.REQUESTS_AT_ONCE

    on_brokers(work)


def test_a_request_has_the_age_of_its_oldest_record() -> None:
    async def work(brokers: Brokers) -> None:
        brokers.sleeps = True
        first_s = now_s()
        brokers.add()
        await skip(2)
        brokers.add()
        brokers.records.drain()
        await skip(0.1)
        ((_, ask),) = brokers.asked
        assert ask.sent_ms == round((first_s + 100) * 1_000)

    on_brokers(work)


def test_a_block_may_have_as_many_bytes_as_a_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(brokers: Brokers) -> None:
        brokers.add(b"x" * 100)
        await skip(0.1)
        size = len(brokers.asked[0][1].holds[0].block)
        monkeypatch.setattr(delayed_module, "HOLD_BYTES_MAX", size)
        brokers.add(b"y" * 100)
        with pytest.raises(TooLargeError, match=f"of {size + 1} bytes, {size} are allowed"):
            brokers.add(b"y" * 101)

    on_brokers(work)


def test_a_record_that_can_not_be_delayed_claims_nothing() -> None:
    async def work(brokers: Brokers) -> None:
        with pytest.raises(TooLargeError, match=f"{HOLD_BYTES_MAX} are allowed"):
            brokers.add(b"x" * HOLD_BYTES_MAX)
        with pytest.raises(TooLargeError, match="record_bytes_max"):
            brokers.add(b"x" * (TOPIC.settings.record_bytes_max + 1))
        assert (brokers.claimed, brokers.unsettled()) == (0, [])

    async def named(brokers: Brokers) -> None:
        with pytest.raises(InvalidRequestError, match="can't delay records"):
            brokers.add()
        assert brokers.claimed == 0

    on_brokers(work)
    on_brokers(named, name="n")


# ---- retries and refusals --------------------------------------------------------------------------


def test_a_producer_asks_again_until_its_record_is_held() -> None:
    async def work(brokers: Brokers) -> None:
        throttled = NotReadyError("full")
        throttled.retry_after_ms = 500
        brokers.errors = [NotReadyError("away"), throttled, TimedOutError("silent")]
        begin_s = now_s()
        brokers.add()
        await skip(10)
        assert [at_s - begin_s for at_s, *_ in brokers.held()] == pytest.approx([0, 0.05, 0.65, 0.85])
        assert brokers.ends == {1: None}
        assert [type(each) for each in brokers.given_up] == [TimedOutError], "the others have answered"

    on_brokers(work)


def test_a_producer_leaves_a_connection_that_has_ended() -> None:
    async def work(brokers: Brokers) -> None:
        brokers.link_made.open = False
        brokers.errors = [UnreachableError("cut")]
        brokers.add()
        await skip(1)
        assert [str(each) for each in brokers.given_up] == ["cut"]

    on_brokers(work)


def test_a_record_that_no_broker_took_in_time_is_given_up() -> None:
    async def work(brokers: Brokers) -> None:
        brokers.unreachable = [UnreachableError("away") for _ in range(1_000)]
        brokers.add()
        await skip(15)
        brokers.add(partition=2)
        await skip(4.9)
        assert brokers.ends == {}
        await skip(2)
        (error,) = brokers.ends.values()
        assert isinstance(error, TimedOutError), "it was never sent"
        assert "not held within 20 s: away" in str(error)
        assert brokers.unsettled() == [2]
        count = len(brokers.unreachable)
        await skip(20)
        assert len(brokers.ends) == 2
        assert count - len(brokers.unreachable) < 50, "with pauses"
        assert brokers.claimed == 0

    on_brokers(work)


def test_a_record_that_was_sent_and_is_given_up_has_an_unknown_outcome() -> None:
    async def work(brokers: Brokers) -> None:
        brokers.errors = [NotReadyError("not yet") for _ in range(1_000)]
        brokers.add()
        await skip(30)
        assert isinstance(brokers.ends[1], OutcomeUnknownError)
        assert 20 < brokers.held()[-1][0] - brokers.held()[0][0] < 21.5

    on_brokers(work)


def test_a_refused_record_gets_its_error_and_is_not_sent_again() -> None:
    async def work(brokers: Brokers) -> None:
        brokers.errors = [SEALED]
        brokers.add()
        await skip(5)
        assert brokers.ends == {1: SEALED}
        assert len(brokers.held()) == 1

    on_brokers(work)


def test_a_refusal_of_a_second_try_says_nothing_about_the_first() -> None:
    """The first request was held, and its answer was lost; then the topic was sealed."""

    async def work(brokers: Brokers) -> None:
        brokers.errors = [TimedOutError("lost"), SEALED]
        brokers.add()
        await skip(5)
        error = brokers.ends[1]
        assert isinstance(error, OutcomeUnknownError), "it may come when the topic is unsealed"
        assert error.__cause__ is SEALED
        assert "clicks' is sealed" in str(error)

    on_brokers(work)


def test_a_refusal_after_tries_without_a_connection_is_believed() -> None:
    async def work(brokers: Brokers) -> None:
        brokers.unreachable = [UnreachableError("away")]
        brokers.errors = [SEALED]
        brokers.add()
        await skip(5)
        assert brokers.ends == {1: SEALED}

    on_brokers(work)


def test_each_record_of_a_refused_request_is_sent_alone() -> None:
    async def work(brokers: Brokers) -> None:
        bad = InvalidRequestError("bad")
        seen: list[int] = []

        def refuse(ask: HoldRecords) -> MemqError | None:
            seen.extend(each.due_ms for each in ask.holds)
            if seen.count(3) == 2 and ask.holds[0].due_ms == 3:
                return NotReadyError("not now")
            return bad if any(each.due_ms == 2 for each in ask.holds) else None

        brokers.refuse = refuse
        for due_ms in (1, 2, 3):
            brokers.add(due_ms=due_ms)
        await skip(5)
        assert brokers.ends == {1: None, 2: bad, 3: None}
        assert seen == [1, 2, 3, 1, 2, 3, 3]
        assert brokers.claimed == 0

    on_brokers(work)


def test_a_record_alone_that_is_refused_after_a_lost_answer_has_an_unknown_outcome() -> None:
    async def work(brokers: Brokers) -> None:
        brokers.errors = [TimedOutError("lost"), SEALED, SEALED, None]
        brokers.add()
        brokers.add()
        await skip(5)
        assert isinstance(brokers.ends[1], OutcomeUnknownError)
        assert brokers.ends[2] is None

    on_brokers(work)


def test_a_producer_that_closes_settles_each_record_once() -> None:
    async def work(brokers: Brokers) -> None:
        closed = InvalidRequestError("closed")
        brokers.delay_s = 5
        for partition in (1, 2):
            brokers.add(partition=partition)
        await skip(1)
        await brokers.tasks.stop()
        brokers.add(partition=3)
        brokers.records.abandon(closed)
        sent = [brokers.ends[1], brokers.ends[2]]
        assert [type(each) for each in sent] == [OutcomeUnknownError] * 2
        assert brokers.ends[3] is closed, "it was never sent"
        assert (brokers.claimed, brokers.unsettled()) == (0, [])

    on_brokers(work)


# ---- cancels ---------------------------------------------------------------------------------------


def ack() -> Ack:
    return Ack("clicks", 3, 0xABC, 0, 1, AckLevel.ALL)


@pytest.mark.parametrize(
    ("state", "outcome"),
    [
        ("dropped", CancelOutcome.CANCELLED),
        ("released", CancelOutcome.DELIVERED),
        ("unknown", CancelOutcome.UNKNOWN),
    ],
)
def test_a_cancel_says_what_became_of_the_record(state: str, outcome: CancelOutcome) -> None:
    async def work(brokers: Brokers) -> None:
        brokers.states = [state]
        brokers.errors = [NotReadyError("not yet"), UnreachableError("away")]
        begin_s = now_s()
        assert await brokers.records.cancel(ack()) is outcome
        assert [at_s - begin_s for at_s, _ in brokers.asked] == pytest.approx([0, 0.05, 0.15])
        hold = WireHoldId(producer="0000000000000abc", first=0)
        assert {type(ask) for _, ask in brokers.asked} == {CancelHolds}
        assert brokers.asked[0][1] == CancelHolds(topic="clicks", topic_id=TOPIC.id, partition=3, holds=[hold])

    on_brokers(work)


def test_a_producer_reports_a_cancelled_record_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delayed_module, "CANCELLED_MAX", 1)

    async def work(brokers: Brokers) -> None:
        delayed = ack()._replace(first_sequence=delayed_sequence(120_000))
        for state in ("released", "unknown"):
            brokers.states = [state]
            await brokers.records.cancel(delayed)
        brokers.states = ["dropped"]
        await brokers.records.cancel(delayed)
        await brokers.records.cancel(delayed)
        await brokers.records.cancel(ack()._replace(producer_id=5))  # of an earlier release
        assert brokers.noted == [(3, "cancelled", 2, 1)]
        await brokers.records.cancel(delayed._replace(producer_id=6))
        await brokers.records.cancel(delayed)
        assert len(brokers.noted) == 3, "it knows the last one only"

    on_brokers(work)


def test_a_cancel_that_is_refused_raises_the_refusal() -> None:
    async def work(brokers: Brokers) -> None:
        brokers.errors = [InvalidRequestError("no")]
        with pytest.raises(InvalidRequestError, match="no"):
            await brokers.records.cancel(ack())
        with pytest.raises(InvalidRequestError, match="was not delayed"):
            await brokers.records.cancel(ack()._replace(position=Position(3, 1)))
        assert len(brokers.asked) == 1

    on_brokers(work)


def test_a_cancel_without_an_answer_has_an_unknown_outcome() -> None:
    async def work(brokers: Brokers) -> None:
        brokers.errors = [UnreachableError("away") for _ in range(1_000)]
        begin_s = now_s()
        with pytest.raises(OutcomeUnknownError, match="what became of the record: away"):
            await brokers.records.cancel(ack())
        assert 20 < now_s() - begin_s < 21.5

    on_brokers(work)


def test_the_ack_of_a_held_record_has_no_position() -> None:
    async def work(brokers: Brokers) -> None:
        brokers.add(partition=3)
        await skip(0.1)
        record = brokers.last
        assert record is not None
        assert ack_of(record) == Ack("clicks", 3, record.producer_id, delayed_sequence(record.due_ms), 1, AckLevel.ALL)

    on_brokers(work)
