"""Quotas at one broker: limiters of principals and namespaces in use, and connections.

A limiter gives out this broker's part of each rate. The governor hands out parts (`memq.governor.quota_shares`). A part
that was not renewed becomes an equal one; without use, it becomes that with which new traffic begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from memq.broker.ingest.quotas import CLIENTS_MAX, Limiter, Limiters, RatePerSecond
from memq.errors import OverLimitError
from memq.governor.quota_shares import LEASE_S, ShareUse, beginning_part
from memq.quotas import RATES, QuotaKind, QuotaRule, quota_of
from memq.runtime.clock import Clock

CONNECTIONS_RETRY_MS = 1_000
SAMPLES = 5  # the use of a rate is the mean of the last samples: traffic in bursts keeps its part
SURGE = 1.6  # a last sample so far above the mean is new traffic, and counts alone


class QuotaSubject(NamedTuple):
    """The principal or namespace that a quota holds."""

    kind: QuotaKind
    name: str


class ShareKey(NamedTuple):
    """One rate of a principal or namespace."""

    subject: QuotaSubject
    rate: str


@dataclass(slots=True)
class _Share:
    """This broker's part of a rate, and what the samples of its use need."""

    part: float
    until_s: float
    used: float = 0.0  # of the bucket, at the last sample
    held: int = 0
    recent: list[float] = field(default_factory=list)


@dataclass(slots=True)
class QuotaUse:
    """A principal or namespace at one broker: quota, limiter if the quota has rates, connections."""

    quota: QuotaRule | None = None
    limiter: Limiter | None = None
    connections: int = 0
    shares: dict[str, _Share] = field(default_factory=dict)

    @property
    def limiters(self) -> Limiters:
        """The limiter, if there is one."""
        return () if self.limiter is None else (self.limiter,)


class QuotaBook:
    """Finds the limiters of principals and namespaces, by the quotas that `follow` has set last.

    The limiter of a principal outlives its connections, so that it gains nothing by connecting again.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._quotas: tuple[QuotaRule, ...] = ()
        self._brokers = 1  # that share the rates
        self._used: dict[QuotaSubject, QuotaUse] = {}
        self._sampled_s = clock.monotonic()
        self.holds_namespaces = False  # some quota is of namespaces

    def follow(self, quotas: Sequence[QuotaRule]) -> None:
        """Apply these quotas from now on; debts stay."""
        self._quotas = tuple(quotas)
        self.holds_namespaces = any(quota.kind == "namespace" for quota in quotas)
        for subject, use in self._used.items():
            self._apply(subject, use)

    # ---- connections -----------------------------------------------------------------------------

    def connect(self, principal: str) -> None:
        """Count a connection of a principal. Call `disconnect` at its end.

        Raises: OverLimitError when the principal has as many as its quota allows; nothing is counted then.
        """
        use = self._find(QuotaSubject("principal", principal))
        if use.quota is not None and 0 < use.quota.connections <= use.connections:
            raise OverLimitError(
                f"principal '{principal}' has {use.connections} connections to this broker, as many as its quota sets",
                hint="close connections, or have the quota raised with 'memq quota set'",
                retry_after_ms=CONNECTIONS_RETRY_MS,
            )
        use.connections += 1

    def disconnect(self, principal: str) -> None:
        """Note that a connection of a principal has ended."""
        use = self._used.get(QuotaSubject("principal", principal))
        if use is not None:
            use.connections -= 1

    # ---- limiters --------------------------------------------------------------------------------

    def limiters_of(self, kind: QuotaKind, name: str) -> Limiters:
        """Return the limiter of a principal or namespace, if its quota has rates."""
        return self._find(QuotaSubject(kind, name)).limiters

    def of_namespace(self, namespace: str) -> Limiters:
        """Return the limiter of a namespace; () for "" and without quotas of namespaces.

        Call it for each use: a limiter of a namespace without connections may be forgotten.
        """
        return self.limiters_of("namespace", namespace) if namespace and self.holds_namespaces else ()

    def use_of(self, kind: QuotaKind, name: str) -> QuotaUse:
        """Return quota, limiter and connections of a principal or namespace; it need not be in use."""
        found = self._used.get(QuotaSubject(kind, name))
        return found or QuotaUse(quota_of(self._quotas, kind, name))

    def limiters(self) -> Iterable[Limiter]:
        """Return all limiters."""
        return [use.limiter for use in self._used.values() if use.limiter is not None]

    def _find(self, subject: QuotaSubject) -> QuotaUse:
        use = self._used.get(subject)
        if use is None:
            self._forget_idle()
            use = self._used[subject] = QuotaUse()
            self._apply(subject, use)
        return use

    def _apply(self, subject: QuotaSubject, use: QuotaUse) -> None:
        """Apply quota and shares of now."""
        use.quota = quota_of(self._quotas, subject.kind, subject.name)
        limit, now_s = limit_of(use.quota), self._clock.monotonic()
        if not limit.holds:
            use.limiter = None
            use.shares.clear()
            return
        if use.limiter is None:
            use.limiter = Limiter(subject.kind, subject.name, limit, now_s, exact=True)
        rates = {rate: amount * self._part(use, rate, now_s) for rate, amount in limit.rates.items()}
        use.limiter.apply(limit, rates, now_s)

    def _forget_idle(self) -> None:
        if len(self._used) >= CLIENTS_MAX:
            self._used = {subject: use for subject, use in self._used.items() if use.connections}

    # ---- shares ----------------------------------------------------------------------------------

    def _part(self, use: QuotaUse, rate: str, now_s: float) -> float:
        """Return this broker's part of a rate now; a part that was not renewed becomes an equal one."""
        if self._brokers <= 1:
            use.shares.pop(rate, None)
            return 1.0
        equal = 1.0 / self._brokers
        share = use.shares.get(rate)
        if share is None:
            share = use.shares[rate] = _Share(equal, now_s)
        elif share.until_s < now_s:
            share.part = equal
        return share.part

    @property
    def limits_rates(self) -> bool:
        """Whether any quota applies to a rate here."""
        return any(use.limiter is not None for use in self._used.values())

    def sample(self, brokers: int) -> dict[ShareKey, ShareUse]:
        """Return the use of each rate since the last call, for the governor; `brokers` share it.

        Those without use are left out. When their parts have ended, they keep that for a beginning.
        """
        now_s = self._clock.monotonic()
        span_s, self._sampled_s, self._brokers = max(now_s - self._sampled_s, 1e-3), now_s, max(1, brokers)
        found: dict[ShareKey, ShareUse] = {}
        for subject, use in self._used.items():
            self._apply(subject, use)
            for rate, share in use.shares.items():
                if use.limiter is None or rate not in use.limiter.buckets:
                    continue
                bucket, limit = use.limiter.buckets[rate], use.limiter.limit.rates[rate]
                used, held = bucket.used - share.used, bucket.held > share.held
                share.used, share.held = bucket.used, bucket.held
                share.recent = [*share.recent[1 - SAMPLES :], used / span_s / limit]
                if held or any(share.recent):
                    mean = sum(share.recent) / len(share.recent)
                    recent = share.recent[-1] if held and share.recent[-1] > SURGE * mean else mean
                    found[ShareKey(subject, rate)] = ShareUse(recent, share.part, held=held)
                elif share.until_s < now_s + LEASE_S / 2:
                    share.part, share.until_s = beginning_part(self._brokers), now_s + LEASE_S
        return found

    def grant(self, parts: Mapping[ShareKey, float], until_s: float) -> None:
        """Apply parts of rates, which the governor has given this broker until then."""
        for (subject, rate), part in parts.items():
            use = self._used.get(subject)
            if use is not None and rate in use.shares:
                use.shares[rate].part, use.shares[rate].until_s = part, until_s
        for subject in dict.fromkeys(key.subject for key in parts):
            if subject in self._used:
                self._apply(subject, self._used[subject])


def limit_of(quota: QuotaRule | None) -> RatePerSecond:
    """Return the limit that a quota sets."""
    if quota is None:
        return RatePerSecond()
    return RatePerSecond("soft", **{name: getattr(quota, name) for name in RATES})
