"""Requests about transactions at a broker: what it refuses, and what it asks the coordinator."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from memq.broker.api import Call
from memq.broker.api import transaction_requests as requests_module
from memq.broker.api.transaction_requests import TransactionRequests
from memq.broker.services import BROKER_PROGRAM
from memq.errors import (
    InvalidNameError,
    InvalidRequestError,
    MemqError,
    NotFoundError,
    NotReadyError,
    ProtocolError,
    TimedOutError,
    TooLargeError,
    TopicSealedError,
    TransactionAbortedError,
    UnreachableError,
)
from memq.format.blocks.builder import BlockBuilder
from memq.format.blocks.header import scope_of
from memq.format.held_object import HoldId, Target
from memq.groups.remote import wire_of
from memq.holds.storing import NewHold
from memq.limits import HOLDS_PER_REQUEST_MAX, TRANSACTION_TIMEOUT_MS_MAX, TRANSACTION_TIMEOUT_MS_MIN
from memq.protocol.admin_messages import AdminAnswer, AdminRequest
from memq.protocol.connection import ANONYMOUS
from memq.protocol.frames import Api
from memq.protocol.link import Link
from memq.protocol.transaction_messages import (
    AnswerUndecided,
    AskUndecided,
    AwaitTransaction,
    BeginTransactions,
    EndTransaction,
    HoldTransaction,
    ListTransactions,
    PrepareTransaction,
    SettleTransaction,
    WireOpenTransaction,
    WireQuestion,
    WireTransaction,
    WireTransactionBlock,
)
from memq.topic import STATE_TOPIC, Committed, Position, ReadPartition, Topic, equal_slots
from memq.transactions.coordinator import Question, TransactionCoordinator, TransactionState
from memq.transactions.machine import PositionMoves, PreparedTransaction, TransactionalId, lane_of, moves_of
from tests.access import EVERYTHING
from tests.skipping_loop import now_s, run_skipping, skip

TOPIC = Topic(name="clicks", id="ab" * 16, created_ms=0, partitions=equal_slots(2))
MEMBER_S = 15.0  # a member waits twice as long for its questions
PAY = TransactionalId("pay", "g")
NAMED = WireTransaction(name="pay", group="g", instance=77, number=3)
AT = {ReadPartition("clicks", TOPIC.id, number): Committed(Position(number, 5 + number)) for number in range(2)}


class Coordinator(TransactionCoordinator):
    """Notes its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.committed_before = False
        self.open: list[TransactionState] = []
        self.asked: list[Question] = []

    async def begin(self, id_: TransactionalId, token: int, timeout_ms: int) -> int:
        self.calls.append(("begin", id_, token, timeout_ms))
        return 77

    async def hold(self, id_: TransactionalId, instance: int, number: int, blocks: Sequence[NewHold]) -> None:
        self.calls.append(("hold", id_, instance, number, *blocks))

    async def commit(
        self, id_: TransactionalId, instance: int, number: int, blocks: int, moves: PositionMoves | None
    ) -> None:
        self.calls.append(("commit", id_, instance, number, blocks, moves))

    async def abort(self, id_: TransactionalId, instance: int, number: int, reason: str) -> bool:
        self.calls.append(("abort", id_, instance, number, reason))
        return not self.committed_before

    async def settle(self, id_: TransactionalId, *, commit: bool, lane: str = "") -> None:
        self.calls.append(("settle", id_, commit, lane))

    async def prepare(self, id_: TransactionalId, instance: int, number: int, blocks: int, **about: Any) -> None:
        self.calls.append(("prepare", id_, instance, number, blocks, about))

    def questions(self, producer_group: str, transactional_id: str = "") -> list[Question]:
        self.calls.append(("questions", producer_group, transactional_id))
        return self.asked

    async def until_visible(self, instance: int, number: int) -> bool:
        self.calls.append(("until visible", instance, number))
        return not self.committed_before

    async def answer(
        self, id_: TransactionalId, instance: int, number: int, *, producer_group: str, commit: bool
    ) -> bool:
        self.calls.append(("answer", id_, instance, number, producer_group, commit))
        return not self.committed_before

    async def transactions(self, *, proven: bool = True) -> list[TransactionState]:
        self.calls.append(("transactions", proven))
        return self.open


class OtherBroker(Link):
    """A link to another broker."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.away = False
        self.silent = False
        self.error: MemqError = UnreachableError("away")
        self.answer = AdminAnswer(transactional=5, committed=True)

    async def request(self, api: Api, message: msgspec.Struct, answer: Any, **options: Any) -> Any:
        assert (api, answer) == (Api.ADMIN, AdminAnswer)
        assert isinstance(message, AdminRequest)
        self.asked.append(message.ask)
        if self.away:
            raise self.error
        if self.silent:
            await skip(options["timeout_s"])
            raise TimedOutError("silent")
        return self.answer


class Broker:
    """A broker whose coordinator, or that of another one, has the producer."""

    transactions = "the kind"

    def __init__(self) -> None:
        self.topic = TOPIC
        self.coordinator = Coordinator()
        self.other = OtherBroker()
        self.third: OtherBroker | None = None
        self.home: Coordinator | OtherBroker = self.coordinator
        self.settings = SimpleNamespace(transaction_check_interval_ms=60_000)
        self.opens = False  # one is being opened here, and its queue is away
        self.homeless = False  # a service partition has no owner now
        self.sought: list[tuple[str, bool]] = []
        self.program = "a client"
        self.requests = TransactionRequests(cast(Any, self), cast(Any, self), cast(Any, self))

    async def current_topic(self, name: str, topic_id: str) -> Topic:
        if name == "deleted":
            raise NotFoundError("topic 'deleted' does not exist")
        assert (name, topic_id) == (self.topic.name, self.topic.id)
        return self.topic

    async def service_or_link(self, kind: object, name: str, *, forwarded: bool) -> Coordinator | OtherBroker:
        assert kind == self.transactions
        self.sought.append((name, forwarded))
        return self.home

    async def service_topic(self, *, create: bool) -> Topic:
        assert not create
        return Topic(name=STATE_TOPIC, id=TOPIC.id, created_ms=0, partitions=equal_slots(3 if self.third else 2))

    async def service_in(self, kind: object, topic: Topic, partition: int) -> Coordinator | str:
        assert (kind, topic.name) == (self.transactions, STATE_TOPIC)
        if self.homeless and not partition:
            raise NotReadyError("no owner")
        if self.opens and not partition:
            await skip(1_000)
        return ("b:1", self.coordinator, "c:1")[partition]

    def open_here(self, kind: object) -> list[Coordinator]:
        assert kind == self.transactions
        return [self.coordinator]

    async def link(self, address: str) -> OtherBroker:
        found = {"b:1": self.other, "c:1": self.third}[address]
        assert found is not None
        return found

    async def ask(self, ask: Any) -> AdminAnswer:
        call = Call(cast(Any, SimpleNamespace(program=self.program)), ANONYMOUS, 0, ask, access=EVERYTHING)
        handlers: dict[type, Callable[[Any], Awaitable[Any]]] = {
            BeginTransactions: self.requests.begin,
            HoldTransaction: self.requests.hold,
            EndTransaction: self.requests.end,
            ListTransactions: self.requests.list_open,
            SettleTransaction: self.requests.settle,
            PrepareTransaction: self.requests.prepare,
            AskUndecided: self.requests.ask,
            AnswerUndecided: self.requests.answer,
            AwaitTransaction: self.requests.until_visible,
        }
        answer = await handlers[type(ask)](call)
        assert isinstance(answer, AdminAnswer)
        return answer


def begin(name: str = "pay", group: str = "g", timeout_ms: int = 7_000) -> BeginTransactions:
    return BeginTransactions(name=name, group=group, token="00000000000000ff", timeout_ms=timeout_ms)


def block(partition: int, producer: int = 9, topic: Topic = TOPIC) -> WireTransactionBlock:
    builder = BlockBuilder()
    builder.append(b"value", None, None, 5, None)
    scope = scope_of(topic.id_bytes, abs(partition))
    data = bytes(builder.seal(producer_id=producer, first_sequence=4, scope=scope, now_ms=1, codec="none").data)
    return WireTransactionBlock(topic=topic.name, topic_id=topic.id, partition=partition, block=data)


def hold(*blocks: WireTransactionBlock) -> HoldTransaction:
    return HoldTransaction(transaction=NAMED, blocks=list(blocks))


def end(*, commit: bool, blocks: int = 2, number: int = 3, group: str = "g") -> EndTransaction:
    named = msgspec.structs.replace(NAMED, number=number, group=group)
    return EndTransaction(transaction=named, commit=commit, blocks=blocks)


def moving(
    before: dict[ReadPartition, Committed], after: dict[ReadPartition, Committed], group: str = "g"
) -> EndTransaction:
    ask = end(commit=True, group=group)
    ask.member, ask.generation = "m", 6
    ask.before = [wire_of(partition, at) for partition, at in before.items()]
    ask.after = [wire_of(partition, at) for partition, at in after.items()]
    return ask


def on_broker(work: Callable[[Broker], Awaitable[None]]) -> None:
    async def run() -> None:
        await skip(1)
        await work(Broker())

    run_skipping(run())


def test_a_coordinator_gets_each_request_of_its_producers() -> None:
    async def work(broker: Broker) -> None:
        assert (await broker.ask(begin())).transactional == 77
        await broker.ask(hold(block(1)))
        assert (await broker.ask(end(commit=True))).committed
        assert not (await broker.ask(end(commit=False))).committed
        broker.coordinator.committed_before = True
        assert (await broker.ask(end(commit=False))).committed
        await broker.ask(SettleTransaction(name="pay", group="g", commit=True, transaction="77.3"))
        rolled_back = ("abort", PAY, 77, 3, "was rolled back by its producer")
        held = NewHold(HoldId(9, 4), 5, Target("clicks", TOPIC.id, 1), lane_of(77, 3), 0, block(1).block)
        assert broker.coordinator.calls == [
            ("begin", PAY, 255, 7_000),
            ("hold", PAY, 77, 3, held),
            ("commit", PAY, 77, 3, 2, None),
            rolled_back,
            rolled_back,
            ("settle", PAY, True, "77.3"),
        ]
        assert broker.sought == [("g", False)] * 6

    on_broker(work)


def test_requests_for_another_broker_are_forwarded_once() -> None:
    async def work(broker: Broker) -> None:
        broker.home = broker.other
        asks = [
            begin(),
            hold(block(1)),
            end(commit=True),
            end(commit=False),
            SettleTransaction(name="pay", group="g", commit=False),
        ]
        for ask in asks:
            assert await broker.ask(ask) == broker.other.answer
        assert (broker.other.asked, broker.coordinator.calls) == (asks, [])
        broker.home, broker.program = broker.coordinator, BROKER_PROGRAM
        await broker.ask(begin(group=""))
        assert broker.sought[-1] == ("pay", True), "without a group, the name decides"

    on_broker(work)


def test_names_and_times_out_of_bounds_are_refused() -> None:
    async def work(broker: Broker) -> None:
        for ask in (begin(name=""), begin(name="a/b/c"), begin(group="a/b/c"), begin(group="_memq-x")):
            with pytest.raises(InvalidNameError):
                await broker.ask(ask)
        for timeout_ms in (TRANSACTION_TIMEOUT_MS_MIN - 1, TRANSACTION_TIMEOUT_MS_MAX + 1):
            with pytest.raises(InvalidRequestError, match="time-out of transactions"):
                await broker.ask(begin(timeout_ms=timeout_ms))
        for wrong in (end(commit=True, number=0), end(commit=False, number=-1), end(commit=True, blocks=-1)):
            with pytest.raises(InvalidRequestError, match="is not possible"):
                await broker.ask(wrong)
        assert broker.coordinator.calls == []
        for timeout_ms in (TRANSACTION_TIMEOUT_MS_MIN, TRANSACTION_TIMEOUT_MS_MAX):
            await broker.ask(begin(timeout_ms=timeout_ms))
        await broker.ask(end(commit=True, number=1, blocks=0))
        assert len(broker.coordinator.calls) == 3

    on_broker(work)


@pytest.mark.parametrize(
    ("topic", "partition", "error"),
    [
        ({}, 2, NotFoundError),
        ({}, -1, NotFoundError),
        ({"sealed_ms": 9}, 0, TopicSealedError),
        ({"name": STATE_TOPIC}, 0, InvalidRequestError),
    ],
)
def test_a_transaction_writes_to_no_other_partitions(
    topic: dict[str, Any], partition: int, error: type[MemqError]
) -> None:
    async def work(broker: Broker) -> None:
        broker.topic = msgspec.structs.replace(TOPIC, **topic)
        with pytest.raises(error) as raised:
            await broker.ask(hold(block(partition, topic=broker.topic)))
        assert raised.type is error
        assert broker.sought == []

    on_broker(work)


def test_a_request_has_a_bound_on_blocks() -> None:
    async def work(broker: Broker) -> None:
        with pytest.raises(TooLargeError, match=f"{HOLDS_PER_REQUEST_MAX} are allowed"):
            await broker.ask(hold(*[block(0)] * (HOLDS_PER_REQUEST_MAX + 1)))
        await broker.ask(hold(*[block(0)] * HOLDS_PER_REQUEST_MAX))
        assert len(broker.coordinator.calls) == 1

    on_broker(work)


# ---- positions -------------------------------------------------------------------------------------


def test_positions_of_a_group_move_with_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(broker: Broker) -> None:
        monkeypatch.setattr(requests_module, "MOVED_POSITIONS_MAX", 2)
        first = dict(list(AT.items())[:1])
        await broker.ask(moving(first, AT))
        ((*call, moves),) = broker.coordinator.calls
        assert call == ["commit", PAY, 77, 3, 2]
        assert moves == moves_of("m", 6, first, AT)

    on_broker(work)


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("no group", "has no group"),
        ("too many", "moves 2 positions, 1 are allowed"),
        ("no new one", "a former position without a new one"),
        ("partition", "has no read partition 2"),
        ("topic", "'deleted' does not exist"),
    ],
)
def test_a_commit_with_other_positions_is_a_roll_back(case: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if an earlier try was committed: the coordinator says so."""

    async def work(broker: Broker) -> None:
        first, second = ({partition: at} for partition, at in AT.items())
        beyond = {ReadPartition("clicks", TOPIC.id, 2): Committed(Position(2, 5))}
        gone = {ReadPartition("deleted", TOPIC.id, 0): Committed(Position(0, 5))}
        if case == "too many":
            monkeypatch.setattr(requests_module, "MOVED_POSITIONS_MAX", 1)
        asks = {
            "no group": moving(first, first, group=""),
            "too many": moving(first, AT),
            "no new one": moving(AT, second),
            "partition": moving({}, beyond),
            "topic": moving({}, gone),
        }
        ask = asks[case]
        with pytest.raises(TransactionAbortedError, match=text):
            await broker.ask(ask)
        ((name, *_, reason),) = broker.coordinator.calls
        assert name == "abort"
        assert text in reason
        broker.coordinator.committed_before = True
        assert (await broker.ask(ask)).committed

    on_broker(work)


def test_a_producer_waits_until_its_records_are_visible() -> None:
    async def work(broker: Broker) -> None:
        ask = AwaitTransaction(transaction=NAMED)
        assert (await broker.ask(ask)).visible
        broker.coordinator.committed_before = True
        assert not (await broker.ask(ask)).visible
        assert broker.coordinator.calls == [("until visible", 77, 3)] * 2
        broker.home = broker.other
        assert await broker.ask(ask) == broker.other.answer

    on_broker(work)


# ---- operators -------------------------------------------------------------------------------------


@pytest.mark.parametrize("proven", [False, True])
def test_the_open_transactions_are_those_of_all_brokers(*, proven: bool) -> None:
    async def work(broker: Broker) -> None:
        broker.coordinator.open = [
            TransactionState(TransactionalId("pay", "h"), 7, 3, 100, 5_000, {"clicks": 2}),
            TransactionState(TransactionalId("pay", "g"), 8, 4, 200, 6_000, {}),
        ]
        there = WireOpenTransaction(
            name="book", group="z", instance=1, number=1, open_ms=1, timeout_ms=1, blocks={"orders": 1}
        )
        broker.other.answer = AdminAnswer(transactions=[there], covered=[0])
        ask = ListTransactions(proven=proven)
        found = (await broker.ask(ask)).transactions
        assert [(each.name, each.group) for each in found] == [("book", "z"), ("pay", "g"), ("pay", "h")]
        last = found[2]
        assert (last.instance, last.number, last.open_ms, last.timeout_ms, last.blocks) == (
            *(7, 3, 100, 5_000),
            {"clicks": 2},
        )
        named = ListTransactions(proven=proven, service_partitions=[0])
        assert (broker.coordinator.calls, broker.other.asked) == ([("transactions", proven)], [named])
        broker.program = BROKER_PROGRAM
        assert len((await broker.ask(ask)).transactions) == 2
        assert len(broker.other.asked) == 1

    on_broker(work)


# ---- prepared transactions -------------------------------------------------------------------------

ALONE = TransactionalId("pay", "")


def prepare(**changes: Any) -> PrepareTransaction:
    named = msgspec.structs.replace(NAMED, group="")
    given = {"transaction": named, "blocks": 2, "producer_group": "shop", "note": b"order 7", "began_ms": 900}
    return PrepareTransaction(**{**given, **changes})


def test_a_coordinator_gets_each_request_about_prepared_transactions() -> None:
    async def work(broker: Broker) -> None:
        await broker.ask(prepare())
        ask = AnswerUndecided(transaction=prepare().transaction, producer_group="shop", commit=True)
        assert (await broker.ask(ask)).committed
        broker.coordinator.committed_before = True
        assert not (await broker.ask(ask)).committed
        about = {"producer_group": "shop", "note": b"order 7", "began_ms": 900}
        answered = ("answer", ALONE, 77, 3, "shop", True)
        assert broker.coordinator.calls == [("prepare", ALONE, 77, 3, 2, about), answered, answered]
        assert broker.sought == [("pay", False)] * 3
        broker.home = broker.other
        for each in (prepare(), ask):
            assert await broker.ask(each) == broker.other.answer
        assert broker.other.asked == [prepare(), ask]

    on_broker(work)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"transaction": NAMED}, InvalidRequestError),
        ({"transaction": msgspec.structs.replace(NAMED, group="", number=0)}, InvalidRequestError),
        ({"blocks": -1}, InvalidRequestError),
        ({"began_ms": -1}, InvalidRequestError),
        ({"began_ms": 1 << 53}, InvalidRequestError),
        ({"producer_group": ""}, InvalidNameError),
        ({"producer_group": "a/b/c"}, InvalidNameError),
        ({"note": b"x" * 1_025}, TooLargeError),
    ],
)
def test_a_prepare_out_of_bounds_is_refused(changes: dict[str, Any], error: type[MemqError]) -> None:
    async def work(broker: Broker) -> None:
        with pytest.raises(error):
            await broker.ask(prepare(**changes))
        assert broker.coordinator.calls == []
        await broker.ask(prepare(blocks=0, began_ms=0, note=b"x" * 1_024))
        assert len(broker.coordinator.calls) == 1

    on_broker(work)


def test_a_member_of_a_producer_group_gets_the_questions_of_all_brokers() -> None:
    async def work(broker: Broker) -> None:
        asked = PreparedTransaction(ALONE, 77, 3, 2, 7_000, "shop", b"order 7", 900, tries=2)
        broker.coordinator.asked = [Question(asked, ("clicks", "orders"))]
        here = WireQuestion(
            transaction=prepare().transaction, topics=["clicks", "orders"], note=b"order 7", began_ms=900, tries=2
        )
        there = msgspec.structs.replace(here, tries=1)
        broker.other.answer = AdminAnswer(questions=[there])
        ask = AskUndecided(producer_group="shop", transactional_id="shop-1")
        found = await broker.ask(ask)
        assert (found.questions, found.ask_again_ms) == ([there, here], 5_000)
        assert (broker.other.asked, broker.coordinator.calls) == ([ask], [("questions", "shop", "shop-1")])
        broker.settings.transaction_check_interval_ms = 2_000
        broker.other.away = True
        found = await broker.ask(ask)
        assert (found.questions, found.ask_again_ms) == ([here], 500), "those of a lost broker wait"
        broker.homeless, broker.other.away = True, False
        assert (await broker.ask(ask)).questions == [here]
        broker.homeless, broker.other.away, broker.program = False, False, BROKER_PROGRAM
        assert (await broker.ask(ask)).questions == [here]
        assert len(broker.other.asked) == 2, "a broker asks no third one"
        with pytest.raises(InvalidNameError):
            await broker.ask(AskUndecided(producer_group=""))

    on_broker(work)


def test_a_member_gets_the_questions_of_the_others_although_a_broker_hangs() -> None:
    """Each broker gives its question once. So the member must get the answer before it gives up."""

    async def work(broker: Broker) -> None:
        there = WireQuestion(transaction=prepare().transaction, topics=[], note=b"", began_ms=900, tries=1)
        broker.other.answer = AdminAnswer(questions=[there])
        broker.third = OtherBroker()
        broker.third.silent = True
        began_s = now_s()
        assert (await broker.ask(AskUndecided(producer_group="shop"))).questions == [there]
        assert now_s() - began_s < MEMBER_S
        broker.third.silent, broker.opens = False, True
        broker.third.answer = AdminAnswer(questions=[there])
        began_s = now_s()
        assert (await broker.ask(AskUndecided(producer_group="shop"))).questions == [there]
        assert now_s() - began_s < MEMBER_S
        broker.third.silent, broker.opens = True, False
        broker.other.silent = True
        began_s = now_s()
        assert (await broker.ask(AskUndecided(producer_group="shop"))).questions == []
        assert now_s() - began_s < MEMBER_S, "both are waited for at once"

    on_broker(work)


def test_a_member_gets_the_questions_of_the_others_although_a_broker_is_of_an_earlier_release() -> None:
    async def work(broker: Broker) -> None:
        broker.coordinator.asked = [
            Question(PreparedTransaction(ALONE, 77, 3, 2, 7_000, "shop", b"", 900, tries=1), ())
        ]
        broker.other.away, broker.other.error = True, ProtocolError("unknown request")
        (found,) = (await broker.ask(AskUndecided(producer_group="shop"))).questions
        assert found.transaction.number == 3

    on_broker(work)


def test_an_operator_sees_which_transactions_are_prepared_and_parked() -> None:
    async def work(broker: Broker) -> None:
        parked = PreparedTransaction(ALONE, 77, 3, 2, 7_000, "shop", b"", 900, tries=15, parked=True)
        broker.coordinator.open = [TransactionState(ALONE, 77, 3, 100, 5_000, {}, parked)]
        (shown,) = (await broker.ask(ListTransactions())).transactions
        assert (shown.producer_group, shown.tries, shown.parked) == ("shop", 15, True)

    on_broker(work)
