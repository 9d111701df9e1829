"""Requests about held records at a broker: what it refuses, and what it asks the owner of the shard."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from memq.broker.api import Call
from memq.broker.api.hold_requests import HoldRequests
from memq.broker.service_partitions.hosts import shard_name
from memq.broker.services import BROKER_PROGRAM
from memq.errors import (
    CorruptDataError,
    InvalidRequestError,
    MemqError,
    NotFoundError,
    TooLargeError,
    TooOldError,
    TopicSealedError,
)
from memq.format.blocks.builder import BlockBuilder
from memq.format.blocks.header import scope_of
from memq.format.held_object import HoldId, Target
from memq.holds.decisions import HoldState
from memq.holds.keeper import HoldKeeper
from memq.holds.machine import UnitCount
from memq.holds.storing import NewHold
from memq.limits import DELAY_MS_MAX, HOLDS_PER_REQUEST_MAX
from memq.protocol.admin_messages import AdminAnswer, AdminRequest
from memq.protocol.connection import ANONYMOUS
from memq.protocol.frames import Api
from memq.protocol.hold_messages import (
    CancelHolds,
    DescribeHolds,
    HoldRecords,
    ListDelayed,
    WireDelayedTopic,
    WireHold,
    WireHoldId,
    WireUnits,
    WireWaiting,
)
from memq.protocol.link import Link
from memq.topic import CLOCK_ERROR_MS, STATE_TOPIC, Topic, equal_slots
from tests.access import EVERYTHING, OneTopic
from tests.skipping_loop import now_s, run_skipping, skip, skipping_runtime

TOPIC = Topic(name="clicks", id="ab" * 16, created_ms=0, partitions=equal_slots(2))
OTHER_ID, GONE_ID = "cd" * 16, "ef" * 16
READY_S = 5.0
TIMEOUT_S = TOPIC.settings.delivery_timeout_ms / 1_000


class Keeper(HoldKeeper):
    """Notes its calls."""

    def __init__(self) -> None:
        self.held: list[NewHold] = []
        self.cancelled: list[HoldId] = []
        self.targets: list[Target] = []
        self.states: list[HoldState | None] = [HoldState.HELD]
        self.counts: dict[Target, tuple[int, int]] = {}
        self.released: dict[Target, UnitCount] = {}
        self.undelivered = False
        self.proofs = 0
        self.of_topics: list[str] = []

    async def state_of(self, hold: HoldId, topic_id: str = "") -> HoldState | None:
        self.of_topics.append(topic_id)
        return HoldState.HELD

    async def prove(self) -> None:
        self.proofs += 1

    async def hold(self, holds: Sequence[NewHold]) -> list[HoldState]:
        self.held += holds
        return cast(list[HoldState], self.states)

    async def cancel(self, holds: Sequence[HoldId], target: Target) -> list[HoldState | None]:
        self.cancelled += holds
        self.targets.append(target)
        return self.states

    async def waiting(self, topic_id: str, *, undelivered: bool = False) -> dict[Target, tuple[int, int]]:
        self.undelivered = undelivered
        return {target: count for target, count in self.counts.items() if target.topic_id == topic_id}

    async def all_waiting(self) -> dict[Target, tuple[int, int]]:
        return self.counts

    async def units(self, topic_id: str) -> dict[Target, UnitCount]:
        assert topic_id == TOPIC.id
        return self.released

    @property
    def shard(self) -> int:
        return 0xAB


class OtherBroker(Link):
    """A link to another broker, whose clock for this connection is 100 s ahead."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.answer = AdminAnswer()

    def clock_ms(self, at_s: float) -> int:
        return round((at_s + 100) * 1_000)

    async def request(self, api: Api, message: msgspec.Struct, answer: Any, **options: Any) -> Any:
        assert (api, answer) == (Api.ADMIN, AdminAnswer)
        assert isinstance(message, AdminRequest)
        self.asked.append(message.ask)
        return self.answer


class Broker:
    """A broker whose keeper, or that of another one, has the shard."""

    holds = "the kind"

    def __init__(self) -> None:
        self.topic = TOPIC
        self.keeper = Keeper()
        self.other = OtherBroker()
        self.home: Keeper | OtherBroker = self.keeper
        self.places: list[Any] = [self.keeper]
        self.sought: list[tuple[str, bool]] = []
        self.program = "a client"
        services = SimpleNamespace(runtime=skipping_runtime())
        self.wall_ms = services.runtime.clock.wall_ms
        self.requests = HoldRequests(cast(Any, services), cast(Any, self), cast(Any, self))

    async def current_topic(self, name: str, topic_id: str) -> Topic:
        assert (name, topic_id) == (self.topic.name, self.topic.id)
        return self.topic

    def topics(self) -> list[Topic]:
        return [self.topic]

    async def service_or_link(self, kind: object, name: str, *, forwarded: bool) -> Keeper | OtherBroker:
        assert kind == self.holds
        self.sought.append((name, forwarded))
        return self.home

    async def service_topic(self, *, create: bool) -> Topic:
        assert not create
        return Topic(name=STATE_TOPIC, id=OTHER_ID, created_ms=0, partitions=equal_slots(len(self.places)))

    async def service_in(self, kind: object, topic: Topic, partition: int) -> Any:
        assert (kind, topic.name) == (self.holds, STATE_TOPIC)
        return self.places[partition]

    async def link(self, address: str) -> OtherBroker:
        assert address == "b:1"
        return self.other

    def call(self, ask: Any) -> Call[Any]:
        connection = SimpleNamespace(ready_s=READY_S, program=self.program)
        return Call(cast(Any, connection), ANONYMOUS, 0, ask, access=EVERYTHING)

    def ask(self, *due_ms: int, partition: int = 0, sent_s: float | None = None, scope: int | None = None) -> Any:
        """Return a request with a block for each due time; producers count from 1."""
        holds = [
            WireHold(block=block(producer, scope or scope_of(TOPIC.id_bytes, abs(partition))), due_ms=due)
            for producer, due in enumerate(due_ms, 1)
        ]
        sent_ms = round((now_s() if sent_s is None else sent_s) * 1_000 - READY_S * 1_000)
        names = {"topic": self.topic.name, "topic_id": self.topic.id}
        return HoldRecords(**names, partition=partition, sent_ms=sent_ms, holds=holds)

    async def hold(self, ask: HoldRecords) -> list[str]:
        answer = await self.requests.hold(self.call(ask))
        assert isinstance(answer, AdminAnswer)
        return answer.holds

    async def cancel(self, *firsts: int, partition: int = 0, topic: Topic = TOPIC) -> list[str]:
        holds = [WireHoldId(producer="0000000000000abc", first=first) for first in firsts]
        ask = CancelHolds(topic=topic.name, topic_id=topic.id, partition=partition, holds=holds)
        answer = await self.requests.cancel(self.call(ask))
        assert isinstance(answer, AdminAnswer)
        return answer.holds


def block(producer: int, scope: int) -> bytes:
    builder = BlockBuilder()
    builder.append(b"value", None, None, 5, None)
    return bytes(builder.seal(producer_id=producer, first_sequence=7, scope=scope, now_ms=1, codec="none").data)


def on_broker(work: Callable[[Broker], Awaitable[None]]) -> None:
    async def run() -> None:
        await skip(1_000)
        await work(Broker())

    run_skipping(run())


# ---- holds -----------------------------------------------------------------------------------------


def test_an_owner_holds_blocks_by_their_producer_and_sequence() -> None:
    async def work(broker: Broker) -> None:
        broker.keeper.states = [HoldState.HELD, HoldState.RELEASED]
        ask = broker.ask(9, 11, partition=1)
        assert await broker.hold(ask) == ["held", "released"]
        target = Target("clicks", TOPIC.id, 1)
        blocks = [each.block for each in ask.holds]
        assert broker.keeper.held == [
            NewHold(HoldId(1, 7), 8, target, "", 9, blocks[0]),
            NewHold(HoldId(2, 7), 8, target, "", 11, blocks[1]),
        ]
        assert broker.sought == [(shard_name(TOPIC.id, 1), False)]

    on_broker(work)


def test_a_request_for_another_broker_is_forwarded_with_its_age() -> None:
    async def work(broker: Broker) -> None:
        broker.home = broker.other
        broker.other.answer = AdminAnswer(holds=["held"])
        sent_s = now_s() - 3
        ask = broker.ask(9, sent_s=sent_s)
        assert await broker.hold(ask) == ["held"]
        assert broker.other.asked == [ask]
        assert ask.sent_ms == round((sent_s + 100) * 1_000)
        broker.other.answer = AdminAnswer(holds=["dropped"])
        assert await broker.cancel(7) == ["dropped"]
        assert isinstance(broker.other.asked[1], CancelHolds)
        assert (broker.keeper.held, broker.keeper.cancelled) == ([], [])

    on_broker(work)


def test_a_request_of_another_broker_is_not_forwarded_again() -> None:
    async def work(broker: Broker) -> None:
        broker.program = BROKER_PROGRAM
        await broker.hold(broker.ask(9))
        await broker.cancel(7)
        assert [forwarded for _, forwarded in broker.sought] == [True, True]

    on_broker(work)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"partition": 2}, NotFoundError),
        ({"partition": -1}, NotFoundError),
        ({"scope": 1}, CorruptDataError),
    ],
)
def test_a_block_of_another_partition_is_refused(change: dict[str, int], error: type[MemqError]) -> None:
    async def work(broker: Broker) -> None:
        with pytest.raises(error):
            await broker.hold(broker.ask(9, **change))
        assert broker.sought == []
        if "partition" in change:
            with pytest.raises(error, match="has 2 partitions"):
                await broker.cancel(7, partition=change["partition"])

    on_broker(work)


def test_due_times_have_bounds() -> None:
    async def work(broker: Broker) -> None:
        latest_ms = broker.wall_ms() + DELAY_MS_MAX + CLOCK_ERROR_MS
        for due_ms in (0, -1, latest_ms + 1):
            with pytest.raises(InvalidRequestError, match="366 days away"):
                await broker.hold(broker.ask(5, due_ms))
        assert broker.keeper.held == [], "all or none"
        for due_ms in (1, latest_ms):
            await broker.hold(broker.ask(due_ms))
        assert [each.due_ms for each in broker.keeper.held] == [1, latest_ms]

    on_broker(work)


def test_records_that_were_sent_too_long_ago_are_refused() -> None:
    async def work(broker: Broker) -> None:
        await broker.hold(broker.ask(9, sent_s=now_s() - TIMEOUT_S))
        with pytest.raises(TooOldError, match="were sent over"):
            await broker.hold(broker.ask(9, sent_s=now_s() - TIMEOUT_S - 0.01))
        assert len(broker.keeper.held) == 1

    on_broker(work)


def test_topics_that_are_sealed_or_memqs_own_take_no_delayed_records() -> None:
    async def work(broker: Broker) -> None:
        broker.topic = msgspec.structs.replace(TOPIC, sealed_ms=5)
        with pytest.raises(TopicSealedError):
            await broker.hold(broker.ask(9))
        assert await broker.cancel(7) == ["held"], "what is held can be cancelled"
        broker.topic = msgspec.structs.replace(TOPIC, name=STATE_TOPIC)
        with pytest.raises(InvalidRequestError, match="memq's own"):
            await broker.hold(broker.ask(9))
        with pytest.raises(InvalidRequestError, match="memq's own"):
            await broker.cancel(7, topic=broker.topic)
        assert broker.keeper.held == []

    on_broker(work)


def test_a_request_has_a_bound_on_records() -> None:
    async def work(broker: Broker) -> None:
        many = [WireHold(block=b"", due_ms=1)] * (HOLDS_PER_REQUEST_MAX + 1)
        ask = msgspec.structs.replace(broker.ask(9), holds=many)
        with pytest.raises(TooLargeError, match=f"{HOLDS_PER_REQUEST_MAX} are allowed"):
            await broker.hold(ask)
        with pytest.raises(TooLargeError, match=f"{HOLDS_PER_REQUEST_MAX} are allowed"):
            await broker.cancel(*range(HOLDS_PER_REQUEST_MAX + 1))
        await broker.cancel(*range(HOLDS_PER_REQUEST_MAX))
        assert len(broker.keeper.cancelled) == HOLDS_PER_REQUEST_MAX

    on_broker(work)


def test_a_cancel_answers_for_each_record() -> None:
    async def work(broker: Broker) -> None:
        broker.keeper.states = [HoldState.DROPPED, None, HoldState.RELEASED]
        assert await broker.cancel(7, 8, 9, partition=1) == ["dropped", "unknown", "released"]
        assert broker.keeper.cancelled == [HoldId(0xABC, first) for first in (7, 8, 9)]
        assert broker.keeper.targets == [Target("clicks", TOPIC.id, 1)]
        assert broker.sought == [(shard_name(TOPIC.id, 1), False)]

    on_broker(work)


# ---- counts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("undelivered", [False, True])
def test_the_delayed_records_of_a_topic_are_those_of_all_brokers(*, undelivered: bool) -> None:
    async def work(broker: Broker) -> None:
        broker.places = ["b:1", broker.keeper]
        broker.keeper.counts = {
            Target("clicks", TOPIC.id, 1): (4, 70),
            Target("orders", OTHER_ID, 0): (9, 9),
        }
        broker.other.answer = AdminAnswer(waiting=[WireWaiting(partition=0, blocks=2, next_ms=50)], covered=[0])
        ask = DescribeHolds(topic="clicks", topic_id=TOPIC.id, undelivered=undelivered)
        here = WireWaiting(partition=1, blocks=4, next_ms=70)
        there = WireWaiting(partition=0, blocks=2, next_ms=50)
        assert await broker.requests.describe(broker.call(ask)) == AdminAnswer(waiting=[there, here])
        assert broker.other.asked == [msgspec.structs.replace(ask, service_partitions=[0])]
        assert broker.keeper.undelivered is undelivered
        broker.program = BROKER_PROGRAM
        assert await broker.requests.describe(broker.call(ask)) == AdminAnswer(waiting=[here])
        assert len(broker.other.asked) == 1

    on_broker(work)


def test_an_audit_gets_the_units_of_partitions_where_nothing_waits_too() -> None:
    """They prove how many held records the logs of these partitions have."""

    async def work(broker: Broker) -> None:
        waits, done = (Target("clicks", TOPIC.id, partition) for partition in range(2))
        broker.keeper.counts = {waits: (4, 70)}
        broker.keeper.released = {done: UnitCount(3, 9, 2, 5, 1)}
        ask = DescribeHolds(topic="clicks", topic_id=TOPIC.id, undelivered=True, units=True)
        answer = await broker.requests.describe(broker.call(ask))
        units = WireUnits(shard=f"{0xAB:016x}", released=3, released_records=9, done=2, done_records=5, dropped=1)
        assert answer == AdminAnswer(
            waiting=[
                WireWaiting(partition=0, blocks=4, next_ms=70),
                WireWaiting(partition=1, blocks=0, next_ms=0, units=units),
            ]
        )

    on_broker(work)


@pytest.mark.parametrize("seen", ["all", "one", "forwarded"])
def test_a_broker_gives_the_state_of_a_hold_of_another_topic_only_to_those_that_see_all(seen: str) -> None:
    async def work(broker: Broker) -> None:
        broker.places = ["b:1", broker.keeper]
        broker.other.answer = AdminAnswer(holds=["held"], covered=[0])
        ask = DescribeHolds(topic="clicks", topic_id=TOPIC.id, hold=WireHoldId(producer=f"{7:016x}", first=8))
        call = broker.call(ask)
        if seen == "one":
            call = replace(call, access=OneTopic("clicks"))
        elif seen == "forwarded":  # brokers may see all topics, and their clients may not
            ask.of_topic = True
        await broker.requests.describe(call)
        assert broker.keeper.of_topics == [TOPIC.id if seen != "all" else ""]
        assert [each.of_topic for each in broker.other.asked] == [seen != "all"]

    on_broker(work)


@pytest.mark.parametrize("proven", [False, True])
def test_the_delayed_records_of_all_topics_are_summed_with_the_first_due_time(*, proven: bool) -> None:
    def delayed(topic: str, topic_id: str, blocks: int, next_ms: int) -> WireDelayedTopic:
        return WireDelayedTopic(topic=topic, topic_id=topic_id, blocks=blocks, next_ms=next_ms)

    async def work(broker: Broker) -> None:
        broker.places = ["b:1", broker.keeper]
        broker.keeper.counts = {
            Target("orders", OTHER_ID, 0): (1, 0),
            Target("orders", OTHER_ID, 1): (2, 0),
            Target("clicks", TOPIC.id, 0): (3, 40),
            Target("clicks", TOPIC.id, 1): (4, 0),  # its time is not known
        }
        broker.other.answer = AdminAnswer(delayed=[delayed("clicks", TOPIC.id, 5, 60)], covered=[0])
        gone = Target("clicks", GONE_ID, 0)
        broker.keeper.counts[gone] = (100, 1)  # of a deleted topic of this name
        ask = ListDelayed(proven=proven)
        everywhere = [delayed("clicks", TOPIC.id, 12, 40), delayed("orders", OTHER_ID, 3, 0)]
        assert await broker.requests.list_delayed(broker.call(ask)) == AdminAnswer(delayed=everywhere)
        assert broker.other.asked == [ListDelayed(proven=proven, service_partitions=[0])]
        assert broker.keeper.proofs == proven
        broker.program = BROKER_PROGRAM
        here = [delayed("clicks", TOPIC.id, 7, 40), delayed("orders", OTHER_ID, 3, 0)]
        assert await broker.requests.list_delayed(broker.call(ask)) == AdminAnswer(delayed=here)
        assert len(broker.other.asked) == 1

    on_broker(work)
