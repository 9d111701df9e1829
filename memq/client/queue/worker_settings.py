"""Validated settings of a worker, its counters, and its decision after each call of the handler. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from memq.client.arguments import check_number, check_seconds
from memq.client.listener.answers import AFTER_S_MAX, DeadLetter, HandlerAnswer, Park, Retry, cause_of
from memq.client.listener.settings import CONCURRENCY_MAX, DELAYS_MAX
from memq.errors import InvalidRequestError, InvalidSettingError
from memq.limits import QUEUE_NOTE_BYTES_MAX, QUEUES_PER_REQUEST_MAX
from memq.queues.decisions import NackKind
from memq.queues.pop.groups import check_queue

PROCESSES_MAX = 256
SHORT_S = 1.0  # with handlers that take longer, a waiting item is better at another worker


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """The settings of one worker. `prefetch` None: as many items as handlers, while handlers are short."""

    queues: tuple[str, ...]
    concurrency: int
    prefetch: int | None
    retry_delays_s: tuple[float, ...]
    drain_s: float

    def check(self) -> WorkerSettings:
        """Return itself when the values hold.

        Raises: InvalidSettingError, InvalidRequestError, InvalidNameError.
        """
        if not 0 < len(self.queues) <= QUEUES_PER_REQUEST_MAX:
            raise InvalidRequestError(f"{len(self.queues)} queues, 1 to {QUEUES_PER_REQUEST_MAX} are allowed")
        for queue in self.queues:
            check_queue(queue)
        check_number("concurrency", self.concurrency, 1, CONCURRENCY_MAX, int)
        if self.prefetch is not None:
            check_number("prefetch", self.prefetch, 0, CONCURRENCY_MAX, int)
        check_seconds("drain_s", self.drain_s, 0, 86_400)
        if not 0 < len(self.retry_delays_s) <= DELAYS_MAX:
            raise InvalidSettingError(
                f"retry_delays_s has {len(self.retry_delays_s)} delays, 1 to {DELAYS_MAX} are allowed"
            )
        for delay_s in self.retry_delays_s:
            check_seconds("retry_delays_s", delay_s, 0, AFTER_S_MAX)
        return self

    def leased_max(self, mean_s: float | None) -> int:
        """Return the maximum number of leased items.

        `mean_s` is the mean time of the handlers in seconds, None before the first end.
        """
        if self.prefetch is not None:
            return self.concurrency + self.prefetch
        return self.concurrency * (2 if mean_s is not None and mean_s < SHORT_S else 1)


@dataclass(slots=True)
class WorkerStats:
    """Counters of a worker since its start.

    Numbers of items: `done` were acked; `retried` were given back after a failure; `dead` had their last attempt;
    `lost` had no lease any more, so they were not acked; `returned` had not begun when the worker stopped. `working` is
    the present number of running handlers, and `handler_s` their time so far in seconds. `restarts` counts processes
    that ended and were started again.
    """

    done: int = 0
    retried: int = 0
    dead: int = 0
    lost: int = 0
    returned: int = 0
    working: int = 0
    handler_s: float = 0.0
    restarts: int = 0


class Return(NamedTuple):
    """The decision to give an item back after `after_s` seconds, with a note."""

    after_s: float
    note: bytes
    kind: NackKind


def queues_of(queues: str | Sequence[str]) -> tuple[str, ...]:
    """Return the queues, each once. Raises: TypeError."""
    return (queues,) if isinstance(queues, str) else tuple(dict.fromkeys(queues))


def outcome_of(answer: object, attempt: int, delays_s: Sequence[float]) -> Return | None:
    """Return the next step after the answer of a handler, or its exception; None: the item is done."""
    if isinstance(answer, type) and issubclass(answer, HandlerAnswer):
        answer = answer()
    if not isinstance(answer, BaseException):
        return None
    if isinstance(answer, DeadLetter | Park):
        return Return(0, note_of(answer.reason or "given up by the handler"), NackKind.DEAD)
    after_s = delays_s[min(attempt, len(delays_s)) - 1]
    if isinstance(answer, Retry):
        after_s = after_s if answer.after is None else answer.after
        return Return(after_s, note_of(answer.reason or "the handler asked for a retry"), NackKind.FAILED)
    return Return(after_s, note_of(cause_of(answer)), NackKind.FAILED)


def note_of(text: str) -> bytes:
    """Return a text as the metadata of a nack, cut to its bound between two characters."""
    return text.encode("utf-8", "replace")[:QUEUE_NOTE_BYTES_MAX].decode("utf-8", "ignore").encode()
