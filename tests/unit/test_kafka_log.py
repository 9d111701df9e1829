"""The contract of the notification queue's log over the Kafka queue, on a librdkafka in memory."""

from __future__ import annotations

import asyncio

import pytest

from memq.errors import QueueRefusedError
from memq.notification import NotificationQueue, Span
from memq.notification.kafka.queue import KafkaQueue
from memq.notification.kafka.settings import kafka_settings
from memq.notification.kafka.topics import AHEAD_MS_MAX
from memq.runtime.runtime import Runtime
from tests.contract import test_queue_log
from tests.contract.manual_clock import ManualClock
from tests.contract.queues import HANG_S, STALE_MS, Scenario, part, publication, scenarios_of
from tests.librdkafka import Library, use


def over_kafka(scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        clock = ManualClock()
        use(Library(now_ms=clock.wall_ms), monkeypatch)
        queue = KafkaQueue(kafka_settings("kafka://localhost", {}), Runtime(clock=clock))
        try:
            async with asyncio.timeout(HANG_S):
                await scenario(queue, clock)
        finally:
            await queue.close()

    asyncio.run(run())


@pytest.mark.parametrize("scenario", scenarios_of(test_queue_log), ids=lambda scenario: scenario.__name__)
def test_log(scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    over_kafka(scenario, monkeypatch)


def test_kafka_refuses_pointers_by_their_age_on_its_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(queue: NotificationQueue, clock: ManualClock) -> None:
        assert queue.refuses_by_age
        await queue.create([part()], STALE_MS)
        for age_ms in (0, STALE_MS, -AHEAD_MS_MAX):
            await queue.publish(publication(clock, age_ms=age_ms))
        for age_ms in (STALE_MS + 1, -AHEAD_MS_MAX - 1, clock.wall_ms()):
            with pytest.raises(QueueRefusedError):
                await queue.publish(publication(clock, age_ms=age_ms))
        await queue.create([part()], 2 * STALE_MS)
        assert await queue.publish(publication(clock, age_ms=2 * STALE_MS)) == 3
        assert await queue.publish(publication(clock, epoch=0)) == 4
        assert await queue.span(part()) == Span(0, 5)

    over_kafka(scenario, monkeypatch)
