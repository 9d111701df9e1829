"""Memory settings of a Python that runs Spark tasks one after another."""

from __future__ import annotations

import gc
from functools import cache

from memq.runtime.allocator import keep_freed_blocks


@cache
def begin_tasks() -> None:
    """Once per process: keep freed blocks, and exclude imports from garbage collection.

    PySpark's worker collects all garbage after each task, before it takes the next one, and went through all of
    PySpark, Arrow and memq for it: 45 ms of CPU, most of the price of a task.
    """
    keep_freed_blocks()
    gc.freeze()
