"""Processes that run handlers: each has a worker of its own, with its own leases and connections.

A killed process loses only its own leases: the queue delivers its items again when these end. Each process reports its
counters to the parent through a pipe. A process stops when its pipe breaks, because then the parent has ended.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.reduction import ForkingPickler

from memq.client.listener.calls import BlockingCalls, CallsCore
from memq.client.queue.queue import AsyncQueue
from memq.client.queue.worker_settings import WorkerStats
from memq.errors import InvalidRequestError
from memq.runtime.logs import EventLog
from memq.runtime.runtime import Runtime
from memq.runtime.tasks import TaskOwner

REPORT_S = 0.5
RESTART_S = 1.0  # after a process that has ended; one that can't start must not take all of a core
SHORT_LIFE_S = 5.0  # a process that ends earlier, and has handled nothing, can't work
SHORT_LIVES_MAX = 5  # in a row
LEAVE_S = 5.0  # for the end of a process after its drain


class _Child:
    """One process, its pipe, and its last counters."""

    def __init__(self, process: SpawnProcess, pipe: Connection, began_s: float) -> None:
        self.process = process
        self.pipe = pipe
        self.began_s = began_s
        self.stats = WorkerStats()

    def read(self) -> None:
        """Take the reports that have come."""
        with suppress(EOFError, OSError):
            while self.pipe.poll():
                self.stats = self.pipe.recv()


class WorkerProcesses(CallsCore[WorkerStats]):
    """The core of a worker with processes: starts them, restarts those that end, and adds their counters.

    Each process calls `work` with `arguments` and its end of a pipe.
    """

    def __init__(
        self,
        count: int,
        work: Callable[..., object],
        arguments: Sequence[object],
        queue: AsyncQueue,
        drain_s: float,
        runtime: Runtime,
    ) -> None:
        super().__init__("worker")
        self._count = count
        self._work = work
        self._arguments = tuple(arguments)
        self._queue = queue
        self._drain_s = drain_s
        self._runtime = runtime
        self._events = EventLog(runtime.clock)
        self._tasks = TaskOwner(self._fail, self._events)
        self._children: list[_Child] = []
        self._watches: list[asyncio.Task[None]] = []
        self._former = WorkerStats()
        self._short_lives = 0

    async def start(self) -> None:
        """Start the processes; a second call does nothing. Raises: UnreachableError, ClosedError, as `pickle`."""
        self._check_open()
        if not self._watches:
            await self._queue.queues()  # the brokers answer
            first = [self._started() for _ in range(self._count)]
            self._watches = [self._tasks.start(self._watch(child), "worker watches a process") for child in first]

    def _started(self) -> _Child:
        """Start a process. Raises: OSError."""
        context = multiprocessing.get_context("spawn")  # a fork would have locks of threads that it does not have
        pipe, theirs = context.Pipe()
        process = context.Process(target=self._work, args=(*self._arguments, theirs), name="memq-worker", daemon=True)
        try:
            process.start()
        finally:
            theirs.close()
        child = _Child(process, pipe, self._runtime.clock.monotonic())
        self._children.append(child)
        return child

    async def _watch(self, child: _Child) -> None:
        """Start a process again each time it ends. Raises: InvalidRequestError; OSError."""
        while True:
            await _end_of(child)
            child.read()
            child.pipe.close()
            self._children.remove(child)
            self._add(child.stats)
            if self._ended.is_set():
                return
            lived_s = self._runtime.clock.monotonic() - child.began_s
            is_short = lived_s < SHORT_LIFE_S and not child.stats.done
            self._short_lives = self._short_lives + 1 if is_short else 0
            code = child.process.exitcode
            self._events.warning("worker.process-ended", f"process {child.process.pid} has ended with {code}")
            if self._short_lives >= SHORT_LIVES_MAX:
                raise InvalidRequestError(
                    f"{SHORT_LIVES_MAX} processes of the worker have ended at once, the last one with exit code {code}",
                    hint="see their stderr; the module of the handler must be importable without side effects",
                )
            with suppress(TimeoutError):
                async with asyncio.timeout(RESTART_S):
                    await self._ended.wait()
                    return
            self._former.restarts += 1
            child = self._started()

    def _add(self, stats: WorkerStats) -> None:
        self._former = _sum(self._former, replace(stats, working=0))

    async def _close(self) -> None:
        """Let the processes drain, for at most `drain_s`; then kill them."""
        self.stop()
        for child in self._children:
            child.process.terminate()
        try:
            if self._watches:
                await asyncio.wait(self._watches, timeout=self._drain_s + LEAVE_S)
            for child in list(self._children):
                child.process.kill()
            if self._watches:
                await asyncio.wait(self._watches)
        finally:
            await self._tasks.stop()
            await self._queue.close()

    def stats(self) -> WorkerStats:
        """Return the counters of all processes, at most half a second old."""
        found = self._former
        for child in list(self._children):
            child.read()
            found = _sum(found, child.stats)
        return found


async def _end_of(child: _Child) -> None:
    """Return when a process has ended."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(child.process.sentinel, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(child.process.sentinel)
    child.process.join()


def _sum(one: WorkerStats, other: WorkerStats) -> WorkerStats:
    names = [field.name for field in fields(WorkerStats)]
    return WorkerStats(**{name: getattr(one, name) + getattr(other, name) for name in names})


def check_picklable(handler: Callable[..., object]) -> None:
    """Check that another process finds a handler. Raises: InvalidRequestError."""
    try:
        ForkingPickler.dumps(handler)
    except Exception as error:
        raise InvalidRequestError(
            f"the handler can't be sent to another process: {error}",
            hint="use a function of a module, not a lambda or a local function",
        ) from error


def serve(worker: BlockingCalls[WorkerStats], pipe: Connection) -> None:
    """Run a worker in this process, until SIGTERM, or the end of the process that has started this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, too, which sends SIGTERM
    ended = threading.Event()

    def report() -> None:
        try:
            while not ended.wait(REPORT_S):
                pipe.send(worker.stats())
        except OSError:  # the other end is closed
            worker.stop()

    thread = threading.Thread(target=report, name="memq-worker-reports")
    thread.start()
    try:
        worker.run()
    finally:
        ended.set()
        thread.join()
        with suppress(OSError):
            pipe.send(worker.stats())
        worker.close()
