"""Questions of the live audit to brokers: an answer counts in the next round, a hanging broker delays none."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from memq.audit.finding import Kind
from memq.audit.held import HELD_MS, HeldAnswer, Sought
from memq.audit.live.partition import PartitionAudit
from memq.audit.live.questions.holder_follower import HolderFollower
from memq.audit.minutes import active_ms
from memq.format.pointer import ProducerEnd
from memq.runtime.clock import SystemClock
from memq.runtime.logs import EventLog
from memq.topic import PartitionKey, Topic
from tests.brokers import events_of
from tests.unit.audited import TOPIC, pointer
from tests.unit.blocks import NOW_MS

KEY = (TOPIC.id, 0)
LATER_MS = NOW_MS + active_ms(TOPIC.settings) + HELD_MS + 1


class Brokers:
    """Answers when its gate is open."""

    def __init__(self, answer: HeldAnswer) -> None:
        self.answer = answer
        self.gate = asyncio.Event()
        self.asked: list[list[Sought]] = []

    async def ask(self, topic: Topic, sought: Sequence[Sought]) -> HeldAnswer:
        """See `memq.audit.held.AskHeld`."""
        assert topic == TOPIC
        self.asked.append(list(sought))
        await self.gate.wait()
        return self.answer


def with_a_hole() -> dict[PartitionKey, PartitionAudit]:
    """Return the audit of a partition whose producer ended after ten records that no pointer has."""
    audit = PartitionAudit(TOPIC, 0)
    audit.take_pointer(0, NOW_MS, pointer(kind="opened", broker="one"))
    end = ProducerEnd(producer=5, next_sequence=10, acks=1)
    audit.take_pointer(1, NOW_MS, pointer(kind="ended", ended=(end,), broker="one"))
    audit.settle(LATER_MS)
    return {KEY: audit}


def found(audit: PartitionAudit) -> list[tuple[Kind, int, bool]]:
    return [(each.kind, each.records, bool(each.resolved_ms)) for each in audit.take_findings()]


def test_a_loss_waits_for_the_answer_and_for_the_queue_behind_it(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        audits, brokers = with_a_hole(), Brokers(HeldAnswer(answered=frozenset({"one"})))
        follower = HolderFollower(brokers.ask, EventLog(SystemClock()))
        for _ in range(3):  # the broker hangs, and rounds go on
            follower.ask(audits, again=True)
            await asyncio.sleep(0)
            assert follower.take_answers(audits, LATER_MS) == {}
            audits[KEY].settle(LATER_MS)
        assert brokers.asked == [[Sought(0, 5, ((0, 10),))]], "one question at a time"
        assert found(audits[KEY]) == []
        brokers.gate.set()
        await asyncio.sleep(0)
        assert follower.take_answers(audits, LATER_MS) == {KEY: None}
        assert found(audits[KEY]) == [], "the queue is read first"
        audits[KEY].settle(LATER_MS)
        assert found(audits[KEY]) == [(Kind.LOST, 10, False)]
        assert follower.take_answers(audits, LATER_MS) == {}, "taken once"
        follower.ask(audits, again=True)
        assert len(brokers.asked) == 1, "nothing is open"
        await follower.close()

    asyncio.run(work())
    assert events_of(caplog) == []


def test_a_doubt_is_logged_with_its_reason_and_an_answer_for_a_partition_that_went_is_dropped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work() -> None:
        audits, brokers = with_a_hole(), Brokers(HeldAnswer(failed={"one": "it did not answer"}))
        brokers.gate.set()
        follower = HolderFollower(brokers.ask, EventLog(SystemClock()))
        for present in (audits, {}):
            follower.ask(audits, again=True)
            await asyncio.sleep(0)  # the answer
            await asyncio.sleep(0)  # the end of its task
            follower.take_answers(present, LATER_MS)
        await follower.close()

    asyncio.run(work())
    assert events_of(caplog) == ["audit.held-unknown"]
    assert "broker 'one' may hold them: it did not answer" in caplog.text


def test_unexpected_error_of_a_question_ends_the_audit() -> None:
    async def work() -> None:
        async def ask(topic: Topic, sought: Sequence[Sought]) -> HeldAnswer:
            raise RuntimeError("never")

        audits, follower = with_a_hole(), HolderFollower(ask, EventLog(SystemClock()))
        follower.ask(audits, again=False)
        await asyncio.sleep(0)  # the question
        await asyncio.sleep(0)  # its end
        with pytest.raises(RuntimeError, match="never"):
            follower.take_answers(audits, LATER_MS)

    asyncio.run(work())
