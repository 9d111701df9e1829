"""The way of requests to a bucket on virtual time: few are sent while it is down, and all go soon after it heals."""

from __future__ import annotations

import asyncio

import pytest

from memq.errors import StoreError
from memq.simulation.world.network import NetworkFaults, SimNetwork, Switch
from memq.simulation.world.node import SimNode
from memq.simulation.world.world import World
from memq.storage_handlers.s3.answers import StoreAnswer
from memq.storage_handlers.s3.attempts import Attempts, S3Counters
from memq.storage_handlers.s3.settings import read_bucket

CALLERS = 20
DOWN_S = 60.0
RECOVERY_S = 2.0


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_a_minute_of_sickness_costs_few_requests_and_ends_soon(seed: int, silent: bool) -> None:
    done: list[float] = []
    counters = S3Counters()
    with World(seed) as world:

        async def request() -> None:
            """Answer after 5 ms: 503 while the store is down, or nothing at all."""
            await asyncio.sleep(3_600 if silent and world.now < DOWN_S else 0.005)
            if world.now < DOWN_S:
                raise StoreAnswer(503, "SlowDown")

        async def main(node: SimNode) -> None:
            runtime = node.runtime(SimNetwork(Switch(world, NetworkFaults()), node))
            attempts = Attempts(read_bucket("s3://memq?endpoint=http://h", {}), runtime, counters)

            async def store() -> None:
                while True:  # as a broker does, for ever
                    try:
                        await attempts.run("put", 1_000, request, "not stored", hedge=True)
                    except StoreError:
                        continue
                    done.append(world.now)
                    return

            await asyncio.gather(*(store() for _ in range(CALLERS)))

        world.spawn("broker", main)
        world.run(DOWN_S + 60, done=lambda: len(done) == CALLERS)
    assert counters.requests <= 2 * CALLERS + 4 * DOWN_S
    silence_s = 10.0 if silent else 0.0  # a request that gets no answer is waited for
    assert max(done) <= DOWN_S + silence_s + RECOVERY_S
