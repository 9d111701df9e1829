"""Asks owners for ends of logs, next to the rounds of the live audit. A shell.

An end is needed where acked records are missing. An owner that hangs delays the verdict on these, and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from memq.audit.live.partition import PartitionAudit
from memq.audit.live.questions.end_questions import Missing
from memq.client.link_pool import LinkPool
from memq.client.metadata import ClusterMetadata
from memq.client.owner_requests import SPANS_S_MAX, OwnerRequests
from memq.errors import MemqError
from memq.runtime.logs import EventLog
from memq.runtime.runtime import Runtime
from memq.runtime.tasks import TaskOwner
from memq.topic import PartitionKey, ReadPartition, Topic

LOGS_AT_ONCE_MAX = 16
# Returns an end after all that owners have published, -1 when no owner answers. Raises: MemqError.
AskEnd = Callable[[Topic, ReadPartition], Awaitable[int]]


class OwnerEnds:
    """The owners of all partitions; `ask` is an `AskEnd`."""

    def __init__(self, runtime: Runtime, pool: LinkPool) -> None:
        self._metadata = ClusterMetadata(runtime, pool)
        self._owners = OwnerRequests(runtime, pool, self._metadata, SPANS_S_MAX)

    async def ask(self, topic: Topic, log: ReadPartition) -> int:
        """Return the highest end that an owner of a log proves, -1 when none answers."""
        self._metadata.doubt(topic.name)  # it may be another one than at the last question
        await self._metadata.topic(topic.name, timeout_s=SPANS_S_MAX)
        spans = await self._owners.spans(log, topic.writers_of(log))
        return max((span.end for span in spans), default=-1)

    async def close(self) -> None:
        """End running requests."""
        await self._metadata.close()


@dataclass(slots=True)
class ProvedEnd:
    """The end of a log, and the records that were missing in it at the question."""

    topic: Topic
    missing: dict[PartitionKey, Missing] = field(default_factory=dict)
    end: int = -1


class EndFollower:
    """Carries questions for ends to owners, and the answers back.

    An owner that does not answer is asked again, after those of other logs.
    """

    def __init__(self, ask: AskEnd, events: EventLog) -> None:
        self._ask_end = ask
        self._tasks = TaskOwner(self._asking_died, events)
        self._died: BaseException | None = None
        self._answers: dict[ReadPartition, ProvedEnd] = {}
        self._asked: dict[ReadPartition, None] = {}  # logs of the last questions

    async def close(self) -> None:
        """End running requests."""
        await self._tasks.stop()

    def ask(self, audits: Mapping[PartitionKey, PartitionAudit]) -> None:
        """Start to request the ends that audits need, unless the last requests are still running."""
        if len(self._tasks):
            return
        questions: dict[ReadPartition, ProvedEnd] = {}
        for key, audit in audits.items():
            missing = audit.ends.missing()
            if missing:
                log = audit.topic.read_partition_of(audit.partition)
                questions.setdefault(log, ProvedEnd(audit.topic)).missing[key] = missing
        if questions:
            due = sorted(questions, key=lambda log: log in self._asked)[:LOGS_AT_ONCE_MAX]
            self._asked = dict.fromkeys(due)
            self._tasks.start(self._ask({log: questions[log] for log in due}), "audit asks for ends")

    def take_answers(self) -> dict[ReadPartition, ProvedEnd]:
        """Return the proved ends that have arrived; the caller reads the logs up to them.

        Raises: the error that ended the requesting task.
        """
        if self._died is not None:
            raise self._died
        answers, self._answers = self._answers, {}
        return answers

    async def _ask(self, questions: Mapping[ReadPartition, ProvedEnd]) -> None:
        asks = (self._ask_end(question.topic, log) for log, question in questions.items())
        answers = await asyncio.gather(*asks, return_exceptions=True)
        for (log, question), answer in zip(questions.items(), answers, strict=True):
            if isinstance(answer, BaseException):
                if not isinstance(answer, MemqError):
                    raise answer
            elif answer >= 0:
                question.end = answer
                self._answers[log] = question

    def _asking_died(self, error: BaseException) -> None:
        self._died = error
