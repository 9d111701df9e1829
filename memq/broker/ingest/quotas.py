"""Limits per second of bytes and requests: limiters of topics and of clients. Pure.

Theory: a token bucket that lends. Tokens come in at the rate of the limit, up to what one second brings; whoever finds
any takes a whole block, even when that is more than there is, and the debt is worked off before the next one. So a
block of any size passes, nothing is cut, and over a long time the rate is exact: a burst is at most one second's
worth and one block. What is refused takes no tokens.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast, get_args

from memq.errors import InvalidSettingError, OverLimitError
from memq.runtime.clock import Clock
from memq.settings import Section, did_you_mean, parse_size
from memq.topic import LimitMode, Topic, check_name

DEFAULT = "default"  # names no client, but all that are not named
CLIENTS_MAX = 10_000  # that are remembered; those that are connected are bounded by connections_max
ROUND_S = 0.1  # who was slowed comes back for at least so much: each time costs a frame and what lay in the socket
_EXAMPLE = "write it as 'soft 10MiB/s 500/s': a mode, then bytes or requests per second, or both"


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
    """One topic or one client against its limit. `over` counts the excess by mode."""

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


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """The limits of clients at one broker: named clients, and the default for all others."""

    default: RatePerSecond = field(default_factory=RatePerSecond)
    named: Mapping[str, RatePerSecond] = field(default_factory=dict)

    def of(self, client: str) -> RatePerSecond:
        """Return the limit of a client."""
        return self.named.get(client, self.default)


NO_CLIENT_LIMITS = ClientLimits()


@dataclass(slots=True)
class _Known:
    limiter: Limiter
    connections: int = 0


class Quotas:
    """Finds limiters.

    Those of a topic share its limit by how many of its partitions that take records each one has.
    A client is known by its client id, without one by the host that it comes from; all its connections share a
    limiter, which outlives them, so that coming again brings nothing.
    """

    def __init__(self, clock: Clock, clients: ClientLimits) -> None:
        self._clock = clock
        self._client_limits = clients
        self._topics: dict[str, Limiter] = {}
        self._clients: dict[str, _Known] = {}

    def follow(self, topics: Iterable[Topic], owned: Container[tuple[str, int]]) -> None:
        """Take the limits of topics as they are now.

        `owned`: the partitions, each with its topic id, owned here.
        """
        before, self._topics = self._topics, {}
        now_s = self._clock.monotonic()
        for topic in topics:
            settings = topic.settings
            limit = RatePerSecond(settings.limit_mode, settings.limit_bytes_s, settings.limit_requests_s)
            if not limit.holds:
                continue
            taking = topic.taking
            here = sum((topic.id, part.partition) in owned for part in taking)
            if not here:
                continue
            limiter = before.get(topic.id) or Limiter("topic", topic.name, limit, now_s)
            limiter.change(limit, here / len(taking), now_s)
            self._topics[topic.id] = limiter

    def of_topic(self, topic_id: str) -> Limiters:
        """Return the limiter of a topic, if it has a limit."""
        limiter = self._topics.get(topic_id)
        return () if limiter is None else (limiter,)

    def come(self, client: str) -> Limiters:
        """Return the limiter of a client that connects, if it has a limit; `leave` gives it back."""
        known = self._clients.get(client)
        if known is None:
            limit = self._client_limits.of(client)
            if not limit.holds:
                return ()
            self._forget_idle()
            known = self._clients[client] = _Known(Limiter("client", client, limit, self._clock.monotonic()))
        known.connections += 1
        return (known.limiter,)

    def leave(self, client: str) -> None:
        """Note that a connection of a client has ended."""
        if client in self._clients:
            self._clients[client].connections -= 1

    def limiters(self) -> list[Limiter]:
        """Return all limiters there are."""
        return [*self._topics.values(), *(known.limiter for known in self._clients.values())]

    def clients(self) -> list[tuple[str, RatePerSecond, int, int]]:
        """Return limited clients: name, limit, connections, and number of excesses.

        `default`: all others, each.
        """
        known = {name: (each.limiter.limit, each.connections, each.limiter) for name, each in self._clients.items()}
        rows = [(name, limit, count, sum(limiter.over.values())) for name, (limit, count, limiter) in known.items()]
        rows += [(name, limit, 0, 0) for name, limit in self._client_limits.named.items() if name not in known]
        return [(DEFAULT, self._client_limits.default, 0, 0), *sorted(rows)]

    def _forget_idle(self) -> None:
        """Forget who left longest ago, when there are too many."""
        if len(self._clients) < CLIENTS_MAX:
            return
        for client in [client for client, known in self._clients.items() if not known.connections]:
            del self._clients[client]


def client_limits(section: Section) -> ClientLimits:
    """Return the limits of a section `[clients]`. Raises: InvalidSettingError, InvalidNameError."""
    named: dict[str, RatePerSecond] = {}
    for name, (raw, origin) in section.items():
        if name != DEFAULT:
            check_name(name, "client")
        named[name] = parse_limit(str(raw), f"{name} from {origin} [clients]")
    return ClientLimits(named.pop(DEFAULT, RatePerSecond()), named)


def parse_limit(text: str, what: str = "limit") -> RatePerSecond:
    """Return the limit of a line, such as `hard 10MiB/s 500/s` or `off`. Raises: InvalidSettingError."""
    mode, *rates = text.split() or [""]
    if mode not in get_args(LimitMode):
        known = did_you_mean(mode, get_args(LimitMode), known=False) or _EXAMPLE
        raise InvalidSettingError(f"{what} = '{text[:60]}' begins with no mode", hint=known)
    found: dict[str, int] = {}
    for rate in rates:
        amount, slash, second = rate.partition("/")
        count = parse_size(amount) if slash and second == "s" else None
        unit = "requests_s" if amount.isdigit() else "bytes_s"
        if not count or unit in found:
            raise InvalidSettingError(f"{what} = '{text[:60]}' can't be read at '{rate[:30]}'", hint=_EXAMPLE)
        found[unit] = count
    if bool(found) != (mode != "off"):
        raise InvalidSettingError(f"{what} = '{text[:60]}' limits nothing", hint=f"{_EXAMPLE}; or 'off' alone")
    return RatePerSecond(cast(LimitMode, mode), **found)
