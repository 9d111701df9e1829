"""The one I/O thread of the package: an event loop that all sync clients of the process share."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import os
import threading
import warnings
from collections.abc import Callable, Coroutine
from itertools import count
from typing import Any, Protocol, TypeVar

from memq.errors import ForkedError, InvalidRequestError, TimedOutError
from memq.runtime.threads import wait_for_native_threads

EXIT_FLUSH_S_MAX = 5.0
Result = TypeVar("Result")


class SyncClient(Protocol):
    """A sync client that the thread knows of until it is closed."""

    def forked(self) -> None:
        """The process is a child after fork(): refuse all further use. Must not block."""
        ...

    async def at_exit(self) -> None:
        """Flush and close this open client at the interpreter's end. Runs on the thread's loop."""
        ...


class IoThread:
    """An event loop in a daemon thread. A daemon, since a program that forgets to close must still end."""

    def __init__(self) -> None:
        self.loop = new_event_loop()
        self._clients: dict[int, SyncClient] = {}
        self._numbers = count()
        self._thread = threading.Thread(target=self.loop.run_forever, name="memq-io", daemon=True)
        self._thread.start()

    @property
    def current(self) -> bool:
        """Whether the caller is on this thread."""
        return threading.get_ident() == self._thread.ident

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Run a function soon on the loop, from any thread."""
        self.loop.call_soon_threadsafe(function, *args)

    def run(self, coroutine: Coroutine[Any, Any, Result], timeout_s: float | None = None) -> Result:
        """Run a coroutine on the loop and wait for its result, from any other thread.

        It is cancelled on a timeout.

        Raises: what the coroutine raises; TimedOutError; InvalidRequestError on the thread itself, in a callback.
        """
        if self.current:
            coroutine.close()
            raise InvalidRequestError(
                "a callback on the I/O thread can't wait for the I/O thread", hint="hand the work to a thread of yours"
            )
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError as error:
            if future.done():
                raise  # the coroutine's own
            future.cancel()
            raise TimedOutError(f"no result in {timeout_s:g} s") from error
        except BaseException:
            future.cancel()  # Ctrl-C while waiting
            raise

    def add_client(self, client: SyncClient) -> int:
        """Keep a client until `remove_client`, also when its owner forgets it; return its number."""
        number = next(self._numbers)
        self._clients[number] = client
        return number

    def remove_client(self, number: int) -> None:
        """Forget a client that was closed."""
        self._clients.pop(number, None)

    def clients(self) -> list[SyncClient]:
        """Return the open clients."""
        return list(self._clients.values())


_lock = threading.Lock()
_thread: IoThread | None = None


def io_thread() -> IoThread:
    """Return the process's I/O thread, started at its first use."""
    global _thread
    with _lock:
        if _thread is None:
            _thread = IoThread()
        return _thread


def on_io_thread() -> bool:
    """Whether the caller is on the I/O thread, that is in a callback: waiting there would wait for ever."""
    return _thread is not None and _thread.current


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return a uvloop event loop where there is uvloop, else asyncio's."""
    try:
        import uvloop
    except ImportError:  # Windows
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def forked_error(what: str) -> ForkedError:
    """Return the error for a client that is used in a child of the process that made it."""
    return ForkedError(f"this {what} was created before fork() and can't be used in process {os.getpid()}")


async def _finish(clients: list[SyncClient]) -> None:
    await asyncio.gather(*(client.at_exit() for client in clients), return_exceptions=True)


def flush_at_exit() -> None:
    """Send pending records before the interpreter ends."""
    if _thread is not None:
        flush_clients(_thread)


def flush_clients(thread: IoThread) -> None:
    """Warn of open clients of `thread`, and send their pending records."""
    clients = thread.clients()
    if not clients:
        return
    what = "a memq client was" if len(clients) == 1 else f"{len(clients)} memq clients were"
    warnings.warn(f"{what} not closed before exit", ResourceWarning, stacklevel=1)
    try:
        thread.run(_finish(clients), EXIT_FLUSH_S_MAX)
    except TimedOutError:
        warnings.warn(f"memq gave up flushing at exit after {EXIT_FLUSH_S_MAX:g} s", ResourceWarning, stacklevel=1)
    wait_for_native_threads()  # the clients that were closed just now may have given up requests


def _forget_after_fork() -> None:
    """In a forked child, start again with new threads and locks: the parent's threads are gone."""
    global _lock, _thread
    thread, _thread, _lock = _thread, None, threading.Lock()
    if thread is not None:
        for client in thread.clients():
            client.forked()


atexit.register(flush_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
