"""Answers that a client or a broker awaits: logged when they are late, and named in errors.

A broker, store or queue may hang with its connections open. Each answer has a time-out of its own, and until then
nothing fails. So each caller notes here which peer owes it which answer. A peer that owes an answer for
`LATE_AFTER_S` is late. The log gets one line for each late peer, then one a minute, and one when the peer has answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime

from memq.errors import RetryableError
from memq.runtime.clock import Clock
from memq.runtime.logs import OUTAGE_INTERVAL_S, EventLog

ANSWER_S = 1.0  # for the answer to a question that begins late: a peer that answers it is not silent
LATE_AFTER_S = 3.5  # healthy brokers answer an empty poll after 2 s
KEPT_S = 60.0  # a failure without a retry is described for so long
OWING_MAX = 1_000
TEXT_CHARS_MAX = 1_000


@dataclass(slots=True, eq=False)
class Wait:
    """One awaited answer: what it is, since when (monotonic s), and why the last try failed.

    `answered`: a RetryableError that ends the wait is the peer's answer, not the lack of one.
    """

    what: str
    since_s: float
    cause: str = ""
    answered: bool = False


@dataclass(slots=True, eq=False)
class _Owing:
    """A peer that owes answers; `since_s` is the start of the oldest of them."""

    who: str
    since_s: float
    waits: dict[Wait, None] = field(default_factory=dict)
    cause: str = ""  # of the last wait that failed
    failed_s: float | None = None
    logged_s: float | None = None


class Waits:
    """The answers that one client or broker awaits, on one event loop; logged if `events` is given."""

    def __init__(self, clock: Clock, events: EventLog | None = None) -> None:
        self._clock = clock
        self._events = events
        self._owing: dict[str, _Owing] = {}

    @contextmanager
    def on(self, who: str, what: str, since_s: float | None = None) -> Iterator[Wait]:
        """Note that `who` owes `what`, since now or an earlier time (monotonic s), until the end of the block.

        The block's end counts as the answer, except an end by TimeoutError, by a RetryableError (unless
        `Wait.answered` is set), or by a cancellation.
        """
        wait = Wait(what, self._clock.monotonic() if since_s is None else since_s)
        owing = self._owing.get(who) or self._add(who, wait.since_s)
        if not self._is_fresh(owing):  # it failed long ago, and was not asked since
            owing.since_s, owing.cause, owing.failed_s = wait.since_s, "", None
        owing.since_s = min(owing.since_s, wait.since_s)
        owing.waits[wait] = None
        timer = self._arm(owing, wait)
        answered = False
        try:
            yield wait
            answered = True
        except RetryableError as error:
            answered = wait.answered
            wait.cause = str(error)
            raise
        except TimeoutError:
            wait.cause = f"no answer in {self._clock.monotonic() - wait.since_s:.0f} s"
            raise
        except Exception:
            answered = True
            raise
        finally:
            if timer is not None:
                timer.cancel()
            del owing.waits[wait]
            self._settle(owing, wait, answered=answered)

    def describe(self, *, failing: bool = False) -> str:
        """Return text about late peers: the answer, since when, and why; with `failing`, only failed tries.

        Any thread may call this: a producer whose buffer is full calls it on its user's thread.
        """
        late = [owing for owing in list(self._owing.values()) if self._is_late(owing)]
        return "; ".join(self._text(owing) for owing in late if not failing or _cause(owing))[:TEXT_CHARS_MAX]

    # ---- inside ----------------------------------------------------------------------------------

    def _add(self, who: str, since_s: float) -> _Owing:
        if len(self._owing) >= OWING_MAX:
            idle = next((name for name, owing in self._owing.items() if not owing.waits), None)
            self._owing.pop(idle or next(iter(self._owing)))
        owing = self._owing[who] = _Owing(who, since_s)
        return owing

    def _settle(self, owing: _Owing, wait: Wait, *, answered: bool) -> None:
        """Note the end of a wait: an answer, a failure, or a cancellation, which has no `cause`."""
        if answered:
            owing.cause, owing.failed_s = "", None
        elif wait.cause:
            owing.cause, owing.failed_s = wait.cause, self._clock.monotonic()
        if owing.waits and owing.failed_s is None:
            owing.since_s = min(left.since_s for left in owing.waits)
        if owing.logged_s is not None and not self._is_late(owing):
            if answered and self._events is not None:
                self._events.info("client.answered", f"{owing.who} answers again")
            owing.logged_s = None
        if not owing.waits and owing.failed_s is None:
            self._owing.pop(owing.who, None)

    def _arm(self, owing: _Owing, wait: Wait) -> asyncio.TimerHandle | None:
        if self._events is None:
            return None
        delay_s = max(wait.since_s + LATE_AFTER_S - self._clock.monotonic(), ANSWER_S)
        return asyncio.get_running_loop().call_later(delay_s, self._log, owing)

    def _log(self, owing: _Owing) -> None:
        now_s = self._clock.monotonic()
        if owing.logged_s is None or now_s - owing.logged_s >= OUTAGE_INTERVAL_S:
            assert self._events is not None, "only what logs has timers"
            owing.logged_s = now_s
            self._events.warning("client.waits", self._text(owing))

    def _is_late(self, owing: _Owing) -> bool:
        """Whether a peer has not answered for `LATE_AFTER_S`: it owes an answer, or failed within `KEPT_S`."""
        return self._is_fresh(owing) and self._clock.monotonic() - owing.since_s >= LATE_AFTER_S

    def _is_fresh(self, owing: _Owing) -> bool:
        """Whether it owes an answer, or failed within `KEPT_S`."""
        return bool(owing.waits) or (owing.failed_s is not None and self._clock.monotonic() - owing.failed_s < KEPT_S)

    def _text(self, owing: _Owing) -> str:
        what = next((f" ({wait.what})" for wait in list(owing.waits)), "")
        since, cause = time_before(self._clock, owing.since_s), _cause(owing)
        if cause:
            return f"{owing.who} fails since {since}{what}: {cause}"
        return f"{owing.who} has not answered since {since}{what}"


def _cause(owing: _Owing) -> str:
    return next((wait.cause for wait in list(owing.waits) if wait.cause), owing.cause)


def time_before(clock: Clock, monotonic_s: float) -> str:
    """Return a monotonic time as text of the wall clock in UTC."""
    wall_s = clock.wall_ms() / 1000 - (clock.monotonic() - monotonic_s)
    return utc_text(max(wall_s, 0.0))


def utc_text(wall_s: float) -> str:
    """Return a time (Unix s) as text in UTC."""
    return datetime.fromtimestamp(wall_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
