"""An event loop on virtual time, for tests without sockets: when nothing is ready, it skips to its next timer."""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from memq.runtime.runtime import Runtime

Result = TypeVar("Result")
VIRTUAL_S_MAX = 3_600.0
_WALL_MS = 1_760_000_000_000


class _SkippingSelector(selectors.DefaultSelector):
    """Never waits: what the loop would wait is counted in `skipped_s`."""

    skipped_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise AssertionError("all tasks wait, and none of them for a time")
        self.skipped_s += timeout
        assert self.skipped_s < VIRTUAL_S_MAX, f"not done after {VIRTUAL_S_MAX:g} virtual seconds"
        return super().select(0)


class SkippingLoop(asyncio.SelectorEventLoop):
    """Starts at time 0; a test that takes an hour of it fails."""

    def __init__(self) -> None:
        self._skipping = _SkippingSelector()
        super().__init__(self._skipping)

    def time(self) -> float:
        return self._skipping.skipped_s


class LoopClock:
    """The time of the running loop as a `Clock`."""

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    def wall_ms(self) -> int:
        return _WALL_MS + int(self.monotonic() * 1000)


def skipping_runtime(seed: int = 1) -> Runtime:
    """Return a runtime on the loop's time, with numbers that are the same in each run."""
    return Runtime(clock=LoopClock(), random=random.Random(seed))


async def skip(seconds: float) -> None:
    """Return when all that is due in the next `seconds` of virtual time was done."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SkippingLoop), "real time is not skipped"
    over = loop.create_future()
    timer = loop.call_later(seconds, over.set_result, None)
    try:
        await over
    finally:
        timer.cancel()


def run_skipping(work: Coroutine[Any, Any, Result]) -> Result:
    """Run `work` to its end on virtual time."""
    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        return runner.run(work)


def now_s() -> float:
    """Return the time of the running loop."""
    return asyncio.get_running_loop().time()


class LongestWait(random.Random):
    """Draws the longest time of each interval."""

    def uniform(self, a: float, b: float) -> float:
        return b
