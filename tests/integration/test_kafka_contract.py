"""The contract of the notification queue over a real Kafka."""

from __future__ import annotations

import asyncio

import pytest

from memq.runtime.clock import SystemClock
from memq_localstack.servers import Server
from tests.contract import test_former_groups, test_queue_log
from tests.contract.manual_clock import ManualClock
from tests.contract.queues import HANG_S, Scenario, scenarios_of
from tests.integration.kafka import kafka_queue

BEHIND_MS = 10_000  # tests move their clock ahead a little; Kafka has the machine's


SCENARIOS = scenarios_of(test_queue_log) + scenarios_of(test_former_groups)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_a_queue_on_kafka_keeps_the_contract(scenario: Scenario, kafka: Server) -> None:
    async def run() -> None:
        clock = ManualClock(SystemClock().wall_ms() - BEHIND_MS)
        queue = kafka_queue(kafka.address)
        try:
            async with asyncio.timeout(HANG_S):
                await scenario(queue, clock)
        finally:
            await queue.close()

    asyncio.run(run())
