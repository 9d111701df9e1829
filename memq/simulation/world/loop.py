"""One node's event loop on virtual time, for real asyncio tasks: the world picks the next callback.

Asyncio keeps the tasks of a TaskGroup and the futures of `asyncio.wait` in sets, and cancels them in the sets' order.
That is the order of memory addresses, which differs from run to run. So the hash of tasks and futures here is a number
that their loop counts. In every process, a set of them then has the same order for the same history.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from asyncio.futures import _set_result_unless_cancelled  # type: ignore[attr-defined]  # how asyncio.sleep ends
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context, copy_context
from types import CoroutineType
from typing import Any, Protocol, TypeVar, TypeVarTuple, cast

from memq.simulation.world.trace import Trace

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")
_CANCELLED_TIMERS_MAX = 256
_TASKS_SWEEP_MIN = 64


class Scheduler(Protocol):
    """The world, as its processes use it."""

    seed: int
    now: float  # virtual seconds
    trace: Trace

    def random(self, purpose: str) -> random.Random:
        """See `World.random`."""

    def wake(self, node: Any) -> None:
        """See `World.wake`."""

    def schedule(self, delay_s: float, action: Callable[[], None]) -> None:
        """See `World.schedule`."""

    def fail(self, what: str, cause: BaseException | None = None) -> None:
        """See `World.fail`."""


class LoopOwner(Protocol):
    """The process that a loop belongs to."""

    world: Scheduler
    name: str
    alive: bool


class NotSimulatedError(NotImplementedError):
    """A program called a function of its event loop that the simulation does not have."""


class SimTask(asyncio.Task[_T]):
    """A task with a hash that is the same in every process."""

    def __init__(
        self, number: int, coro: Coroutine[Any, Any, _T], loop: SimLoop, name: str, context: Context | None
    ) -> None:
        self.number = number
        super().__init__(coro, loop=loop, name=name, context=context)

    def __hash__(self) -> int:
        return self.number


class SimFuture(asyncio.Future[_T]):
    """A future with a hash that is the same in every process: a number given at the first hash."""

    number = 0

    def __hash__(self) -> int:
        if not self.number:
            self.number = cast("SimLoop", self.get_loop()).next_number()
        return self.number


class SimHandle(asyncio.Handle):
    """A callback. Asyncio's own handle queries the debug mode, a third of the time to make one."""

    def __init__(
        self, callback: Callable[..., object], args: tuple[Any, ...], loop: SimLoop, context: Context | None
    ) -> None:
        self._callback = callback
        self._args = args
        self._loop = loop
        self._context = copy_context() if context is None else context
        self._cancelled = False
        self._repr = None
        self._source_traceback = None

    def cancel(self) -> None:
        """See `asyncio.Handle.cancel`."""
        self._cancelled = True
        self._callback = self._args = None  # type: ignore[assignment]


class SimTimer(SimHandle, asyncio.TimerHandle):
    """A timer, which does not query the debug mode."""

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: SimLoop,
        context: Context | None,
    ) -> None:
        SimHandle.__init__(self, callback, args, loop, context)
        self._when = when
        self._scheduled = True

    def cancel(self) -> None:
        """See `asyncio.TimerHandle.cancel`."""
        if not self._cancelled:
            self._loop._timer_handle_cancelled(self)
            SimHandle.cancel(self)


class SimLoop(asyncio.AbstractEventLoop):
    """The loop that a node's code gets from `asyncio.get_running_loop()`.

    Promises: callbacks of `call_soon` run first in, first out; timers run in order of their time, never early.
    On a dead node, calls return handles, but nothing is scheduled.
    Threads, sockets, subprocesses and signals do not exist here: their calls raise NotSimulatedError (`NOT_SIMULATED`).
    """

    def __init__(self, node: LoopOwner, start_s: float) -> None:
        self.node = node
        self.ready: deque[asyncio.Handle] = deque()
        self.timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self.tasks: dict[int, SimTask[Any]] = {}
        self._world = node.world
        self._start_s = start_s
        self._numbers = 0
        self._cancelled = 0
        self._tasks_max = _TASKS_SWEEP_MIN

    # ---- time and callbacks ------------------------------------------------------------------

    def time(self) -> float:
        """Return the node's monotonic clock, in seconds."""
        return self._world.now + self._start_s

    def call_soon(
        self, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Run the callback as one of the node's next."""
        handle = SimHandle(callback, args, self, context)
        if self.node.alive:
            ready = self.ready
            ready.append(handle)
            if len(ready) == 1:
                self._world.wake(self.node)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Run the callback as one of the node's next: there are no threads."""
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Run the callback `delay` seconds from now."""
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Run the callback when the node's monotonic clock shows `when`."""
        handle = SimTimer(when, callback, args, self, context)
        if self.node.alive:
            heapq.heappush(self.timers, (when - self._start_s, self.next_number(), handle))
            if self.timers[0][2] is handle:
                self._world.wake(self.node)
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Asyncio calls this. Timeouts are mostly cancelled: without a sweep their handles fill the heap."""
        self._cancelled += 1
        if self._cancelled > _CANCELLED_TIMERS_MAX and self._cancelled * 2 > len(self.timers):
            self.timers[:] = [entry for entry in self.timers if not entry[2].cancelled()]
            heapq.heapify(self.timers)
            self._cancelled = 0

    def collect_timers(self, now: float) -> None:
        """Move the timers that are due to the end of the ready callbacks.

        The end of an `asyncio.sleep` only makes its task ready, and does not count as a step.
        """
        timers = self.timers
        while timers and (timers[0][0] <= now or timers[0][2]._cancelled):
            handle = heapq.heappop(timers)[2]
            if handle._cancelled:
                self._cancelled = max(0, self._cancelled - 1)
            elif handle._callback is _set_result_unless_cancelled:  # type: ignore[attr-defined]
                sleeper, result = handle._args
                if not sleeper.done():
                    sleeper.set_result(result)
            else:
                self.ready.append(handle)

    # ---- tasks and futures -------------------------------------------------------------------

    def next_number(self) -> int:
        """Return a number that this loop has not given yet."""
        self._numbers += 1
        return self._numbers

    def create_future(self) -> asyncio.Future[Any]:
        """Return a new future of this loop."""
        return SimFuture(loop=self)

    def create_task(
        self,
        coro: Generator[Any, None, _T] | Coroutine[Any, Any, _T],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> asyncio.Task[_T]:
        """Return a task of this loop. The loop holds it until it is done, as every owner should."""
        assert isinstance(coro, CoroutineType), f"{coro!r} is not a coroutine"
        number = self.next_number()
        task = SimTask(number, coro, self, name or f"{self.node.name}-{number}", context)
        if len(self.tasks) >= self._tasks_max:
            self.forget_done()
        self.tasks[number] = task
        return task

    def forget_done(self) -> None:
        """Forget tasks that are done. A callback at the end of each task was an eighth of all steps."""
        self.tasks = {number: task for number, task in self.tasks.items() if not task.done()}
        self._tasks_max = max(_TASKS_SWEEP_MIN, 2 * len(self.tasks))

    def run_through(self, coro: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine that never waits to its end, outside of all steps, and return its result."""
        running = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            coro.send(None)
        except StopIteration as end:
            returned: _T = end.value
            return returned
        finally:
            asyncio._set_running_loop(running)
        coro.close()
        raise AssertionError(f"{coro!r} waits for something")

    # ---- calls of asyncio --------------------------------------------------------------------

    # False, because asyncio's debug mode measures real time. Each future calls it, so it takes no Python frame.
    get_debug = staticmethod(bool)

    def is_running(self) -> bool:
        """Return True while the node lives."""
        return self.node.alive

    def is_closed(self) -> bool:
        """Return False. A dead node's loop drops callbacks, so `finally` blocks of dead tasks fail silently."""
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """End the run for an exception that no code handled."""
        if self.node.alive:
            self._world.fail(f"{self.node.name}: {context.get('message')}", context.get("exception"))


NOT_SIMULATED = {
    "a thread": ("run_in_executor",),  # also asyncio.to_thread
    "a real socket": (
        "add_reader",
        "add_writer",
        "create_connection",
        "create_datagram_endpoint",
        "create_server",
        "create_unix_connection",
        "create_unix_server",
        "getaddrinfo",
        "sock_accept",
        "sock_connect",
        "sock_recv",
        "sock_sendall",
    ),
    "a subprocess": ("connect_read_pipe", "connect_write_pipe", "subprocess_exec", "subprocess_shell"),
    "a signal": ("add_signal_handler",),
}


def _refusal(what: str, name: str) -> Callable[..., object]:
    def refuse(self: SimLoop, *_: object, **__: object) -> object:
        raise NotSimulatedError(
            f"{self.node.name}: a program of a simulation can't use {what} ({name} of its event loop); "
            "it may use tasks, events, timeouts, asyncio.sleep, and the clients of its Process"
        )

    return refuse


for _what, _names in NOT_SIMULATED.items():
    for _name in _names:
        setattr(SimLoop, _name, _refusal(_what, _name))
