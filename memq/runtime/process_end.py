"""The end of a process of memq's own: at once, without the destructors of libraries.

Theory. When all is closed and flushed, what is left to do is to leave. librdkafka's destructors wait for requests and
threads of their own, and were seen to wait for ever after a connection had broken under a request: a broker that had
drained and closed everything never ended. So the command line keeps such clients, and ends its process without the
interpreter's teardown. A program that uses memq as a library ends as it wants to.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import sys
from contextlib import suppress
from typing import NoReturn

_ours = False
_kept: list[object] = []  # clients of closed queues, a few for each queue of the one command that runs here


def own_process() -> None:
    """Say that this process is a command of memq, which ends by `end_process`."""
    global _ours
    _ours = True


def keep_to_end(*things: object) -> None:
    """Keep things whose destructors may wait for ever, where the process ends without them."""
    if _ours:
        _kept.extend(things)


def keep_for_ever(thing: object) -> None:
    """Keep a thing whose destructor waits for ever, past the end of the interpreter, too.

    Callers bound how many.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def end_process(code: int) -> NoReturn:
    """Run what was registered for the exit, flush logs and output, and end the process."""
    atexit._run_exitfuncs()  # the interpreter's own way to do so, which `os._exit` leaves out
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # its reader is gone, or it was closed
            stream.flush()
    os._exit(code)
