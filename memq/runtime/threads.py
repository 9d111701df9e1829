"""The only access to threads: bounded pools, for blocking libraries and compression.

Those are the filesystem store, the databases, libraries that block, the dashboard's look into whole objects, and sync
producers, whose blocks are compressed.
Everything else runs on the event loop, so that the simulation can run it on virtual time. Libraries may have threads of
their own: the process does not end while one is inside Python.
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

    The calls that wait for a thread are as many as coroutines await them: whoever starts those bounds them.
    """

    def __init__(self, name: str, threads_max: int) -> None:
        self.name = name
        self._executor = ThreadPoolExecutor(threads_max, f"memq-{name}")
        self._calls: dict[Future[Any], asyncio.Future[Any]] = {}  # with the waiter of each
        self._closed = False

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function` in a thread and return what it returns.

        A cancellation waits for a call that runs already: its thread may still read the caller's buffers. A call
        that has no thread yet is given up at once.
        Raises: ClosedError, and what the function raises.
        """
        if self._closed:
            raise ClosedError(f"{self.name} is closed")
        call = self._executor.submit(function, *args, **kwargs)
        waiting: asyncio.Future[T] = asyncio.wrap_future(call)
        self._calls[call] = waiting
        call.add_done_callback(self._calls.pop)
        try:
            await asyncio.wait((waiting,))  # it leaves the call alone when this is cancelled
        except asyncio.CancelledError:
            if not call.cancel():
                await _settle(waiting)
            raise
        return waiting.result()

    async def close(self, last: Callable[[], object] | None = None, within_s: float | None = None) -> bool:
        """Refuse new calls, wait for those that run or wait, end the threads; closing twice is fine.

        `last` is the last call. With `within_s` calls that take longer are left behind with their threads, and who
        waits for them is cancelled. Returns whether none was left behind.
        """
        calls = dict(self._calls)
        if last is not None and not self._closed:
            call = self._executor.submit(last)
            calls[call] = asyncio.wrap_future(call)
        self._closed = True
        if calls and within_s is not None:
            _, left = await asyncio.wait(calls.values(), timeout=within_s)
            if left:
                for waiting in left:
                    waiting.cancel()
                self._executor.shutdown(wait=False, cancel_futures=True)
                return False
        for waiting in calls.values():
            await _settle(waiting)
        self._executor.shutdown(wait=True)
        return True


class SpareThreads:
    """At most `threads_max` extra threads for compression: taken only while idle.

    They start when needed, and end at `close` or when the owner is gone. With `threads_max` = 0 there are none.
    """

    def __init__(self, name: str, threads_max: int) -> None:
        self._executor = ThreadPoolExecutor(max(threads_max, 1), f"memq-{name}")
        self._idle = threading.Semaphore(threads_max)

    def offer(self, function: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> bool:
        """Run `function` soon, which must not raise; False when the caller has to: all are busy, or closed."""
        if not self._idle.acquire(blocking=False):
            return False
        try:
            self._executor.submit(self._run, partial(function, *args, **kwargs))
        except RuntimeError:  # closed, or the interpreter ends
            self._idle.release()
            return False
        return True

    def close(self) -> None:
        """Accept no more calls; running ones finish. Closing twice is fine."""
        self._executor.shutdown(wait=False)

    def _run(self, call: Callable[[], object]) -> None:
        try:
            call()
        finally:
            self._idle.release()


async def _settle(waiting: asyncio.Future[T]) -> None:
    """Wait until the call is done; a cancellation that comes meanwhile is raised then."""
    cancelled: asyncio.CancelledError | None = None
    while not waiting.done():
        try:
            await asyncio.wait((waiting,))
        except asyncio.CancelledError as error:
            cancelled = error
    if not waiting.cancelled():
        waiting.exception()  # marked as seen: its waiter is gone
    if cancelled is not None:
        raise cancelled


def expect_native_threads() -> None:
    """Note that a library's own threads call into Python from now on, like obstore's."""
    atexit.unregister(wait_for_native_threads)
    atexit.register(wait_for_native_threads)


def wait_for_native_threads() -> None:
    """Return when no thread but Python's own is inside Python, or after a second.

    Up to Python 3.13 the interpreter ends, as soon as it is shutting down, every thread that comes back for its lock.
    A thread of a Rust library can't be ended so: the whole process aborts, with all its work done. A request's thread
    gives the lock away while it wakes the event loop, and may come back when the program is already through.
    """
    pause = threading.Event()
    for _ in range(_LEAVE_CHECKS_MAX):
        pause.wait(_LEAVE_CHECK_S)  # also lets waiting threads in
        if sys._current_frames().keys() <= {thread.ident for thread in threading.enumerate()}:
            return
