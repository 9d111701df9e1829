"""The public workers: `Worker` calls handlers in threads or processes, `AsyncWorker` in tasks."""

from __future__ import annotations

import asyncio
import inspect
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

from memq.client.arguments import check_callbacks, check_number, public_name, runtime_of
from memq.client.lifecycle import Background
from memq.client.link_pool import CONNECT_TIMEOUT_MS
from memq.client.listener.calls import AsyncCalls, BlockingCalls
from memq.client.listener.settings import RETRY_DELAYS_S, delays_of
from memq.client.queue.items import QueueItem
from memq.client.queue.queue import TIMEOUT_MS, AsyncQueue
from memq.client.queue.worker_core import WorkerCore
from memq.client.queue.worker_processes import WorkerProcesses, check_picklable, serve
from memq.client.queue.worker_settings import PROCESSES_MAX, WorkerSettings, WorkerStats, queues_of
from memq.errors import InvalidRequestError
from memq.runtime.runtime import Runtime
from memq.runtime.threads import ThreadPool
from memq.runtime.tls import Tls

Handler = Callable[[QueueItem], object]


def _settings(
    queues: str | Sequence[str],
    handler: Callable[[QueueItem], Any],
    concurrency: int,
    prefetch: int | None,
    retry_delays_s: Sequence[float],
    drain_s: float,
) -> WorkerSettings:
    """Return checked settings. Raises: TypeError; as `WorkerSettings.check`."""
    check_callbacks(handler=handler)
    if handler is None:
        raise TypeError("handler must be a function, not None")
    return WorkerSettings(
        queues=queues_of(queues),
        concurrency=concurrency,
        prefetch=prefetch,
        retry_delays_s=delays_of(retry_delays_s),
        drain_s=drain_s,
    ).check()


class Worker(BlockingCalls[WorkerStats]):
    """Calls `handler` for items of queues, in threads or processes, and acks items that are done.

    The handler gets a `memq.QueueItem`. While it runs, the worker extends the lease. When it returns, the worker acks
    the item. If it raises, the queue delivers the item again after a delay, with the error's text as its note. It may
    return or raise `memq.Retry` and `memq.DeadLetter`. If the lease is lost, the worker sets `item.lost` and does not
    ack the item. docs/queues.md has the promises.

    Args:
        handler: function of one item.
        queues: one queue or several, which take turns.
        brokers: `HOST:PORT`, several with commas or as a list; None: the environment variable MEMQ_BROKERS.
        concurrency: maximum number of handlers that run at the same time, in each process.
        processes: number of processes that run handlers, for handlers that need the CPU; 0: threads of this process.
            The handler must be a function that `pickle` finds by its name. A process that ends is started again.
        prefetch: items that are leased before a handler is free. None: as many as `concurrency`, while handlers take
            less than a second; else none.
        retry_delays_s: delay in s after each attempt; the last one counts for all further ones.
        drain_s: time for which `close` and SIGTERM wait for running handlers.
        timeout_ms: as of `memq.Queue`.
        connect_timeout_ms: as of `memq.Queue`.
        tls: as of `memq.Queue`.
        runtime: as of `memq.Queue`.

    Raises: InvalidRequestError, InvalidSettingError, InvalidNameError.
    """

    @public_name("Worker")
    def __init__(
        self,
        handler: Handler,
        queues: str | Sequence[str],
        *,
        brokers: str | Sequence[str] | None = None,
        concurrency: int = 1,
        processes: int = 0,
        prefetch: int | None = None,
        retry_delays_s: Sequence[float] = RETRY_DELAYS_S,
        drain_s: float = 30,
        timeout_ms: int = TIMEOUT_MS,
        connect_timeout_ms: int = CONNECT_TIMEOUT_MS,
        tls: Tls | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        settings = _settings(queues, handler, concurrency, prefetch, retry_delays_s, drain_s)
        check_number("processes", processes, 0, PROCESSES_MAX, int)
        if inspect.iscoroutinefunction(handler):
            raise InvalidRequestError(
                "the handler of a memq.Worker is a coroutine function", hint="use memq.aio.Worker"
            )
        runtime = runtime_of(runtime, tls)
        queue = AsyncQueue(brokers, timeout_ms=timeout_ms, connect_timeout_ms=connect_timeout_ms, runtime=runtime)
        if processes:
            arguments = {
                "queues": settings.queues,
                "brokers": brokers,
                "concurrency": concurrency,
                "prefetch": prefetch,
                "retry_delays_s": settings.retry_delays_s,
                "drain_s": drain_s,
                "timeout_ms": timeout_ms,
                "connect_timeout_ms": max(connect_timeout_ms, timeout_ms),  # brokers may restart when it begins
                "tls": tls,
            }
            check_picklable(handler)
            self._core = WorkerProcesses(processes, _work, (handler, arguments), queue, drain_s, runtime)
        else:
            threads = ThreadPool("worker", concurrency)

            async def call(item: QueueItem) -> object:
                return await threads.run(handler, item)

            self._core = WorkerCore(settings, queue, runtime, call, end_calls=lambda: threads.close(within_s=0))
        self._background = Background("worker", self._core)
        self._closed = False

    def run(self) -> None:
        """Work until `stop`, SIGTERM, Ctrl-C or an error; then finish as `close`.

        SIGTERM counts in the main thread, while this runs. Raises: the error that stopped it; as `start`.
        """
        with _sigterm(self.stop):
            super().run()


class AsyncWorker(AsyncCalls[WorkerStats]):
    """Calls a coroutine function for items of queues, in tasks. Arguments as those of `memq.Worker`.

    Use it as `async with`, on one event loop.
    """

    @public_name("Worker")
    def __init__(
        self,
        handler: Callable[[QueueItem], Any],
        queues: str | Sequence[str],
        *,
        brokers: str | Sequence[str] | None = None,
        concurrency: int = 1,
        prefetch: int | None = None,
        retry_delays_s: Sequence[float] = RETRY_DELAYS_S,
        drain_s: float = 30,
        timeout_ms: int = TIMEOUT_MS,
        connect_timeout_ms: int = CONNECT_TIMEOUT_MS,
        tls: Tls | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        settings = _settings(queues, handler, concurrency, prefetch, retry_delays_s, drain_s)

        async def call(item: QueueItem) -> object:
            answer = handler(item)
            return await answer if inspect.isawaitable(answer) else answer

        runtime = runtime_of(runtime, tls)
        queue = AsyncQueue(brokers, timeout_ms=timeout_ms, connect_timeout_ms=connect_timeout_ms, runtime=runtime)
        self._core = WorkerCore(settings, queue, runtime, call)

    async def run(self) -> None:
        """Work until `stop`, SIGTERM, a cancellation or an error; then finish as `close`.

        SIGTERM counts in the main thread, while this runs. Raises: the error that stopped it; as `start`.
        """
        loop, watched = asyncio.get_running_loop(), False
        with suppress(ValueError, RuntimeError, NotImplementedError):  # another thread; no signals on this loop
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # else it is the program's own
                loop.add_signal_handler(signal.SIGTERM, self.stop)
                watched = True
        try:
            await super().run()
        finally:
            if watched:
                loop.remove_signal_handler(signal.SIGTERM)


def _work(handler: Handler, arguments: dict[str, Any], pipe: Connection) -> None:
    """Work in a process of its own."""
    serve(Worker(handler, **arguments), pipe)


@contextmanager
def _sigterm(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on SIGTERM, in the main thread, unless the program has a handler of its own."""
    if threading.current_thread() is not threading.main_thread() or (
        signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, frame: stop())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
