"""One step of a broker's start: a coordinator that is away in the middle of a start is waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from memq.errors import UnreachableError
from memq.runtime.clock import backoff_s
from memq.runtime.logs import EventLog
from memq.runtime.network import Runtime

T = TypeVar("T")

START_STEP_S = 30.0  # an election of ZooKeeper, or a pause that costs the session, takes seconds
BACKOFF_S_MAX = 1.0


async def start_step(runtime: Runtime, events: EventLog, name: str, step: Callable[[], Awaitable[T]]) -> T:
    """Do a step that may be done twice, again and again while the coordinator is away, for `START_STEP_S`.

    Raises: UnreachableError after that; whatever else the step raises.
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
