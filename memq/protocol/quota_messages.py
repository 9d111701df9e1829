"""Requests about quotas in an ADMIN frame: all quotas, their change, use at one broker; their answer."""

from __future__ import annotations

import msgspec

from memq.protocol.wire_types import Int64
from memq.quotas import QuotaKind, QuotaRule


class ListQuotas(msgspec.Struct, tag_field="op", tag="list-quotas", kw_only=True):
    """Show all quotas."""


class ChangeQuotas(msgspec.Struct, tag_field="op", tag="change-quotas", kw_only=True):
    """Remove quotas and set quotas, in one atomic change. Those in `remove` are found by kind and name."""

    put: list[QuotaRule] = []
    remove: list[QuotaRule] = []


class DescribeQuota(msgspec.Struct, tag_field="op", tag="describe-quota", kw_only=True):
    """Show what a principal uses at one broker; another one refuses."""

    broker: str
    kind: QuotaKind
    name: str


class WireRate(msgspec.Struct, kw_only=True):
    """A limited rate at one broker.

    `limit` is the part of the quota that the broker gives out, per second. `used` counts since the limit exists, and
    `held` how often it made a block or a request wait.
    """

    rate: str
    limit: float
    used: Int64
    held: Int64


class WireUse(msgspec.Struct, kw_only=True):
    """The use of one broker; `waiting` are requests that it holds now."""

    broker: str
    quota: QuotaRule | None
    connections: Int64 = 0
    waiting: Int64 = 0
    rates: list[WireRate] = []


class WireShare(msgspec.Struct, kw_only=True, array_like=True):
    """One rate of a principal at a broker, in parts of the whole rate.

    In a request `part` is what the broker may give out, `used` what it used, and `held` whether clients had to wait. In
    the answer `part` is what it may give out from now on.
    """

    kind: QuotaKind
    name: str
    rate: str
    part: float
    used: float = 0.0
    held: bool = False


class ShareQuotas(msgspec.Struct, tag_field="op", tag="share-quotas", kw_only=True):
    """Report the use of rates at one broker to the governor, and ask for its parts of them."""

    broker: str
    uses: list[WireShare] = []


class QuotaAnswer(msgspec.Struct, kw_only=True):
    """Answer to a request about quotas.

    `version` is that of the rules. `enforced`: the broker applies quotas.
    `put` and `removed` are the quotas that a change has set and removed.
    """

    enforced: bool
    version: Int64 = 0
    quotas: list[QuotaRule] = []
    put: list[QuotaRule] = []
    removed: list[QuotaRule] = []
    use: WireUse | None = None
    shares: list[WireShare] = []
