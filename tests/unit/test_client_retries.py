"""Pauses between the tries of a client: they double from the first failure on, up to a bound."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from itertools import pairwise

import pytest

from memq.client.link_pool import LinkPool
from memq.client.metadata import ClusterMetadata
from memq.errors import UnreachableError
from memq.runtime.network import ProtocolFactory, SocketNetwork
from tests.skipping_loop import run_skipping, skipping_runtime

DOUBLED_S = [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


class Longest(random.Random):
    """Draws the longest pause that the rule allows."""

    def uniform(self, a: float, b: float) -> float:
        return max(a, b)


def test_a_topic_is_asked_for_again_after_pauses_that_double_up_to_a_second() -> None:
    asked_s: list[float] = []

    class Nobody(SocketNetwork):
        async def connect(
            self, host: str, port: int, factory: ProtocolFactory, *, timeout_s: float = 10.0
        ) -> asyncio.BufferedProtocol:
            asked_s.append(asyncio.get_running_loop().time())
            raise UnreachableError(f"nobody at {port}")

    async def work() -> None:
        runtime = replace(skipping_runtime(), random=Longest(), network=Nobody())
        metadata = ClusterMetadata(runtime, LinkPool(runtime, [("h", 1)]))
        with pytest.raises(UnreachableError, match="no broker answers: nobody at 1"):
            await metadata.topic("clicks", timeout_s=4.0)

    run_skipping(work())
    pauses_s = [later - earlier for earlier, later in pairwise(asked_s)]
    assert pauses_s == pytest.approx(DOUBLED_S)
