"""One process of the simulated cluster: its clocks, randomness, loop, pauses and death."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from memq.runtime.network import Network
from memq.runtime.runtime import Runtime
from memq.simulation.world.loop import Scheduler, SimLoop, SimTask

EPOCH_MS = 1_750_000_000_000  # the wall clock at virtual time 0
FOREVER = float("inf")
BURY_ROUNDS = 50  # in which the coroutines of a dead process are closed; one may ignore it each time


class NodeClock:
    """A node's clocks: the monotonic one starts anywhere, the wall clock has the error `offset_ms`."""

    def __init__(self, world: Scheduler, start_s: float, offset_ms: int) -> None:
        self._world = world
        self._start_s = start_s
        self.offset_ms = offset_ms

    def monotonic(self) -> float:
        """See `memq.runtime.clock.Clock`."""
        return self._world.now + self._start_s

    def wall_ms(self) -> int:
        """See `memq.runtime.clock.Clock`."""
        return EPOCH_MS + self.offset_ms + int(self._world.now * 1000)


class SimNode:
    """A process: `name` is its host, on which another process may start when this one is dead.

    The node's own code draws from `random`. The world draws from other generators, so that an additional fault does
    not change the draws of the node.
    """

    def __init__(self, world: Scheduler, index: int, name: str, offset_ms: int) -> None:
        self.world = world
        self.index = index
        self.name = name
        self.alive = True
        self.killed_s = FOREVER  # an exit is no kill
        self.free_at = 0.0
        self.paused_until = 0.0
        self.wake_at = FOREVER
        start_s = float(world.random("clock").randrange(1, 100_000))
        self.clock = NodeClock(world, start_s, offset_ms)
        self.random = random.Random(f"{world.seed}/{index}/{name}")
        self.loop = SimLoop(self, start_s)  # type: ignore[abstract]  # typeshed wants sockets and threads too
        self.main: asyncio.Task[Any] | None = None
        self.misread: Counter[str] = Counter()  # by key, reads of objects with a wrong answer
        self._at_death: dict[int, Callable[[], None]] = {}
        self._deaths = 0

    def runtime(self, network: Network) -> Runtime:
        """Return the runtime for shells on this node."""
        return Runtime(clock=self.clock, random=self.random, network=network, host=self.name, pid=self.index)

    def start(self, main: Callable[[SimNode], Coroutine[Any, Any, Any]]) -> None:
        """Run `main`; the process exits with it. An exception of `main` ends the run of the world."""
        self.main = self.loop.create_task(main(self), name=self.name)
        self.main.add_done_callback(self._main_done)

    def _main_done(self, task: asyncio.Task[Any]) -> None:
        if not self.alive or task.cancelled():
            return
        error = task.exception()
        if error is not None:
            self.world.fail(f"{self.name} died", error)
        self.world.trace.event(self.world.now, "exit", self.name)
        self.die()

    def due(self) -> float:
        """Return when this node's next callback may run."""
        loop = self.loop
        if loop.ready:
            when = self.world.now
        elif loop.timers:
            when = loop.timers[0][0]
        else:
            return FOREVER  # as for a dead node
        return max(when, self.free_at, self.paused_until)

    def pause(self, seconds: float) -> None:
        """Stop for `seconds`, as by SIGSTOP: no code runs, bytes wait, and timers run late."""
        if not self.alive:
            return
        self.world.trace.event(self.world.now, "pause", self.name, seconds)
        self.paused_until = max(self.paused_until, self.world.now + seconds)

    def resume(self) -> None:
        """Continue after a pause, as by SIGCONT."""
        if self.alive and self.paused_until > self.world.now:
            self.paused_until = self.world.now
            self.world.wake(self)

    def kill(self) -> None:
        """End as by SIGKILL: its code never runs again, and its pending callbacks have no effect."""
        if self.alive:
            self.world.trace.event(self.world.now, "kill", self.name)
            self.killed_s = self.world.now
            self.die()

    def die(self) -> None:
        """Drop all callbacks, and call the functions of `at_death` in the order of their registration."""
        self.loop.forget_done()  # the unretrieved error of a task is a finding only while the node lives
        self.alive = False
        self.loop.ready.clear()
        self.loop.timers.clear()
        for tell in list(self._at_death.values()):
            tell()
        self._at_death.clear()

    def at_death(self, tell: Callable[[], None]) -> Callable[[], None]:
        """Call `tell` when this node dies; the returned function cancels this."""
        self._deaths += 1
        number = self._deaths
        self._at_death[number] = tell

        def forget() -> None:
            self._at_death.pop(number, None)

        return forget

    def bury(self) -> None:
        """Close the coroutines of a dead node, so that none runs, warns or waits later.

        A `finally` block that awaits stops the first close at its await; then the coroutine is closed again.
        """
        assert not self.alive, f"{self.name} is alive"
        for _ in range(BURY_ROUNDS):
            left = list(self.loop.tasks.values())
            self.loop.tasks.clear()
            for task in reversed(left):
                self._close(task)
            if not left:
                return

    def _close(self, task: SimTask[Any]) -> None:
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # asyncio's own switch for this
        coro = task.get_coro()
        try:
            if coro is not None:
                coro.close()
        except RuntimeError:
            self.loop.tasks[task.number] = task
        except Exception as error:  # noqa: BLE001  no code receives errors of a dead process
            self.world.trace.recent.append((self.world.now, "buried", (self.name, type(error).__name__)))
