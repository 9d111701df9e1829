"""Quotas: how much each principal and each namespace may use of a cluster, as rules. Pure.

A quota names a principal or a namespace exactly, or several by a prefix with a final `*`. The exact quota applies,
else the one with the longest prefix; `*` alone is the default. Each of those that a prefix names has all the amounts.
The coordinator keeps quotas with the rules of permissions (`memq.permissions.RuleSet`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from memq.errors import InvalidRequestError
from memq.patterns import EVERY, check_pattern, matches

RATES = ("bytes_in_s", "bytes_out_s", "records_s", "requests_s")
AMOUNT_MAX = 1 << 53  # readers of JSON round a greater number


QuotaKind = Literal["principal", "namespace"]


class QuotaRule(msgspec.Struct, frozen=True, kw_only=True, order=True, omit_defaults=True):
    """The quota of each principal, or of each namespace, that `name` matches; 0 is no limit.

    `bytes_in_s` counts blocks of producers and bodies of requests, `bytes_out_s` answers. `records_s` counts records in
    blocks of producers. `connections` are those of a principal to one broker; a namespace has none.
    """

    kind: QuotaKind = "principal"
    name: str
    bytes_in_s: int = 0
    bytes_out_s: int = 0
    records_s: int = 0
    requests_s: int = 0
    connections: int = 0

    def __str__(self) -> str:
        amounts = ", ".join(f"{name} {amount}" for name, amount in amounts_of(self).items() if amount)
        return f"{self.kind} '{self.name}': {amounts or 'no limit'}"


def amounts_of(quota: QuotaRule) -> dict[str, int]:
    """Return the limits of a quota by name; 0 is none."""
    return {name: getattr(quota, name) for name in (*RATES, "connections")}


def check_quota(quota: QuotaRule) -> QuotaRule:
    """Return a sound quota. Raises: InvalidRequestError."""
    check_pattern(quota.kind, quota.name)
    for name, amount in amounts_of(quota).items():
        if not 0 <= amount <= AMOUNT_MAX:
            raise InvalidRequestError(
                f"{name} = {amount} in the quota of {quota.kind} '{quota.name[:60]}' is out of range",
                hint=f"give a number up to {AMOUNT_MAX}; 0 is no limit",
            )
    if quota.kind == "namespace" and quota.connections:
        raise InvalidRequestError(
            f"the quota of namespace '{quota.name[:60]}' has connections, which are of principals",
            hint="set connections in the quotas of the principals",
        )
    return quota


def quota_of(quotas: Iterable[QuotaRule], kind: QuotaKind, name: str) -> QuotaRule | None:
    """Return the quota that applies to a principal or a namespace; None without one."""
    found = [quota for quota in quotas if quota.kind == kind and matches(quota.name, name)]
    return max(found, key=lambda quota: (not quota.name.endswith(EVERY), len(quota.name)), default=None)
