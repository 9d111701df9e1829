"""Time that a test moves: deadlines of minutes are reached by a step, and a slow machine reaches none by itself."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from memq.runtime.clock import SystemClock
from memq.runtime.runtime import Runtime


class SteppedLoop(asyncio.SelectorEventLoop):
    """An event loop whose time is real time and all steps; what is due after a step runs in the next round."""

    stepped_s = 0.0

    def time(self) -> float:
        """Return the time by which callbacks are scheduled."""
        return super().time() + self.stepped_s


@dataclass(frozen=True)
class SteppedClock(SystemClock):
    """The clock of a loop, for the code under test."""

    loop: SteppedLoop

    def monotonic(self) -> float:
        """See `Clock.monotonic`."""
        return self.loop.time()


def step(seconds: float) -> None:
    """Move the time of the running loop."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SteppedLoop), "the test runs on a loop of real time"
    loop.stepped_s += seconds


def stepped_runtime() -> Runtime:
    """Return a runtime on the time of the running loop."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SteppedLoop), "the test runs on a loop of real time"
    return Runtime(clock=SteppedClock(loop))
