"""Tasks of Celery for tests; the environment names the broker, the results and a file that notes the calls."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from celery import Celery

import memq.celery  # registers memq://
from memq.runtime.clock import SystemClock

assert memq.celery.SCHEME

CLOCK = SystemClock()

app = Celery("tests.celery_tasks", broker=os.environ["TASKS_BROKER"], backend=os.environ["TASKS_RESULTS"])
app.conf.update(
    broker_transport_options={"visibility_timeout": 3, "queue_name_prefix": "tasks."},
    broker_connection_retry_on_startup=True,
    worker_prefetch_multiplier=1,
)
NOTES = Path(os.environ["TASKS_NOTES"])


def note(text: str) -> None:
    """Add a line to the file of calls."""
    with NOTES.open("a") as file:
        file.write(f"{text}\n")


@app.task  # type: ignore[untyped-decorator]  # Celery has no types
def add(x: int, y: int) -> int:
    """Celery's first example."""
    return x + y


@app.task  # type: ignore[untyped-decorator]  # Celery has no types
def total(numbers: list[int]) -> int:
    """Add the results of a group."""
    return sum(numbers)


@app.task(bind=True, max_retries=3)  # type: ignore[untyped-decorator]
def fails_twice(self: Any, name: str) -> int:
    """Fail two times, and return the number of tries."""
    tries: int = self.request.retries
    note(f"{name} {tries} {CLOCK.wall_ms() / 1_000:.3f}")
    if tries < 2:
        raise self.retry(countdown=1)
    return tries + 1


@app.task  # type: ignore[untyped-decorator]  # Celery has no types
def noted(name: str) -> None:
    """Note the call."""
    note(f"{name} {CLOCK.wall_ms() / 1_000:.3f}")


@app.task(acks_late=True, reject_on_worker_lost=True)  # type: ignore[untyped-decorator]
def slow(name: str, seconds: float) -> None:
    """Note begin and end."""
    note(f"begin {name} {os.getpid()}")
    threading.Event().wait(seconds)
    note(f"end {name} {os.getpid()}")
