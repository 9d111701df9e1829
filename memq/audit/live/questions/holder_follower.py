"""Asks brokers for held records before the live audit reports a loss, next to its rounds. A shell.

A broker that hangs delays the verdict on what it may hold, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from memq.audit.held import AskHeld, HeldAnswer, Sought
from memq.audit.live.partition import PartitionAudit
from memq.runtime.logs import EventLog
from memq.runtime.tasks import TaskOwner
from memq.topic import PartitionKey, Topic

Audits = Mapping[PartitionKey, PartitionAudit]


class HolderFollower:
    """Carries questions of audits to brokers, one topic after the other, and the answers back."""

    def __init__(self, ask: AskHeld, events: EventLog) -> None:
        self._ask_held = ask
        self._events = events
        self._tasks = TaskOwner(self._asking_died, events)
        self._died: BaseException | None = None
        self._answers: list[tuple[Topic, Sequence[Sought], HeldAnswer]] = []

    async def close(self) -> None:
        """End running requests."""
        await self._tasks.stop()

    def ask(self, audits: Audits, *, again: bool) -> None:
        """Start to ask brokers for the sought records, unless the last requests are still running."""
        if len(self._tasks):
            return
        questions: dict[str, tuple[Topic, list[Sought]]] = {}
        for audit in audits.values():
            sought = audit.sought(again=again)
            if sought:
                questions.setdefault(audit.topic.id, (audit.topic, []))[1].extend(sought)
        if questions:
            self._tasks.start(self._ask(list(questions.values())), "audit asks what brokers hold")

    def take_answers(self, audits: Audits, now_ms: int) -> dict[PartitionKey, None]:
        """Pass the arrived answers to the audits, before the queue is read; return the audits with an answer.

        Raises: the error that ended the requesting task.
        """
        if self._died is not None:
            raise self._died
        answers, self._answers = self._answers, []
        answered: dict[PartitionKey, None] = {}
        for topic, sought, answer in answers:
            doubt = ""
            for partition in dict.fromkeys(each.partition for each in sought):
                audit = audits.get((topic.id, partition))
                if audit is not None:
                    mine = [each for each in sought if each.partition == partition]
                    doubt = audit.take_answer(mine, answer, now_ms) or doubt
                    answered[topic.id, partition] = None
            if doubt:
                self._events.warning("audit.held-unknown", f"records of topic '{topic.name}' have no pointer: {doubt}")
        return answered

    async def _ask(self, questions: Sequence[tuple[Topic, Sequence[Sought]]]) -> None:
        for topic, sought in questions:
            answer = await self._ask_held(topic, sought)
            self._answers.append((topic, sought, answer))

    def _asking_died(self, error: BaseException) -> None:
        self._died = error
