"""Watches the log of the product and its pointers, which are decoded once, and ends a run for a finding."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator

from memq.errors import MemqError
from memq.format import pointer as pointer_format
from memq.simulation.world.world import World


class LogWatch(logging.Handler):
    """Ends a run for what the product logs: an exception that is none of memq's own, a broken assertion above all.

    So does a block in conflict with another one of its identity, unless producers are `clones`. In a `calm` world no
    broker refuses a commit because other requests of the connection wait.
    """

    def __init__(self, world: World, *, clones: bool, calm: bool) -> None:
        super().__init__(logging.WARNING if calm else logging.ERROR)
        self._world = world
        self._clones = clones

    def emit(self, record: logging.LogRecord) -> None:
        """Take one record."""
        if record.levelno < logging.ERROR:
            if "commit-retry" in record.getMessage() and "requests of this connection" in record.getMessage():
                self._world.fail(f"logged {record.getMessage()}")
            return
        cause = record.exc_info[1] if record.exc_info else None
        if cause is not None and not isinstance(cause, MemqError):
            self._world.fail(f"logged {record.getMessage()}", cause)
        if "identity-conflict" in record.getMessage() and not self._clones:
            self._world.fail(f"logged {record.getMessage()}")


@contextlib.contextmanager
def remembered_pointers() -> Iterator[None]:
    """Decode each pointer once in the block: sweeps, readers and checks read the same bytes again and again."""
    decode = pointer_format.parse_pointer
    remembered = functools.lru_cache(maxsize=None)(decode)
    pointer_format.parse_pointer = lambda body: remembered(body) if type(body) is bytes else decode(body)
    try:
        yield
    finally:
        pointer_format.parse_pointer = decode
