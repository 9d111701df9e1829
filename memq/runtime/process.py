"""A process of memq: memory settings of its C library, its signals, its end without destructors.

Theory. librdkafka's destructors wait for requests and threads of their own. After a connection broke during a request,
they waited for ever: a broker that had drained and closed everything never ended. So a command of memq never
destroys such clients. It closes and flushes everything, and then ends its process without the interpreter's teardown.
A program that uses memq as a library ends in its own way.
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
from pathlib import Path
from typing import NoReturn

from memq.limits import KIB, MIB

KEPT_BYTES_MAX = 64 * MIB  # pending bytes of one producer; glibc's threshold does not adapt beyond that
_kept_bytes = 0
DESTROYER = "memq-destroy"
DESTROY_S = 1.0  # a client's background thread ends at once; its other threads may never end
_ours = False
_ending = threading.Event()
_destroyers: list[threading.Thread] = []  # each holds one object of `keep_for_ever`
_kept: list[object] = []  # clients of closed queues: a few for each queue of the command


def keep_freed_blocks(kept_bytes_max: int = KEPT_BYTES_MAX) -> None:
    """Make glibc keep this much freed memory for later blocks instead of returning it.

    By default glibc maps each buffer of 128 KiB or more afresh, and the first access to its pages costs ten times the
    copy. Sealing a block took 815 ns per record of 1 KB, and now takes 140 ns. The threshold adapts: after a large
    buffer is freed, it is that buffer's size, and glibc keeps twice as much (mallopt(3), M_MMAP_THRESHOLD). So this
    function allocates and frees one such buffer, without access to its pages. The buffer is a little less than half
    of `kept_bytes_max`, because glibc adds bytes of its own. A greater earlier value remains. Other C libraries are
    not affected.
    """
    global _kept_bytes
    kept_bytes_max = min(kept_bytes_max, KEPT_BYTES_MAX)
    if kept_bytes_max > _kept_bytes:
        _kept_bytes = kept_bytes_max
        bytes(kept_bytes_max // 2 - 64 * KIB)


def own_process() -> None:
    """Declare that this process is a command of memq, which ends by `end_process`."""
    global _ours
    _ours = True


def keep_to_end(*things: object) -> None:
    """Keep objects whose destructors may wait for ever, if `end_process` ends this process."""
    if _ours:
        _kept.extend(things)


def keep_for_ever(thing: object) -> None:
    """Keep an object whose destructor may wait for ever, until the interpreter ends.

    Callers bound the number of objects.

    librdkafka's background thread passes late answers of an admin client to Python. After the interpreter's end that
    call ends the process by SIGSEGV. The client's destructor ends that thread first, but may then wait for ever. So
    the destructor runs in a daemon thread, for which the end of the process does not wait. The thread is started
    here, because from Python 3.12 on an interpreter that ends can start no threads.
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
    """Destroy all objects that `keep_for_ever` has kept, before the interpreter ends."""
    _ending.set()
    for thread in _destroyers:
        thread.join(DESTROY_S)


atexit.register(_destroy_kept)


def end_process(code: int) -> NoReturn:
    """Run the functions registered with `atexit`, flush logs and output, and end the process."""
    atexit._run_exitfuncs()  # `os._exit` does not run them
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the reader of the stream is gone, or the stream is closed
            stream.flush()
    os._exit(code)


def is_running(pid: int) -> bool:
    """Whether this host has a process with this id; a zombie counts as ended."""
    with suppress(OSError, ValueError, IndexError):
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0]
        return state not in "ZX"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # a process of another user
        return True
    return True


class Signals:
    """Catches SIGTERM and SIGINT until `close`. `first` and `second` are set by the first two of them."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._caught)

    def _caught(self) -> None:
        (self.second if self.first.is_set() else self.first).set()

    def close(self) -> None:
        """Restore the default handlers."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.remove_signal_handler(number)
