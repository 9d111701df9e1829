"""A process of memq: memory settings of its C library, its signals, its end without destructors.

Theory. When all is closed and flushed, what is left to do is to leave. librdkafka's destructors wait for requests and
threads of their own, and were seen to wait for ever after a connection had broken under a request: a broker that had
drained and closed everything never ended. So the command line keeps such clients, and ends its process without the
interpreter's teardown. A program that uses memq as a library ends as it wants to.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import signal
import sys
import threading
from contextlib import suppress
from typing import NoReturn

from memq.limits import KIB, MIB

KEPT_BYTES_MAX = 64 * MIB  # what a producer may have pending; the C library learns no more than that
_kept_bytes = 0
DESTROYER = "memq-destroy"
DESTROY_S = 1.0  # the background thread of a client ends at once; its other threads may never end
_ours = False
_ending = threading.Event()
_destroyers: list[threading.Thread] = []  # each holds one thing of `keep_for_ever`
_kept: list[object] = []  # clients of closed queues, a few for each queue of the one command that runs here


def keep_freed_blocks(kept_bytes_max: int = KEPT_BYTES_MAX) -> None:
    """Make glibc keep this much freed memory for later blocks instead of returning it.

    A buffer of 128 KiB or more is mapped again each time, and touching fresh pages costs ten times what the copy does:
    sealing a block took 815 ns per record of 1 KB, and takes 140. The threshold learns: freeing a large buffer raises
    it to the size of that buffer, and the bound of what is kept to twice as much (mallopt(3), M_MMAP_THRESHOLD). So one
    is made and freed; it comes from the kernel cleared, and its pages are never touched. It must be a little less than
    half, the C library's own bytes included. A greater value that was set before stays. Other C libraries are not
    changed by this.
    """
    global _kept_bytes
    kept_bytes_max = min(kept_bytes_max, KEPT_BYTES_MAX)
    if kept_bytes_max > _kept_bytes:
        _kept_bytes = kept_bytes_max
        bytes(kept_bytes_max // 2 - 64 * KIB)


def own_process() -> None:
    """Say that this process is a command of memq, which ends by `end_process`."""
    global _ours
    _ours = True


def keep_to_end(*things: object) -> None:
    """Keep things whose destructors may wait for ever, where the process ends without them."""
    if _ours:
        _kept.extend(things)


def keep_for_ever(thing: object) -> None:
    """Keep a thing whose destructor waits for ever, until the interpreter ends. Callers bound how many.

    An admin client hands a late answer to Python from librdkafka's background thread. Behind the interpreter's end
    that call ends the process by SIGSEGV. The client's destructor ends this thread first, and may then wait for ever:
    it runs in a daemon thread, for which the end of the process does not wait. From Python 3.12 on an interpreter
    that ends starts no threads, so this one is started here.
    """
    if _ours:  # `end_process` ends the process before its interpreter
        _kept.append(thing)
        return
    kept = [thing]
    thread = threading.Thread(target=_destroy_at_end, args=(kept,), name=DESTROYER, daemon=True)
    thread.start()
    _destroyers.append(thread)


def _destroy_at_end(kept: list[object]) -> None:
    _ending.wait()
    kept.clear()


def _destroy_kept() -> None:
    """Have everything destroyed that `keep_for_ever` has kept, while Python is still whole."""
    _ending.set()
    for thread in _destroyers:
        thread.join(DESTROY_S)


atexit.register(_destroy_kept)


def end_process(code: int) -> NoReturn:
    """Run what was registered for the exit, flush logs and output, and end the process."""
    atexit._run_exitfuncs()  # the interpreter's own way to do so, which `os._exit` leaves out
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # its reader is gone, or it was closed
            stream.flush()
    os._exit(code)


class Signals:
    """Catches both signals from the start on, until `close`. Made on the running loop."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._caught)

    def _caught(self) -> None:
        (self.second if self.first.is_set() else self.first).set()

    def close(self) -> None:
        """Give the signals back."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.remove_signal_handler(number)
