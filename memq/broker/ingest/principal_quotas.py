"""Quotas of principals at one broker: the limiter and the connections of each principal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from memq.broker.ingest.quotas import CLIENTS_MAX, Limiter, Limiters, RatePerSecond
from memq.errors import OverLimitError
from memq.quotas import RATES, QuotaRule, quota_of
from memq.runtime.clock import Clock

CONNECTIONS_RETRY_MS = 1_000


@dataclass(slots=True)
class PrincipalUse:
    """A principal at one broker: its quota, its limiter if the quota has rates, and its connections."""

    quota: QuotaRule | None = None
    limiter: Limiter | None = None
    connections: int = 0

    @property
    def limiters(self) -> Limiters:
        """The limiter of the principal, if there is one."""
        return () if self.limiter is None else (self.limiter,)


class PrincipalQuotas:
    """Finds the limiters of principals, by the quotas that `follow` has set last.

    The limiter of a principal outlives its connections, so that it gains nothing by connecting again.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._quotas: tuple[QuotaRule, ...] = ()
        self._used: dict[str, PrincipalUse] = {}

    def follow(self, quotas: Sequence[QuotaRule]) -> None:
        """Apply these quotas from now on; debts stay."""
        self._quotas = tuple(quotas)
        for principal, use in self._used.items():
            self._apply(principal, use)

    def connect(self, principal: str) -> Limiters:
        """Count a connection of a principal, and return its limiter. Call `disconnect` at its end.

        Raises: OverLimitError when the principal has as many as its quota allows; nothing is counted then.
        """
        use = self._used.get(principal)
        if use is None:
            self._forget_idle()
            use = self._used[principal] = PrincipalUse()
            self._apply(principal, use)
        if use.quota is not None and 0 < use.quota.connections <= use.connections:
            raise OverLimitError(
                f"principal '{principal}' has {use.connections} connections to this broker, as many as its quota sets",
                hint="close connections, or have the quota raised with 'memq quota set'",
                retry_after_ms=CONNECTIONS_RETRY_MS,
            )
        use.connections += 1
        return use.limiters

    def disconnect(self, principal: str) -> None:
        """Note that a connection of a principal has ended."""
        if principal in self._used:
            self._used[principal].connections -= 1

    def limiters_of(self, principal: str) -> Limiters:
        """Return the limiter of a connected principal, if its quota has rates."""
        use = self._used.get(principal)
        return () if use is None else use.limiters

    def use_of(self, principal: str) -> PrincipalUse:
        """Return quota, limiter and connections of a principal; it need not be connected."""
        return self._used.get(principal) or PrincipalUse(quota_of(self._quotas, "principal", principal))

    def limiters(self) -> Iterable[Limiter]:
        """Return the limiters of all principals."""
        return [use.limiter for use in self._used.values() if use.limiter is not None]

    def _apply(self, principal: str, use: PrincipalUse) -> None:
        use.quota = quota_of(self._quotas, "principal", principal)
        limit = limit_of(use.quota)
        now_s = self._clock.monotonic()
        if not limit.holds:
            use.limiter = None
        elif use.limiter is None:
            use.limiter = Limiter("principal", principal, limit, now_s, exact=True)
        else:
            use.limiter.change(limit, 1.0, now_s)

    def _forget_idle(self) -> None:
        if len(self._used) >= CLIENTS_MAX:
            self._used = {principal: use for principal, use in self._used.items() if use.connections}


def limit_of(quota: QuotaRule | None) -> RatePerSecond:
    """Return the limit that a quota sets."""
    if quota is None:
        return RatePerSecond()
    return RatePerSecond("soft", **{name: getattr(quota, name) for name in RATES})
