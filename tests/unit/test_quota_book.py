"""Quotas as rules, and the limiters and connections of principals at one broker."""

from __future__ import annotations

from typing import Any

import pytest

from memq.broker.ingest.quota_book import QuotaBook
from memq.broker.ingest.quotas import Flow, Limiter, RatePerSecond, refusal_of
from memq.broker.permissions.resources import namespace_of_resource
from memq.errors import InvalidRequestError, OverLimitError, TooLargeError
from memq.format.key import object_key, shared_object_key
from memq.permissions import (
    AccessRule,
    Resource,
    ResourceKind,
    RuleSet,
    changed_quotas,
    changed_rules,
    decode_rules,
    encode_rules,
)
from memq.quotas import QuotaRule, quota_of
from tests.contract.manual_clock import ManualClock

RULE = AccessRule(effect="allow", principal="ann", permission="read", kind="topic", name="x")


def quota(name: str, **amounts: Any) -> QuotaRule:
    return QuotaRule(name=name, **amounts)


def limiter_of(quotas: QuotaBook, principal: str) -> Limiter:
    (limiter,) = quotas.limiters_of("principal", principal)
    return limiter


def test_the_exact_quota_applies_then_the_longest_prefix_then_the_default() -> None:
    quotas = [quota("*"), quota("team-*"), quota("team-a-*"), quota("team-a-1")]
    found = [quota_of(quotas, "principal", name) for name in ("team-a-1", "team-a-2", "team-b", "ann")]
    assert [each and each.name for each in found] == ["team-a-1", "team-a-*", "team-*", "*"]
    assert quota_of(quotas[1:], "principal", "ann") is None


@pytest.mark.parametrize(
    "bad",
    [
        quota(""),
        quota("a*b"),
        quota("ann", requests_s=-1),
        quota("ann", bytes_in_s=1 << 60),
    ],
)
def test_a_quota_that_is_not_sound_is_refused(bad: QuotaRule) -> None:
    with pytest.raises(InvalidRequestError):
        changed_quotas(RuleSet(), [bad], [])
    with pytest.raises(InvalidRequestError):
        decode_rules(encode_rules(RuleSet(version=1, quotas=(bad,))))


def test_quotas_and_rules_change_without_each_other() -> None:
    first = changed_quotas(RuleSet(), [quota("b", requests_s=1), quota("a", requests_s=2)], [])
    assert first == RuleSet(version=1, quotas=(quota("a", requests_s=2), quota("b", requests_s=1)))
    both = changed_rules(first, [RULE], [])
    assert both == RuleSet(version=2, rules=(RULE,), quotas=first.quotas)
    assert changed_quotas(both, [quota("a", requests_s=2)], [quota("c")]) is both
    last = changed_quotas(both, [quota("a", requests_s=3)], [quota("b")])
    assert last == RuleSet(version=3, rules=(RULE,), quotas=(quota("a", requests_s=3),))
    assert decode_rules(encode_rules(last)) == last


def test_rules_without_quotas_have_none() -> None:
    assert decode_rules(b'{"version":1,"rules":[]}') == RuleSet(version=1)


def test_quotas_have_a_bound() -> None:
    with pytest.raises(TooLargeError):
        changed_quotas(RuleSet(), [quota(f"{number}" * 50, requests_s=1) for number in range(5_000)], [])


def test_each_principal_of_a_prefix_has_all_the_amounts() -> None:
    quotas = QuotaBook(ManualClock())
    quotas.follow([quota("*", requests_s=10)])
    for principal in ("ann", "bob"):
        quotas.connect(principal)
    limiter_of(quotas, "ann").take(10, 0)
    assert limiter_of(quotas, "ann").room(0.0) == (0, 0)
    assert limiter_of(quotas, "bob").room(0.0)[0] == 10


def test_connections_of_a_principal_share_a_limiter_that_outlives_them() -> None:
    quotas = QuotaBook(ManualClock())
    quotas.follow([quota("ann", bytes_in_s=100)])
    quotas.connect("ann")
    quotas.connect("ann")
    limiter_of(quotas, "ann").take(1, 500)
    quotas.disconnect("ann")
    quotas.disconnect("ann")
    quotas.connect("ann")
    assert limiter_of(quotas, "ann").room(0.0) == (0, 0), "it still owes 400 bytes"


@pytest.mark.parametrize("allowed", [1, 2])
def test_connections_over_the_quota_are_refused_and_not_counted(allowed: int) -> None:
    quotas = QuotaBook(ManualClock())
    quotas.follow([quota("ann", connections=allowed)])
    for _ in range(allowed):
        quotas.connect("ann")
    for _ in range(3):
        with pytest.raises(OverLimitError, match=f"'ann' has {allowed} connections") as refused:
            quotas.connect("ann")
        assert refused.value.retry_after_ms > 0
    quotas.disconnect("ann")
    quotas.connect("ann")
    assert quotas.use_of("principal", "ann").connections == allowed
    quotas.connect("bob")


def test_changed_quotas_apply_to_connected_principals_and_debts_stay() -> None:
    clock = ManualClock()
    quotas = QuotaBook(clock)
    quotas.connect("ann")
    assert quotas.limiters_of("principal", "ann") == ()
    quotas.follow([quota("a*", bytes_in_s=100, records_s=5)])
    limiter_of(quotas, "ann").take(1, 300, 1)
    assert limiter_of(quotas, "ann").room(clock.monotonic()) == (0, 0)
    quotas.follow([quota("ann", bytes_in_s=1_000)])
    limiter = limiter_of(quotas, "ann")
    assert list(limiter.buckets) == ["bytes_in_s"]
    assert limiter.buckets["bytes_in_s"].tokens == -200
    quotas.follow([])
    assert quotas.limiters_of("principal", "ann") == ()
    assert quotas.use_of("principal", "ann").connections == 1


def test_each_rate_holds_the_traffic_that_it_counts() -> None:
    limit = RatePerSecond("soft", bytes_in_s=100, bytes_out_s=100, records_s=10, requests_s=100)
    limiter = Limiter("principal", "ann", limit, 0.0, exact=True)

    def held() -> list[Flow]:
        return [flow for flow in Flow if refusal_of([limiter], 0.0, flow) is not None]

    assert held() == []
    limiter.owe(100)
    assert held() == [Flow.READS, Flow.REQUESTS]
    limiter.change(limit, 1.0, 0.0)
    limiter.take(1, 10, 10)
    assert held() == [Flow.BLOCKS, Flow.READS, Flow.REQUESTS]
    limiter = Limiter("principal", "ann", limit, 0.0, exact=True)
    limiter.take(1, 10, 10)
    assert held() == [Flow.BLOCKS], "records in blocks hold no reader"
    limiter = Limiter("principal", "ann", limit, 0.0, exact=True)
    limiter.receive(100)
    assert held() == [Flow.BLOCKS, Flow.REQUESTS]
    limiter = Limiter("principal", "ann", limit, 0.0, exact=True)
    limiter.take(100, 0)
    assert held() == list(Flow)
    assert limiter.buckets["requests_s"].held == 3


def test_blocks_come_one_by_one_under_a_limit_on_records() -> None:
    limiter = Limiter("principal", "ann", RatePerSecond("soft", records_s=100), 0.0, exact=True)
    now_s = taken = 0.0
    while now_s < 60:
        requests, _ = limiter.room(now_s)
        assert requests in (0, 1)
        if requests:
            limiter.take(1, 1_000, 30)
            taken += 30
        now_s += 0.01
    assert taken == pytest.approx(100 * 61, abs=60), "a burst of one second, and then the rate"


def test_an_exact_limit_bounds_the_requests_that_wait() -> None:
    limiter = Limiter("principal", "ann", RatePerSecond("soft", requests_s=1), 0.0, exact=True)
    held = 0
    while limiter.hold(1 << 16):
        held += 1
    assert held == 32, "2 MiB of bodies"
    limiter.release(1 << 16)
    assert limiter.hold(1 << 10)
    assert (limiter.waiting, limiter.waiting_bytes) == (32, (31 << 16) + (1 << 10))


def test_quotas_of_namespaces_are_apart_from_those_of_principals() -> None:
    quotas = QuotaBook(ManualClock())
    assert quotas.of_namespace("billing") == ()
    of_namespaces = QuotaRule(kind="namespace", name="*", requests_s=5)
    quotas.follow([quota("billing", records_s=3), quota("*", bytes_in_s=7)])
    assert quotas.of_namespace("billing") == ()
    quotas.follow([quota("billing", records_s=3), of_namespaces])
    (limiter,) = quotas.of_namespace("billing")
    assert (limiter.subject, limiter.name, limiter.limit.rates) == ("namespace", "billing", {"requests_s": 5})
    assert limiter_of(quotas, "billing").limit.rates == {"records_s": 3}
    assert quotas.of_namespace("") == ()
    assert quotas.of_namespace("billing") == (limiter,)
    assert quotas.use_of("namespace", "other").quota == of_namespaces
    quotas.follow([quota("billing", records_s=3)])
    assert quotas.of_namespace("billing") == ()
    assert str(of_namespaces) == "namespace '*': requests_s 5"


def test_a_namespace_has_no_quota_of_connections() -> None:
    with pytest.raises(InvalidRequestError, match="connections, which are of principals"):
        changed_quotas(RuleSet(), [QuotaRule(kind="namespace", name="billing", connections=3)], [])
    both = [quota("billing", records_s=3), QuotaRule(kind="namespace", name="billing", records_s=5)]
    stored = changed_quotas(RuleSet(), both, [])
    assert decode_rules(encode_rules(stored)) == stored
    assert changed_quotas(stored, [], [QuotaRule(kind="namespace", name="billing")]).quotas == (both[0],)


@pytest.mark.parametrize(
    ("kind", "name", "namespace"),
    [
        (ResourceKind.TOPIC, "billing/invoices", "billing"),
        (ResourceKind.TOPIC, "invoices", ""),
        (ResourceKind.PARTITION, "billing/invoices/3", "billing"),
        (ResourceKind.PARTITION, "invoices/3", ""),
        (ResourceKind.GROUP, "billing/reports", "billing"),
        (ResourceKind.QUEUE, "billing/jobs", "billing"),
        (ResourceKind.QUEUE, "billing/invoices@other/reports", "billing"),
        (ResourceKind.QUEUE, "invoices@other/reports", ""),
        (ResourceKind.CLUSTER, "", ""),
        (ResourceKind.OBJECT, f"main/{object_key('c', 'billing/invoices', '0a' * 16, 1, 2, 3, 4)}", "billing"),
        (ResourceKind.OBJECT, f"main/{object_key('c', 'invoices', '0a' * 16, 1, 2, 3, 4)}", ""),
        (ResourceKind.OBJECT, f"main/{shared_object_key('c', 'b', 1, 2, 3)}", ""),
        (ResourceKind.OBJECT, "main/a/b/c", ""),
    ],
)
def test_resources_are_of_the_namespace_of_their_name(kind: ResourceKind, name: str, namespace: str) -> None:
    assert namespace_of_resource(Resource(kind, name)) == namespace
