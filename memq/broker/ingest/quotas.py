"""Limits per second of bytes and requests: limiters of topics and of clients. Pure.

Theory: a token bucket that lends. Tokens arrive at the rate of the limit; the bucket holds at most one second of them.
If any token is left, a whole block is taken, even when it costs more tokens; the next block waits until the debt is
paid. So a block of any size passes uncut, and over a long time the rate is exact. A burst is at most one second's
tokens and one block. A refused block takes no tokens.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import repeat
from typing import NamedTuple, cast, get_args

from memq.errors import InvalidSettingError, OverLimitError
from memq.limits import MIB
from memq.runtime.clock import Clock
from memq.settings import Section, did_you_mean, parse_size
from memq.topic import LimitMode, PartitionKey, Topic, check_name

DEFAULT = "default"  # the limit of each client that is not named
CLIENTS_MAX = 10_000  # remembered clients; connections_max bounds the connected ones
ROUND_S = 0.1  # a throttled client waits for tokens of this time: each throttle costs a frame and the blocks in flight
WAITING_MAX = 256  # requests that an exact limit holds, and their bodies: so they do not fill the place of others
WAITING_BYTES_MAX = 2 * MIB
_RATES = {"bytes_s": "bytes/s", "bytes_in_s": "bytes/s in", "bytes_out_s": "bytes/s out", "records_s": "records/s"}
_RATES |= {"requests_s": "requests/s"}
_EXAMPLE = "write it as 'soft 10MiB/s 500/s': a mode, then bytes or requests per second, or both"


class Flow(Enum):
    """The traffic that a limit may hold, with the rates that count for it."""

    BLOCKS = ("bytes_s", "bytes_in_s", "records_s", "requests_s")  # of producers
    READS = ("bytes_s", "bytes_out_s", "requests_s")
    REQUESTS = ("bytes_s", "bytes_in_s", "bytes_out_s", "requests_s")  # others


@dataclass(frozen=True, slots=True)
class RatePerSecond:
    """A limit per second, 0 for none.

    `mode` is the effect of an excess: observe counts it, soft throttles it without an error, hard refuses it with an
    OverLimitError. `bytes_s` are those in both directions.
    """

    mode: LimitMode = "off"
    bytes_s: int = 0
    requests_s: int = 0
    bytes_in_s: int = 0
    bytes_out_s: int = 0
    records_s: int = 0

    @property
    def rates(self) -> dict[str, int]:
        """The rates that are limited, by name."""
        return {name: rate for name in _RATES if (rate := getattr(self, name)) > 0}

    @property
    def holds(self) -> bool:
        """Whether the limit has an effect."""
        return self.mode != "off" and bool(self.rates)


class TokenBucket:
    """Gets `rate` tokens a second, and holds at most `rate`; fewer than 0 are a debt.

    `used` counts all tokens that were taken, and `held` the refusals for lack of tokens.
    """

    __slots__ = ("_refilled_s", "held", "rate", "tokens", "used")

    def __init__(self, rate: float, now_s: float) -> None:
        assert rate > 0, "a bucket without a rate is no limit"
        self.rate = rate
        self.tokens = rate
        self.used = 0.0
        self.held = 0
        self._refilled_s = now_s

    def refill(self, now_s: float) -> float:
        """Add the tokens since the last call; return how many the bucket holds now."""
        self.tokens = min(self.rate, self.tokens + self.rate * max(0.0, now_s - self._refilled_s))
        self._refilled_s = now_s
        return self.tokens

    def take(self, count: float) -> None:
        """Take tokens, if need be more than the bucket holds."""
        self.tokens -= count
        self.used += count

    def change(self, rate: float, now_s: float) -> None:
        """Change the rate; a debt remains."""
        tokens = self.refill(now_s)
        self.rate = rate
        self.tokens = min(rate, tokens)

    def wait_s(self) -> float:
        """Return the time in s, after the last `refill`, until the tokens of ROUND_S have arrived."""
        return max(0.0, ROUND_S - self.tokens / self.rate)


class Limiter:
    """The limiter of one topic, client or principal. `over` counts the excess by mode.

    An `exact` one refuses a request that a soft limit has held for the longest time; another one lets it in.
    """

    __slots__ = ("_flows", "buckets", "exact", "limit", "name", "over", "subject", "waiting", "waiting_bytes")

    def __init__(self, subject: str, name: str, limit: RatePerSecond, now_s: float, *, exact: bool = False) -> None:
        self.exact = exact
        self.subject = subject
        self.name = name
        self.over = {"observe": 0, "soft": 0, "hard": 0}
        self.limit = limit
        self.waiting = 0  # requests that it holds now, and bytes of their bodies
        self.waiting_bytes = 0
        self.buckets: dict[str, TokenBucket] = {}  # by rate
        self._flows: dict[Flow, tuple[TokenBucket, ...]] = {}
        self.change(limit, 1.0, now_s)

    def change(self, limit: RatePerSecond, share: float, now_s: float) -> None:
        """Apply another limit from now on; `share` is this broker's part of it."""
        self.apply(limit, {name: rate * share for name, rate in limit.rates.items()}, now_s)

    def apply(self, limit: RatePerSecond, rates: Mapping[str, float], now_s: float) -> None:
        """Apply another limit from now on, with the rates that this broker may take of it."""
        self.limit = limit
        before, self.buckets = self.buckets, {}
        for name, rate in rates.items():
            bucket = self.buckets[name] = before.get(name) or TokenBucket(rate, now_s)
            bucket.change(rate, now_s)
        for flow in Flow:
            self._flows[flow] = tuple(self.buckets[name] for name in flow.value if name in self.buckets)

    def room(self, now_s: float, flow: Flow = Flow.BLOCKS) -> tuple[int, int]:
        """Return how many requests and bytes are allowed now; the last request may exceed the bytes.

        Both are 0 when no request is allowed. The records of blocks are not known yet, so a limit on them allows one.
        """
        if min(map(TokenBucket.refill, self._flows[flow], repeat(now_s)), default=1.0) <= 0:
            return (_UNBOUNDED, _UNBOUNDED) if self.limit.mode == "observe" else (0, 0)
        requests, size = self._tokens("requests_s"), min(self._tokens("bytes_s"), self._tokens("bytes_in_s"))
        return (1 if "records_s" in self.buckets else _whole(requests)), _whole(size)

    def take(self, requests: int, size: int, records: int = 0) -> None:
        """Take the tokens of requests that were let in after a call of `room`, and of what they brought.

        In mode `observe`, an excess is only counted.
        """
        if self.limit.mode == "observe" and any(bucket.tokens <= 0 for bucket in self._flows[Flow.BLOCKS]):
            self.over["observe"] += requests
            return
        for name, count in (("requests_s", requests), ("bytes_s", size), ("bytes_in_s", size), ("records_s", records)):
            if name in self.buckets:
                self.buckets[name].take(count)

    def owe(self, size: int) -> None:
        """Take tokens for the bytes of an answer to a request that was let in."""
        for name in ("bytes_s", "bytes_out_s"):
            if name in self.buckets:
                self.buckets[name].take(size)

    def receive(self, size: int) -> None:
        """Take tokens for the body of a request that was let in. Only a limit on bytes in counts it."""
        if "bytes_in_s" in self.buckets:
            self.buckets["bytes_in_s"].take(size)

    def hold(self, size: int) -> bool:
        """Note that a request with a body of this size waits; False when too many wait. `release` ends it."""
        if self.waiting >= WAITING_MAX or self.waiting_bytes + size > WAITING_BYTES_MAX:
            return False
        self.waiting += 1
        self.waiting_bytes += size
        return True

    def release(self, size: int) -> None:
        """Note that a request waits no longer."""
        self.waiting -= 1
        self.waiting_bytes -= size

    def refusal(self, now_s: float, flow: Flow = Flow.BLOCKS) -> OverLimitError | None:
        """Count an excess and return its error; None when a request is allowed now.

        In mode `soft`, the error only tells the client how long to wait.
        """
        if self.room(now_s, flow)[0]:
            return None
        self.over[self.limit.mode] += 1
        empty = [bucket for bucket in self._flows[flow] if bucket.tokens <= 0]
        for bucket in empty:
            bucket.held += 1
        wait_ms = math.ceil(max(bucket.wait_s() for bucket in self._flows[flow]) * 1000)
        rates = " and ".join(f"{rate} {_RATES[name]}" for name, rate in self.limit.rates.items())
        return OverLimitError(
            f"{self.subject} '{self.name}' is over its limit of {rates}",
            hint=f"try again in {wait_ms} ms, send less, or have the limit of the {self.subject} raised",
            retry_after_ms=wait_ms,
        )

    def _tokens(self, name: str) -> float:
        bucket = self.buckets.get(name)
        return math.inf if bucket is None else bucket.tokens


_UNBOUNDED = 1 << 62
Limiters = tuple[Limiter, ...]


def room_of(limiters: Sequence[Limiter], now_s: float) -> tuple[int, int]:
    """Return the requests and bytes that all limiters allow now."""
    rooms = [limiter.room(now_s) for limiter in limiters]
    return min(requests for requests, _ in rooms), min(size for _, size in rooms)


class Refusal(NamedTuple):
    """Why a limiter lets nothing in now. `retry_after_ms` of its error is the time until it does."""

    limiter: Limiter
    error: OverLimitError

    @property
    def hard(self) -> bool:
        """Whether the client gets the error, instead of a delay."""
        return self.limiter.limit.mode == "hard"


def refusal_of(limiters: Sequence[Limiter], now_s: float, flow: Flow = Flow.BLOCKS) -> Refusal | None:
    """Return the refusal of the strictest limiter without room; None when all have room."""
    found = [Refusal(limiter, error) for limiter in limiters if (error := limiter.refusal(now_s, flow)) is not None]
    return min(found, key=lambda each: (not each.hard, -each.error.retry_after_ms), default=None)


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
class _ClientLimiter:
    limiter: Limiter
    connections: int = 0


class Quotas:
    """Finds limiters.

    Brokers share the limit of a topic: each one has a part in proportion to the partitions that take records and that
    it owns. A client is identified by its client id, or by its host if it sends none. All connections of a client share
    one limiter. It outlives them, so that a client gains nothing by connecting again.
    """

    def __init__(self, clock: Clock, clients: ClientLimits) -> None:
        self._clock = clock
        self._client_limits = clients
        self._topics: dict[str, Limiter] = {}
        self._clients: dict[str, _ClientLimiter] = {}

    def follow(self, topics: Iterable[Topic], owned: Container[PartitionKey]) -> None:
        """Apply the current limits of topics.

        `owned` contains (topic id, partition) of each partition that this broker owns.
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

    def connect(self, client: str) -> Limiters:
        """Return the limiter of a client that connects, if it has a limit; call `disconnect` at its end."""
        known = self._clients.get(client)
        if known is None:
            limit = self._client_limits.of(client)
            if not limit.holds:
                return ()
            self._forget_idle()
            known = self._clients[client] = _ClientLimiter(Limiter("client", client, limit, self._clock.monotonic()))
        known.connections += 1
        return (known.limiter,)

    def of_client(self, client: str) -> Limiters:
        """Return the limiter of a connected client, if it has a limit."""
        known = self._clients.get(client)
        return () if known is None else (known.limiter,)

    def disconnect(self, client: str) -> None:
        """Note that a connection of a client has ended."""
        if client in self._clients:
            self._clients[client].connections -= 1

    def limiters(self) -> list[Limiter]:
        """Return all limiters of topics and clients."""
        return [*self._topics.values(), *(known.limiter for known in self._clients.values())]

    def clients(self) -> list[tuple[str, RatePerSecond, int, int]]:
        """Return limited clients: name, limit, connections, and number of excesses.

        The first row, `default`, has the limit of each other client.
        """
        known = {name: (each.limiter.limit, each.connections, each.limiter) for name, each in self._clients.items()}
        rows = [(name, limit, count, sum(limiter.over.values())) for name, (limit, count, limiter) in known.items()]
        rows += [(name, limit, 0, 0) for name, limit in self._client_limits.named.items() if name not in known]
        return [(DEFAULT, self._client_limits.default, 0, 0), *sorted(rows)]

    def _forget_idle(self) -> None:
        """Forget clients without connections, when too many are remembered."""
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
