"""What memq tells a Python that runs tasks of Spark, one after another: which memory to keep, and to leave alone."""

from __future__ import annotations

import gc
from functools import cache

from memq.memory import keep_freed_blocks


@cache
def begin_tasks() -> None:
    """Once in a process: keep freed blocks, and never look for garbage again in what exists after the imports.

    PySpark's worker collects all garbage after each task, before it takes the next one, and went through all of
    PySpark, Arrow and memq for it: 45 ms of CPU, most of the price of a task.
    """
    keep_freed_blocks()
    gc.freeze()
