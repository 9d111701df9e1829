"""Limits on bytes and requests per second of a topic or client, as pure machines.

Theory: a token bucket that lends. Tokens come in at the rate of the limit, up to what one second brings; whoever finds
any takes a whole block, even when that is more than there is, and the debt is worked off before the next one. So a
block of any size passes, nothing is cut, and over a long time the rate is exact: a burst is at most one second's
worth and one block. What is refused takes no tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from memq.errors import OverLimitError
from memq.topic import LimitMode

ROUND_S = 0.1  # who was slowed comes back for at least so much: each time costs a frame and what lay in the socket


@dataclass(frozen=True, slots=True)
class RatePerSecond:
    """A limit per second, 0 for none.

    `mode` says what happens beyond it.
    observe: it is counted; soft: it is slowed, without an error; hard: it is refused with an OverLimitError.
    """

    mode: LimitMode = "off"
    bytes_s: int = 0
    requests_s: int = 0

    @property
    def holds(self) -> bool:
        """Whether there is anything to watch."""
        return self.mode != "off" and (self.bytes_s > 0 or self.requests_s > 0)


class TokenBucket:
    """Tokens come in with time, `rate` in a second and never more than that; fewer than 0 is a debt."""

    __slots__ = ("_looked_s", "rate", "tokens")

    def __init__(self, rate: float, now_s: float) -> None:
        assert rate > 0, "a bucket without a rate is no limit"
        self.rate = rate
        self.tokens = rate
        self._looked_s = now_s

    def look(self, now_s: float) -> float:
        """Return how many tokens there are now."""
        self.tokens = min(self.rate, self.tokens + self.rate * max(0.0, now_s - self._looked_s))
        self._looked_s = now_s
        return self.tokens

    def take(self, count: float) -> None:
        """Take tokens, more than there are when it must be."""
        self.tokens -= count

    def change(self, rate: float, now_s: float) -> None:
        """Change the rate; tokens that are owed stay owed."""
        tokens = self.look(now_s)
        self.rate = rate
        self.tokens = min(rate, tokens)

    def wait_s(self) -> float:
        """Return how long after the last look there are enough tokens again for a round."""
        return max(0.0, ROUND_S - self.tokens / self.rate)


class Limiter:
    """One topic or one client against its limit. `over` counts by mode what was beyond it."""

    __slots__ = ("_bytes", "_requests", "limit", "name", "over", "subject")

    def __init__(self, subject: str, name: str, limit: RatePerSecond, now_s: float) -> None:
        self.subject = subject
        self.name = name
        self.over = {"observe": 0, "soft": 0, "hard": 0}
        self.limit = limit
        self._bytes: TokenBucket | None = None
        self._requests: TokenBucket | None = None
        self.change(limit, 1.0, now_s)

    def change(self, limit: RatePerSecond, share: float, now_s: float) -> None:
        """Hold another limit from now on, of which `share` is to be had here."""
        self.limit = limit
        self._bytes = _changed(self._bytes, limit.bytes_s * share, now_s)
        self._requests = _changed(self._requests, limit.requests_s * share, now_s)

    def room(self, now_s: float) -> tuple[int, int]:
        """Return how many requests and bytes may come now, the last request with more bytes than that.

        0: none.
        """
        requests = math.inf if self._requests is None else self._requests.look(now_s)
        size = math.inf if self._bytes is None else self._bytes.look(now_s)
        if requests > 0 and size > 0:
            return _whole(requests), _whole(size)
        return (_UNBOUNDED, _UNBOUNDED) if self.limit.mode == "observe" else (0, 0)

    def take(self, requests: int, size: int) -> None:
        """Note what arrived after a check of the room.

        In mode `observe` an excess is only counted.
        """
        if self.limit.mode == "observe" and any(bucket.tokens <= 0 for bucket in self._buckets()):
            self.over["observe"] += requests
            return
        if self._requests is not None:
            self._requests.take(requests)
        if self._bytes is not None:
            self._bytes.take(size)

    def owe(self, size: int) -> None:
        """Note bytes that went out in answer to a request that was let in."""
        if self._bytes is not None:
            self._bytes.take(size)

    def refusal(self, now_s: float) -> OverLimitError | None:
        """Return what to say to a request that comes now and finds no room; None when it may come.

        With the mode soft it says how long to wait, and is no refusal.
        """
        if self.room(now_s)[0]:
            return None
        self.over[self.limit.mode] += 1
        wait_ms = max(1, math.ceil(self._wait_s() * 1000))
        rates = [f"{self.limit.bytes_s} bytes/s"] if self._bytes is not None else []
        rates += [f"{self.limit.requests_s} requests/s"] if self._requests is not None else []
        return OverLimitError(
            f"{self.subject} '{self.name}' is over its limit of {' and '.join(rates)}",
            hint=f"try again in {wait_ms} ms, send less, or have the limit of the {self.subject} raised",
            retry_after_ms=wait_ms,
        )

    def _buckets(self) -> list[TokenBucket]:
        return [bucket for bucket in (self._bytes, self._requests) if bucket is not None]

    def _wait_s(self) -> float:
        return max((bucket.wait_s() for bucket in self._buckets()), default=0.0)


_UNBOUNDED = 1 << 62
Limiters = tuple[Limiter, ...]


def room_of(limiters: Sequence[Limiter], now_s: float) -> tuple[int, int]:
    """Return the requests and bytes that all of them have room for."""
    rooms = [limiter.room(now_s) for limiter in limiters]
    return min(requests for requests, _ in rooms), min(size for _, size in rooms)


def refusal_of(limiters: Sequence[Limiter], now_s: float) -> tuple[LimitMode, OverLimitError] | None:
    """Return what the strictest of those that have no room says, with its mode; None when all have."""
    found = [(limiter.limit.mode, error) for limiter in limiters if (error := limiter.refusal(now_s)) is not None]
    return min(found, key=lambda each: (each[0] != "hard", -each[1].retry_after_ms), default=None)


def _changed(bucket: TokenBucket | None, rate: float, now_s: float) -> TokenBucket | None:
    if rate <= 0:
        return None
    if bucket is None:
        return TokenBucket(rate, now_s)
    bucket.change(rate, now_s)
    return bucket


def _whole(tokens: float) -> int:
    return _UNBOUNDED if tokens == math.inf else math.ceil(tokens)
