"""Records that no pointer has and a broker may hold: questions, answers, and remaining doubts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from memq.audit.account import NOT_ASKED, Account, Evidence, HeldWord, RecentRanges
from memq.audit.auditor import Auditor
from memq.audit.finding import Kind
from memq.audit.held import HELD_MS, HeldAnswer, Sought, doubt_of
from memq.audit.holders import Holders
from memq.audit.pointer_facts import PointerFacts, RunningTotals
from memq.errors import MemqError, ProtocolError, TimedOutError, UnreachableError
from memq.format.pointer import ProducerEnd
from memq.format.ranges import RangeSet
from memq.limits import SOUGHT_RANGES_MAX
from memq.notification import Span
from memq.protocol.admin_messages import AdminAnswer, AdminRequest, DescribeHeld, WireRecords
from memq.protocol.wire_types import WireBroker
from memq.topic import Topic
from tests.unit.audited import TOPIC, data_pointer, pointer
from tests.unit.blocks import NOW_MS

ON_DISK = msgspec.structs.replace(TOPIC, settings=msgspec.structs.replace(TOPIC.settings, ack1="disk"))
LATE_MS = TOPIC.settings.late_ms


def account(acks: int | None, *delivered: tuple[int, int], end: int = 20) -> Account:
    books = Account(RecentRanges(1_000))
    for first, next_ in delivered:
        books.deliver(first, next_, 1)
    books.close(ProducerEnd(producer=5, next_sequence=end, acks=acks), 2)
    return books


def facts(*pointers: Any) -> PointerFacts:
    known = PointerFacts(totals=RunningTotals(0))
    for each in pointers:
        known.meet(each, NOW_MS)
    return known


def opened(epoch: int, broker: str, kind: str = "opened") -> Any:
    return pointer(kind=kind, epoch=epoch, broker=broker)


# ---- the account ---------------------------------------------------------------------------------


@pytest.mark.parametrize("acks", [None, 0, 1, 3])
def test_only_what_was_acked_with_all_is_lost_unasked(acks: int | None) -> None:
    weak, sure = account(acks, (0, 10)), account(2, (0, 10))
    found = weak.settle(0, 5, Evidence())
    assert (found.lost, found.held, found.unproven, found.doubt) == ((), (), ((10, 20),), NOT_ASKED.doubt)
    assert weak.sought(Evidence()) == ((10, 20),)
    assert not found.clean
    found = sure.settle(0, 5, Evidence())
    assert (found.lost, found.unproven, found.doubt, sure.sought(Evidence())) == (((10, 20),), (), "", ())


def test_held_and_unasked_records_are_not_lost() -> None:
    books = account(1, (0, 10))
    word = HeldWord(RangeSet([(10, 18)]), RangeSet([(5, 13)]))
    found = books.settle(0, 5, Evidence(word=word))
    assert (found.held, found.lost, found.unproven) == (((10, 13),), ((13, 18),), ((18, 20),))
    assert found.doubt == "its producer ended while the audit ran"
    assert not found.clean
    found = books.settle(0, 5, Evidence(word=HeldWord(RangeSet([(10, 20)]), RangeSet([(10, 20)]))))
    assert (found.held, found.lost, found.unproven, found.clean) == (((10, 20),), (), (), False)


def test_a_doubt_holds_for_all_that_no_broker_named() -> None:
    found = account(1, (0, 10)).settle(0, 5, Evidence(word=HeldWord(RangeSet([(10, 20)]), RangeSet([(10, 12)]), "why")))
    assert (found.held, found.lost, found.unproven, found.doubt) == (((10, 12),), (), ((12, 20),), "why")


def test_nothing_is_sought_that_is_unproven_anyhow() -> None:
    assert account(1, (0, 10)).sought(Evidence(unread=True)) == ()
    assert account(1, (0, 20)).sought(Evidence()) == ()
    silent = Account(RecentRanges(1_000))
    silent.deliver(5, 9, 1)
    assert silent.sought(Evidence()) == ()


# ---- the auditor ---------------------------------------------------------------------------------


def audited(answer: HeldAnswer, *more: Any) -> Any:
    """Return the verdict on a hole of ten records, with what came to the queue after the answer."""
    auditor = Auditor(TOPIC)
    auditor.open_partition(0, Span(0, 2))
    end = ProducerEnd(producer=5, next_sequence=10, acks=1)
    auditor.take_control(0, 0, NOW_MS, opened(1, "one"))
    auditor.take_control(0, 1, NOW_MS, pointer(kind="ended", ended=(end,), broker="one"))
    now_ms = NOW_MS + HELD_MS
    sought = auditor.sought(now_ms)
    assert sought == [Sought(0, 5, ((0, 10),))]
    assert auditor.sought_in(sought) == [0]
    assert auditor.verdict(now_ms).finding(Kind.LOST).count == 0
    auditor.take_answer(sought, answer)
    auditor.open_partition(0, Span(2, 2 + len(more)))
    for offset, each in enumerate(more):
        auditor.take_control(0, 2 + offset, NOW_MS, each)
    return auditor.verdict(now_ms)


def test_the_verdict_names_what_is_held_what_is_in_doubt_and_what_is_lost() -> None:
    answered = frozenset({"one"})
    found = audited(HeldAnswer({(0, 5): RangeSet([(2, 5)])}, answered))
    assert [(each.kind, each.count) for each in found.findings] == [(Kind.LOST, 7), (Kind.HELD, 3)]
    assert (found.coverage.partitions[0].begin, found.coverage.partitions[0].end) == (0, 2)
    assert found.to_json()["producers"][0]["held"] == {"records": 3, "ranges": [[2, 5]]}
    found = audited(HeldAnswer({}, frozenset(), {"one": "it did not answer"}))
    (hole,) = found.findings
    assert (hole.kind, hole.count) == (Kind.HOLE, 10)
    assert hole.findings[0].cause == "broker 'one' may hold them: it did not answer"


def test_an_end_that_came_after_the_question_proves_no_loss() -> None:
    later = pointer(kind="ended", ended=(ProducerEnd(producer=5, next_sequence=12, acks=1),), broker="one")
    other = pointer(kind="ended", ended=(ProducerEnd(producer=6, next_sequence=4, acks=1),), broker="one")
    found = audited(HeldAnswer({}, frozenset({"one"})), later, other)
    assert [(each.kind, each.count) for each in found.findings] == [(Kind.LOST, 10), (Kind.HOLE, 6)]
    assert [finding.ranges for finding in found.finding(Kind.HOLE).findings] == [((10, 12),), ((0, 4),)]


# ---- doubts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "topic", "age_ms", "doubt"),
    [
        (HeldAnswer(answered=frozenset({"one", "two"})), TOPIC, HELD_MS, ""),
        (HeldAnswer(answered=frozenset({"one"})), TOPIC, HELD_MS, ""),
        (HeldAnswer(answered=frozenset({"one"})), TOPIC, HELD_MS - 1, "broker 'two' may hold them, and is not there"),
        (HeldAnswer(answered=frozenset({"one"})), ON_DISK, HELD_MS, "broker 'two' may hold them, and is not there"),
        (HeldAnswer(failed={"one": "x", "two": "y"}), TOPIC, HELD_MS, "broker 'one' may hold them: x; broker 'two'"),
        (HeldAnswer(error="away"), TOPIC, HELD_MS, "brokers were not asked whether they hold them: away"),
        (HeldAnswer(answered=frozenset({"one", "two"})), ON_DISK, LATE_MS - 1, "a pointer of an epoch that was lost"),
        (HeldAnswer(answered=frozenset({"one", "two"})), ON_DISK, LATE_MS, ""),
    ],
)
def test_a_broker_that_said_nothing_is_doubted_as_long_as_it_may_hold_anything(
    answer: HeldAnswer, topic: Topic, age_ms: int, doubt: str
) -> None:
    known = facts(opened(1, "one"), opened(2, "two"), opened(2, "two", "data"))
    found = doubt_of(answer, known, topic, NOW_MS, NOW_MS + age_ms)
    assert found.startswith(doubt) if doubt else not found


def test_an_epoch_that_was_closed_leaves_nothing_and_others_of_its_broker_may() -> None:
    known = facts(opened(1, "one"), opened(2, "two"), opened(2, "two", "closed"), opened(3, "three"))
    assert known.holders() == ["one", "three"]
    assert known.may_be_late()
    known = facts(opened(1, "one"), opened(1, "one", "closed"), opened(2, "two"), opened(2, "two", "data"))
    assert (known.holders(), known.may_be_late()) == (["two"], False)


def test_a_doubt_names_three_brokers() -> None:
    known = facts(*(opened(number, f"b{number}") for number in range(1, 6)))
    found = doubt_of(HeldAnswer(), known, ON_DISK, NOW_MS, NOW_MS)
    assert found.count("is not there") == 3
    assert found.endswith("; and 2 more")


# ---- the question --------------------------------------------------------------------------------


class Peers:
    """Brokers that answer as they are told to, by their address."""

    def __init__(self, **answers: Any) -> None:
        self._answers = answers
        self.asked: list[DescribeHeld] = []
        self.holders = Holders(cast(Any, self), cast(Any, self._any))

    async def _any(self, api: int, message: AdminRequest, answer: type, *, timeout_s: float) -> AdminAnswer:
        if "any" in self._answers:
            raise cast(MemqError, self._answers["any"])
        return AdminAnswer(brokers=[WireBroker(broker=name, address=f"{name}:1") for name in self._answers])

    async def session(self, address: tuple[str, int]) -> Any:
        answer = self._answers[address[0]]
        if isinstance(answer, UnreachableError):
            raise answer

        async def request(api: int, message: AdminRequest, kind: type, *, timeout_s: float) -> AdminAnswer:
            assert isinstance(message.ask, DescribeHeld)
            assert message.ask.broker == address[0]
            self.asked.append(message.ask)
            if isinstance(answer, MemqError):
                raise answer
            return cast(AdminAnswer, answer)

        return SimpleNamespace(link=SimpleNamespace(request=request))

    def ask(self, sought: Sequence[Sought]) -> HeldAnswer:
        return asyncio.run(self.holders.ask(TOPIC, sought))


def holding(*ranges: tuple[int, int], producer: str = "0" * 15 + "5", unread: Sequence[str] = ()) -> AdminAnswer:
    records = [WireRecords(partition=0, producer=producer, ranges=list(ranges))]
    return AdminAnswer(held=records, unread=list(unread))


def test_all_brokers_are_asked_and_each_failure_has_its_reason() -> None:
    peers = Peers(
        one=holding((0, 2)),
        two=holding((2, 4), unread=["segment a"]),
        three=UnreachableError("refused"),
        four=ProtocolError("bad AdminRequest message"),
        five=TimedOutError("no answer"),
        six=AdminAnswer(),
        seven=holding((5, 4), (7, 8)),
        eight=holding((0, 9), producer="wings"),
    )
    found = peers.ask([Sought(0, 5, ((0, 10),))])
    assert {source: list(ranges) for source, ranges in found.held.items()} == {(0, 5): [(0, 4), (7, 8)]}
    assert found.answered == {"one", "seven", "eight"}
    assert found.failed == {
        "two": "segment a",
        "three": "it did not answer: refused",
        "four": "it is of a version that does not answer that: bad AdminRequest message",
        "five": "it did not answer: no answer",
        "six": "its answer has nothing of that",
    }
    assert Peers(any=UnreachableError("away")).ask([]).error == "away"


def test_much_is_asked_in_several_requests() -> None:
    peers = Peers(one=holding())
    ranges = tuple((2 * number, 2 * number + 1) for number in range(SOUGHT_RANGES_MAX + 1))
    peers.ask([Sought(0, 5, ranges[:-3]), Sought(1, 6, ranges[:4])])
    parts = [[(each.partition, each.producer, len(each.ranges)) for each in ask.sought] for ask in peers.asked]
    five, six = "0" * 15 + "5", "0" * 15 + "6"
    assert parts == [[(0, five, SOUGHT_RANGES_MAX - 2), (1, six, 2)], [(1, six, 2)]]
    assert peers.asked[1].sought[0].ranges == [*ranges[2:4]]


def test_a_pointer_of_data_names_its_owner_too() -> None:
    assert facts(data_pointer([(5, 0, 3)], broker="one")).holders() == ["one"]
    assert facts(pointer(kind="opened")).holders() == []
