"""Steps of a start that are repeated until they succeed, and the creation of the audit topic."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from memq.broker.partitions import Partitions
from memq.broker.services import Services
from memq.errors import MemqError, UnreachableError
from memq.format.report import AUDIT_TOPIC
from memq.runtime.clock import backoff_s
from memq.runtime.logs import EventLog
from memq.runtime.runtime import Runtime
from memq.topic import TopicSettings

T = TypeVar("T")

START_STEP_S = 30.0  # an election of ZooKeeper, or a pause that costs the session, takes seconds
SILENT_S = 2.0
BACKOFF_S_MAX = 1.0
RETRY_S = 1.0


async def start_step(runtime: Runtime, events: EventLog, name: str, step: Callable[[], Awaitable[T]]) -> T:
    """Repeat an idempotent step while the coordinator is unreachable, for at most `START_STEP_S`.

    Raises: UnreachableError after that; any other error of the step at once.
    """
    until_s, tries = runtime.clock.monotonic() + START_STEP_S, 0
    while True:
        try:
            return await step()
        except UnreachableError as error:
            if runtime.clock.monotonic() >= until_s:
                raise
            tries += 1
            events.warning("start-retry", f"{name}, try {tries}: {error}")
            await asyncio.sleep(backoff_s(runtime.random, tries, base_s=0.1, most_s=BACKOFF_S_MAX))


async def first_answer(events: EventLog, name: str, step: Callable[[], Awaitable[T]]) -> T:
    """Return the answer of a step that is not repeated; the log says that it is awaited if it takes long.

    Raises: as the step.
    """

    def say() -> None:
        events.warning("start-waits", f"{name}: no answer for {SILENT_S:g} s; the start waits")

    late = asyncio.get_running_loop().call_later(SILENT_S, say)
    try:
        return await step()
    finally:
        late.cancel()


async def make_audit_topic(services: Services, partitions: Partitions) -> None:
    """Create `_memq_audit`, and retry without limit; an existing topic is not changed.

    The broker serves clients meanwhile, and clients keep their reports until the topic exists. A retry repeats all
    steps, because a topic that the coordinator knows may lack its logs in the queue.
    """
    settings, failing = services.settings, services.events.outage("audit-topic-failed", "audit-topic-made")
    topic = audit_topic_settings(settings.audit_retention_ms)
    while True:
        try:
            await partitions.create(AUDIT_TOPIC, settings.audit_partitions, topic, exist_ok=True, internal=True)
        except MemqError as error:
            failing.failed(str(error))
            await asyncio.sleep(RETRY_S)
        else:
            failing.passed()
            return


def audit_topic_settings(retention_ms: int) -> TopicSettings:
    """Return the settings of `_memq_audit`: reports are many and small, and no client waits for acks.

    So their batches are sealed by age, and share objects: a few PUTs a second for any number of clients.
    """
    return TopicSettings(retention_ms=retention_ms, shared_objects=True, seal_when_idle=False)
