"""The scheduler: one virtual time, many nodes, one seed. It picks the next callback and its duration."""

from __future__ import annotations

import asyncio
import gc
import heapq
import random
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine
from types import TracebackType
from typing import Any, Self

from memq.simulation.world.loop import SimLoop
from memq.simulation.world.node import FOREVER, SimNode
from memq.simulation.world.trace import Trace

STEP_S_MAX = 40e-6  # maximum cost of a normal callback
HICCUP_S_MAX = 0.02  # maximum cost of a rare one: a collection, a page fault, another process on the core
HICCUP_RATE = 1e-4
COLLECT_STEPS = 200_000
CLOCK_OFFSET_MS_MAX = 10_000
# The set of all tasks, under its names in Python 3.11 and later. It costs two calls per task; no code here reads it.
_ALL_TASKS: Any = vars(asyncio.tasks).get("_all_tasks", vars(asyncio.tasks).get("_scheduled_tasks"))


class SimulationError(AssertionError):
    """The run found a fault; the message names the seed and the virtual time."""


class World:
    """Runs nodes on virtual time. Use it as a context manager: it owns the running loop of the thread.

    Every callback costs its node a few microseconds of virtual time, drawn from the seed. This varies the order of
    callbacks of different nodes, and lets time pass in a busy loop. Within one node, callbacks run first in, first
    out, as in asyncio.
    The garbage collector is off and called at set steps: it runs finalizers, so its moments must not depend on the
    history of the process. Objects that exist before the run are excluded permanently: a million of them took a second
    of each run.
    """

    def __init__(self, seed: int, *, echo: Callable[[str], None] | None = None) -> None:
        self.seed = seed
        self.now = 0.0
        self.steps = 0
        self.trace = Trace(echo)
        self.nodes: dict[str, SimNode] = {}
        self._buried: list[SimNode] = []
        self._events: list[tuple[float, float, int, SimNode | Callable[[], None]]] = []
        self._numbers = 0
        self._randoms: dict[str, random.Random] = {}
        self._failure: SimulationError | None = None
        self._running: SimNode | None = None
        self._steps_end = self._steps_mark = 0
        self._schedule_random = self.random("schedule").random
        self._checks: list[Callable[[], None]] = []

    # ---- seeded randomness -------------------------------------------------------------------

    def random(self, purpose: str) -> random.Random:
        """Return the generator of one purpose: an additional draw for one purpose changes no other."""
        if purpose not in self._randoms:
            self._randoms[purpose] = random.Random(f"{self.seed}/{purpose}")
        return self._randoms[purpose]

    # ---- nodes and events --------------------------------------------------------------------

    def add_node(self, name: str, *, offset_ms: int | None = None) -> SimNode:
        """Make a node without a main; `offset_ms` is the error of its wall clock (drawn when None)."""
        known = self.nodes.get(name)
        assert known is None or not known.alive, f"{name} lives"
        if offset_ms is None:
            offset_ms = self.random("clock").randint(-CLOCK_OFFSET_MS_MAX, CLOCK_OFFSET_MS_MAX)
        node = SimNode(self, len(self.nodes) + len(self._buried), name, offset_ms)
        if known is not None:
            self._buried.append(known)
        self.nodes[name] = node
        return node

    def spawn(
        self, name: str, main: Callable[[SimNode], Coroutine[Any, Any, Any]], *, offset_ms: int | None = None
    ) -> SimNode:
        """Start a process on host `name`; when one lived there before, it must be dead."""
        node = self.add_node(name, offset_ms=offset_ms)
        self.trace.event(self.now, "spawn", name)
        node.start(main)
        return node

    def schedule(self, delay_s: float, action: Callable[[], None]) -> None:
        """Call `action` outside of all nodes, `delay_s` from now."""
        self._numbers += 1
        heapq.heappush(self._events, (self.now + delay_s, self._schedule_random(), self._numbers, action))

    def wake(self, node: SimNode) -> None:
        """Run `node` when it is due. Loops call this when they get their first callback or timer."""
        if node is self._running:
            return
        when = node.due()
        if when < node.wake_at:
            node.wake_at = when
            self._numbers += 1
            heapq.heappush(self._events, (when, self._schedule_random(), self._numbers, node))

    def add_check(self, check: Callable[[], None]) -> None:
        """Call `check` after every step; it must be cheap, and reports faults by `fail`."""
        self._checks.append(check)

    def fail(self, what: str, cause: BaseException | None = None) -> None:
        """End the run with this finding; the first one counts."""
        if self._failure is None:
            text = f"{what}: {cause!r}" if cause is not None else what
            self._failure = SimulationError(f"seed {self.seed} at {self.now:.6f} s: {text}")
            self._failure.__cause__ = cause

    def collect(self) -> None:
        """Find the errors of tasks that no code references any more."""
        for node in self.nodes.values():
            node.loop.forget_done()
        gc.collect()

    def check(self) -> None:
        """Raise the finding, when there is one."""
        if self._failure is not None:
            raise self._failure

    def misreads(self, key: str) -> int:
        """Return the number of wrong answers to reads of an object, by all processes, dead ones included."""
        return sum(node.misread[key] for node in [*self._buried, *self.nodes.values()])

    # ---- running -----------------------------------------------------------------------------

    def run(
        self,
        seconds: float | None = None,
        *,
        done: Callable[[], bool] | None = None,
        poll_s: float = 0.0,
        steps_max: int = 50_000_000,
    ) -> None:
        """Run until `done()`, for `seconds` of virtual time, or until no event is left.

        `done` is called before each event, at most once in `poll_s` virtual seconds.

        Raises: SimulationError for a failed check, an unhandled exception, or more than `steps_max` steps.
        """
        until = FOREVER if seconds is None else self.now + seconds
        self._steps_end = self.steps + steps_max
        self._set_mark()
        events, checks = self._events, self._checks
        next_poll = self.now
        while events and events[0][0] <= until:
            if done is not None and events[0][0] >= next_poll:
                if done():
                    break
                next_poll = self.now + poll_s
            when, _tie, _number, target = heapq.heappop(events)
            if not isinstance(target, SimNode):
                self.now = when
                target()
            elif when == target.wake_at:
                target.wake_at = FOREVER
                self.now = when
                self._run_node(target, until)
            for check in checks:
                check()
            if self._failure is not None:
                raise self._failure
        if until != FOREVER and not (events and events[0][0] <= until):
            self.now = until

    def _run_node(self, node: SimNode, until: float) -> None:
        """Run callbacks of `node` until another node's turn comes. A run spends half its time in this loop."""
        loop, events, draw = node.loop, self._events, self._schedule_random
        ready, timers = loop.ready, loop.timers
        self.trace.turn(node.index)
        fold = self.trace.steps.append
        now, steps, free_at = self.now, self.steps, node.free_at
        asyncio._set_running_loop(loop)
        self._running = node
        try:
            while node.alive and node.paused_until <= now:
                if timers and (timers[0][0] <= now or timers[0][2]._cancelled):
                    loop.collect_timers(now)
                if not ready:
                    break
                handle = ready.popleft()
                if handle._cancelled:
                    continue
                fold(now)
                try:  # as `Handle._run`, without its call
                    handle._context.run(handle._callback, *handle._args)  # type: ignore[attr-defined]
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:  # noqa: BLE001  as asyncio: the loop decides
                    loop.call_exception_handler({"message": "exception in callback", "exception": error})
                cost = draw()
                free_at = now + (cost * STEP_S_MAX if cost > HICCUP_RATE else cost / HICCUP_RATE * HICCUP_S_MAX)
                steps += 1
                if steps >= self._steps_mark:
                    self.steps = steps
                    self._reach_mark()
                if self._failure is not None or free_at > until or (events and events[0][0] <= free_at):
                    break
                self.now = now = free_at
        finally:
            node.free_at, self.steps = free_at, steps
            asyncio._set_running_loop(None)
            self._running = None
        self.wake(node)

    def _set_mark(self) -> None:
        """Set the number of steps at which the next collection, or the end of the run, is due."""
        self._steps_mark = min(self.steps - self.steps % COLLECT_STEPS + COLLECT_STEPS, self._steps_end + 1)

    def _reach_mark(self) -> None:
        if self.steps > self._steps_end:
            self.fail(f"no end after {self.steps} steps")
        else:
            gc.collect()
        self._set_mark()

    # ---- the thread's state --------------------------------------------------------------------

    def __enter__(self) -> Self:
        gc.unfreeze()  # what the run before left at its end
        gc.collect()
        gc.freeze()
        gc.disable()
        self._hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(finalizer=self._finalize)
        _ALL_TASKS.add = _ignore
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._events.clear()
        hook, sys.unraisablehook = sys.unraisablehook, _ignore
        try:
            for node in [*self._buried, *self.nodes.values()]:
                node.die()
                asyncio._set_running_loop(node.loop)
                node.bury()
                asyncio._set_running_loop(None)
            gc.collect()
        finally:
            sys.unraisablehook = hook
            sys.set_asyncgen_hooks(*self._hooks)
            del _ALL_TASKS.add
            gc.enable()

    def _finalize(self, generator: AsyncGenerator[Any, Any]) -> None:
        """Close an unfinished async generator in its node, if the node lives."""
        loop = asyncio._get_running_loop()
        if isinstance(loop, SimLoop) and loop.node.alive:
            loop.create_task(_close(generator))


def _ignore(_ignored: object) -> None:
    """Ignore a new task, or an error that a dead process raises while it is closed."""


async def _close(generator: AsyncGenerator[Any, Any]) -> None:
    await generator.aclose()
