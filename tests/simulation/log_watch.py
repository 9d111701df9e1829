"""Ends a run for what the product logs."""

from __future__ import annotations

import logging

from memq.errors import MemqError
from memq.simulation.world.world import World


class LogWatch(logging.Handler):
    """Ends a run for what the product logs: an exception that is none of memq's own, a broken assertion above all.

    So does a block in conflict with another one of its identity, unless producers are `clones`.
    """

    def __init__(self, world: World, *, clones: bool) -> None:
        super().__init__(logging.ERROR)
        self._world = world
        self._clones = clones

    def emit(self, record: logging.LogRecord) -> None:
        """Take one record."""
        cause = record.exc_info[1] if record.exc_info else None
        if cause is not None and not isinstance(cause, MemqError):
            self._world.fail(f"logged {record.getMessage()}", cause)
        if "identity-conflict" in record.getMessage() and not self._clones:
            self._world.fail(f"logged {record.getMessage()}")
