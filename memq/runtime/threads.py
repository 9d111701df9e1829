"""The only access to threads: bounded pools, for blocking libraries and compression.

The users are the filesystem store, the databases, libraries that block, the dashboard when it decodes whole objects,
and sync producers, which compress blocks.
All other code runs on the event loop, so that the simulation can run it on virtual time. Libraries may have threads of
their own: the process does not end while one of them runs Python code.
"""

from __future__ import annotations

import asyncio
import atexit
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

from memq.errors import ClosedError

P = ParamSpec("P")
T = TypeVar("T")

_LEAVE_CHECK_S = 0.002
_LEAVE_CHECKS_MAX = 500


class ThreadPool:
    """At most `threads_max` threads of one owner, started when needed.

    The queue of calls has no bound of its own: each caller of `run` adds one, and the owner bounds its callers.
    """

    def __init__(self, name: str, threads_max: int) -> None:
        self.name = name
        self._executor = ThreadPoolExecutor(threads_max, f"memq-{name}")
        self._calls: dict[Future[Any], asyncio.Future[Any]] = {}  # with the waiter of each
        self._closed = False
        self._left_behind = False

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function` in a thread and return what it returns.

        A cancellation waits for a call that runs already, because its thread may still read the caller's buffers. A
        call that has no thread yet is dropped at once. SystemExit and KeyboardInterrupt of the function become a
        RuntimeError: raised in a task, they would end the event loop, and all callers would wait for ever.
        Raises: ClosedError, and the errors of the function.
        """
        if self._closed:
            raise ClosedError(f"{self.name} is closed")
        call, waiting = self._submit(partial(function, *args, **kwargs))
        try:
            await asyncio.wait((waiting,))  # unlike `await waiting`, a cancellation does not reach the call
        except asyncio.CancelledError:
            if not call.cancel():
                await _settle(waiting)
            raise
        ended = waiting.exception()
        if isinstance(ended, SystemExit | KeyboardInterrupt):
            raise RuntimeError(f"the function ended with {type(ended).__name__}: {ended}") from ended
        return waiting.result()

    async def close(self, last: Callable[[], object] | None = None, within_s: float | None = None) -> bool:
        """Refuse new calls, wait for all earlier ones, end the threads; closing twice is fine.

        `last` is submitted as the last call. With `within_s`, calls that take longer are left behind with their
        threads, and the tasks that wait for them are cancelled. Return whether no call was left behind.
        """
        if last is not None and not self._closed:
            self._submit(last)
        self._closed = True
        calls = list(self._calls.values())
        if calls and within_s is not None and not self._left_behind:
            _, left = await asyncio.wait(calls, timeout=within_s)
            if left:
                self._left_behind = True
                for waiting in left:
                    waiting.cancel()
                self._executor.shutdown(wait=False, cancel_futures=True)
        for waiting in calls:
            await _settle(waiting)
        if self._left_behind:  # by any call of `close`: its thread may never end
            return False
        self._executor.shutdown(wait=True)
        return True

    def _submit(self, function: Callable[[], T]) -> tuple[Future[T], asyncio.Future[T]]:
        call = self._executor.submit(function)
        waiting = self._calls[call] = asyncio.wrap_future(call)
        call.add_done_callback(self._calls.pop)
        return call, waiting


class SpareThreads:
    """At most `threads_max` extra threads for compression: taken only while idle.

    The threads start when needed, and end at `close` or when this object is deleted. `threads_max` may be 0.
    """

    def __init__(self, name: str, threads_max: int) -> None:
        self._executor = ThreadPoolExecutor(max(threads_max, 1), f"memq-{name}")
        self._idle = threading.Semaphore(threads_max)

    def offer(self, function: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> bool:
        """Run `function`, which must not raise, in a thread; False if all are busy, or this is closed.

        After False, the caller runs `function` itself.
        """
        if not self._idle.acquire(blocking=False):
            return False
        try:
            self._executor.submit(self._run, partial(function, *args, **kwargs))
        except RuntimeError:  # closed, or the interpreter ends
            self._idle.release()
            return False
        return True

    def close(self, wait: bool) -> None:
        """Accept no more calls; running ones finish. `wait` waits for their threads. Closing twice is fine."""
        self._executor.shutdown(wait)

    def _run(self, call: Callable[[], object]) -> None:
        try:
            call()
        finally:
            self._idle.release()


async def _settle(waiting: asyncio.Future[T]) -> None:
    """Wait until the call is done. A cancellation in the meantime is raised after that."""
    cancelled: asyncio.CancelledError | None = None
    while not waiting.done():
        try:
            await asyncio.wait((waiting,))
        except asyncio.CancelledError as error:
            cancelled = error
    if not waiting.cancelled():
        waiting.exception()  # retrieved, so that asyncio does not log it: no caller awaits it any more
    if cancelled is not None:
        raise cancelled


def expect_native_threads() -> None:
    """Register `wait_for_native_threads`, for a library whose threads call into Python, like obstore."""
    atexit.unregister(wait_for_native_threads)
    atexit.register(wait_for_native_threads)


def wait_for_native_threads() -> None:
    """Return when only Python's own threads run Python code, or after a second.

    Up to Python 3.13, an interpreter that shuts down ends each thread that asks for the GIL. A thread of a Rust library
    does not survive that: the whole process aborts, although its work is done. Such a thread releases the GIL while it
    wakes the event loop, and may ask for it again after the program's last line.
    """
    pause = threading.Event()
    for _ in range(_LEAVE_CHECKS_MAX):
        pause.wait(_LEAVE_CHECK_S)  # also lets waiting threads in
        if sys._current_frames().keys() <= {thread.ident for thread in threading.enumerate()}:
            return
