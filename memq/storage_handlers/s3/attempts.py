"""Sends a request until success, refusal or timeout, with breaker, hedges and back-off."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from memq.errors import StoreError
from memq.limits import MIB
from memq.runtime.clock import backoff_s
from memq.runtime.logs import EventLog
from memq.runtime.runtime import Runtime
from memq.storage_handlers.s3.answers import MAY_PASS, Meaning, StoreAnswer, error_for
from memq.storage_handlers.s3.request_policy import CircuitBreaker, Hedger
from memq.storage_handlers.s3.settings import Bucket

T = TypeVar("T")
Request = Callable[[], Awaitable[T]]

_BACKOFF_S_BASE = 0.05
_BACKOFF_S_MAX = 1.0  # a recovered store is used again within twice this time
_RECHECK_S = 0.1
_LEASE_S = 1.0  # while the breaker is open, another request may try after this time, though one still waits
_SLOWER = 4.0  # factor of the first pauses when the server asks for fewer requests
_SECONDS_PER_MIB = 0.5


@dataclass(slots=True)
class S3Counters:
    """Every field is a metric of the same name, after `memq_store_`, in `memq.observe.metrics`."""

    requests: int = 0
    put_requests: int = 0
    get_requests: int = 0
    retries: int = 0
    slow_downs: int = 0
    timeouts: int = 0
    damaged: int = 0
    hedges: int = 0
    hedges_won: int = 0
    lost_answers: int = 0
    breaker_openings: int = 0


class Attempts:
    """Sends all requests to one bucket."""

    def __init__(self, bucket: Bucket, runtime: Runtime, counters: S3Counters) -> None:
        settings = bucket.settings
        self.breaker = CircuitBreaker(runtime.random)
        self._location = bucket.location
        self._runtime = runtime
        self._counters = counters
        self._hedger = Hedger(settings.hedge_permille)
        self._request_s = settings.request_timeout_ms / 1000
        self._call_s_max = settings.deadline_ms / 1000
        self._last = StoreAnswer(0)  # the last failure
        self.events = EventLog(runtime.clock)

    def until_s(self) -> float:
        """Return the monotonic time at which a call that begins now gives up."""
        return self._now() + self._call_s_max

    async def run(
        self,
        kind: str,
        size: int,
        request: Request[T],
        failure: str,
        *,
        hedge: bool = False,
        until_s: float | None = None,
    ) -> T:
        """Send a request until it succeeds or a retry can't help, and return its result.

        `kind` and `size` determine its time limit and the hedge; `failure` begins the error's text.
        Raises: StoreAnswer for TAKEN, NO_KEY and NO_RANGE, which the caller must interpret; MemqError for all others.
        """
        until_s = self.until_s() if until_s is None else until_s
        tries = 0
        while True:
            await self._admission(until_s, failure)
            try:
                return await self._hedged(kind, size, request, hedge=hedge)
            except StoreAnswer as answer:
                if answer.meaning in (Meaning.TAKEN, Meaning.NO_KEY, Meaning.NO_RANGE):
                    raise
                tries += 1
                await self._pause(answer, tries, until_s, error_for(answer, failure, self._location))

    async def pause(self, tries: int, until_s: float, text: str) -> None:
        """Wait before retry number `tries` of a call. Raises: StoreError when its time is over."""
        await self._pause(StoreAnswer(0), tries, until_s, StoreError(text))

    async def _pause(self, answer: StoreAnswer, tries: int, until_s: float, error: Exception) -> None:
        if answer.meaning not in MAY_PASS:
            raise error from answer
        slower = _SLOWER if answer.meaning is Meaning.SLOW_DOWN else 1.0
        delay_s = backoff_s(self._runtime.random, tries, base_s=slower * _BACKOFF_S_BASE, most_s=_BACKOFF_S_MAX)
        if self._now() + delay_s >= until_s:
            error.add_note(f"given up after {tries} tries")
            raise error from answer
        self._counters.retries += 1
        self.events.info("s3-retry", f"try {tries}: {error}")
        await asyncio.sleep(delay_s)

    async def _admission(self, until_s: float, failure: str) -> None:
        """Wait until the breaker allows a request. Raises: the error of the last failed request."""
        while wait_s := self.breaker.ask(self._now(), _LEASE_S):
            wait_s = min(wait_s, _RECHECK_S)  # the trying request may succeed before its lease ends
            if self._now() + wait_s >= until_s:
                error = error_for(self._last, failure, self._location)
                error.add_note("not asked again so soon: it has failed too often")
                raise error from self._last
            await asyncio.sleep(wait_s)

    async def _hedged(self, kind: str, size: int, request: Request[T], *, hedge: bool) -> T:
        """Send a request, and the same again when it is slow; return the first success."""
        delay_s = self._hedger.delay_s(kind, size)
        if not hedge or delay_s is None:
            return await self._timed(kind, size, request)
        first = asyncio.create_task(self._timed(kind, size, request), name=f"s3 {kind}")
        tasks = [first]
        try:
            await asyncio.wait(tasks, timeout=delay_s)
            spent = False
            while not first.done() and not (spent := self._hedger.spend()):
                await asyncio.wait(tasks, timeout=delay_s)  # other requests meanwhile earn a hedge
            if spent:
                self._counters.hedges += 1
                tasks.append(asyncio.create_task(self._timed(kind, size, request), name=f"s3 {kind}, hedge"))
            return await self._first(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for task in tasks:
                if not task.cancelled():
                    task.exception()  # marks it as retrieved: asyncio would log it

    async def _first(self, tasks: list[asyncio.Task[T]]) -> T:
        """Return the result of the first task that succeeds.

        Raises: the first final error, else the error of the last task.
        TAKEN of a second put is final: the first put was done, and only its answer is slow.
        """
        left = list(tasks)
        while True:
            done, _ = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            for task in [each for each in left if each in done]:  # in the order of their start
                left.remove(task)
                error = task.exception()
                passing = isinstance(error, StoreAnswer) and error.meaning in MAY_PASS
                if not passing or not left:
                    self._counters.hedges_won += task is not tasks[0]
                    return task.result()

    async def _timed(self, kind: str, size: int, request: Request[T]) -> T:
        """Send one request within its time limit, and report its result to breaker and hedger."""
        self._counters.requests += 1
        self._counters.put_requests += kind == "put"
        self._counters.get_requests += kind == "get"
        started_s = self._now()
        try:
            async with asyncio.timeout(self._request_s + size / MIB * _SECONDS_PER_MIB):
                result = await request()
        except TimeoutError as error:
            self._counters.timeouts += 1
            answer = StoreAnswer(0, "", f"nothing in {self._now() - started_s:.1f} s")
            self._failed(answer)
            raise answer from error
        except StoreAnswer as answer:
            self._judge(answer)
            raise
        except BaseException:  # also an error that says nothing about the store, such as TooLargeError
            self.breaker.cancelled(self._now())
            raise
        self.breaker.succeeded()
        self._hedger.took(kind, size, self._now() - started_s)
        return result

    def _judge(self, answer: StoreAnswer) -> None:
        self._counters.slow_downs += answer.meaning is Meaning.SLOW_DOWN
        self._counters.damaged += answer.meaning is Meaning.DAMAGED
        if answer.meaning in (Meaning.TRY_AGAIN, Meaning.SLOW_DOWN):
            self._failed(answer)
        else:
            self.breaker.succeeded()

    def _failed(self, answer: StoreAnswer) -> None:
        self._last = answer
        self.breaker.failed(self._now())
        self._counters.breaker_openings = self.breaker.opened

    def _now(self) -> float:
        return self._runtime.clock.monotonic()
