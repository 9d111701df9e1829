"""Questions of the live audit for ends of logs: an owner that hangs or fails delays nothing else."""

from __future__ import annotations

import asyncio

import pytest

from memq.audit.live.partition import PartitionAudit
from memq.audit.live.partition_state import ReceivedReport
from memq.audit.live.questions import end_follower
from memq.audit.live.questions.end_follower import EndFollower
from memq.errors import QueueError
from memq.format.report import ReportPart
from memq.runtime.clock import SystemClock
from memq.runtime.logs import EventLog
from memq.topic import PartitionKey, ReadPartition, Topic, TopicSettings, equal_slots
from tests.unit.blocks import NOW_MS
from tests.unit.live_audit_harness import PRODUCER, span

TOPIC = Topic(name="clicks", id="0a" * 16, created_ms=0, settings=TopicSettings(), partitions=equal_slots(2))
MISSING = {PRODUCER: ((0, 10),)}


def audit_with_a_hole(number: int) -> PartitionAudit:
    """Return an audit that misses ten acked records."""
    audit = PartitionAudit(TOPIC, number)
    part = ReportPart(topic="clicks", topic_id=TOPIC.id, partition=number, spans=(span("acked", (0, 10)),))
    audit.add_report(ReceivedReport(1, None, part, NOW_MS))
    audit.settle(NOW_MS)
    return audit


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_an_end_is_asked_for_once_at_a_time_and_carries_what_was_missing() -> None:
    async def work() -> None:
        gate, asked = asyncio.Event(), list[int]()

        async def ask(_topic: Topic, log: ReadPartition) -> int:
            asked.append(log.partition)
            await gate.wait()
            return 7

        audits: dict[PartitionKey, PartitionAudit] = {
            (TOPIC.id, 0): audit_with_a_hole(0),
            (TOPIC.id, 1): PartitionAudit(TOPIC, 1),
        }
        follower = EndFollower(ask, EventLog(SystemClock()))
        for _ in range(3):
            follower.ask(audits)
            await turns()
            assert follower.take_answers() == {}
        assert asked == [0]
        gate.set()
        await turns()
        ((log, proved),) = follower.take_answers().items()
        assert (log.partition, proved.end, proved.missing) == (0, 7, {(TOPIC.id, 0): MISSING})
        assert follower.take_answers() == {}, "taken once"
        await follower.close()

    asyncio.run(work())


def test_an_owner_that_fails_or_is_silent_is_asked_again_and_the_other_log_has_its_end() -> None:
    async def work() -> None:
        answers: dict[int, int | QueueError] = {0: QueueError("no leader"), 1: 5}

        async def ask(_topic: Topic, log: ReadPartition) -> int:
            answer = answers[log.partition]
            if isinstance(answer, QueueError):
                raise answer
            return answer

        audits: dict[PartitionKey, PartitionAudit] = {
            (TOPIC.id, number): audit_with_a_hole(number) for number in range(2)
        }
        follower = EndFollower(ask, EventLog(SystemClock()))
        for answer, proved in ((QueueError("no leader"), [1]), (-1, [1]), (3, [0, 1])):
            answers[0] = answer
            follower.ask(audits)
            await turns()
            assert [log.partition for log in follower.take_answers()] == proved
        await follower.close()

    asyncio.run(work())


def test_owners_that_never_answer_leave_their_turn_to_those_of_other_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        asked = list[int]()

        async def ask(_topic: Topic, log: ReadPartition) -> int:
            asked.append(log.partition)
            return -1

        monkeypatch.setattr(end_follower, "LOGS_AT_ONCE_MAX", 1)
        audits: dict[PartitionKey, PartitionAudit] = {
            (TOPIC.id, number): audit_with_a_hole(number) for number in range(2)
        }
        follower = EndFollower(ask, EventLog(SystemClock()))
        for _ in range(4):
            follower.ask(audits)
            await turns()
        assert asked == [0, 1, 0, 1]
        await follower.close()

    asyncio.run(work())


def test_unexpected_error_of_a_question_ends_the_audit() -> None:
    async def work() -> None:
        async def ask(_topic: Topic, _log: ReadPartition) -> int:
            raise RuntimeError("never")

        follower = EndFollower(ask, EventLog(SystemClock()))
        follower.ask({(TOPIC.id, 0): audit_with_a_hole(0)})
        await turns()
        with pytest.raises(RuntimeError, match="never"):
            follower.take_answers()

    asyncio.run(work())
