"""The plan of a chaos run: a function of its seed, in order, with at most one fault for each part."""

from __future__ import annotations

import pytest

from tests.chaos.plan import CALM_AT_END_S, CALM_AT_START_S, KINDS, SPARK_KINDS, draw_plan, hands_meet


def test_a_seed_has_one_plan() -> None:
    assert draw_plan(7, 600) == draw_plan(7, 600)
    assert draw_plan(7, 600) != draw_plan(8, 600)


def test_faults_lie_between_the_calm_at_both_ends() -> None:
    for seed in range(50):
        plan = draw_plan(seed, 300)
        assert plan == sorted(plan, key=lambda fault: fault.at_s)
        for fault in plan:
            assert fault.at_s >= CALM_AT_START_S
            assert fault.at_s + max(fault.lasts_s, CALM_AT_END_S) <= 300


def test_no_part_is_struck_while_it_is_struck() -> None:
    for seed in range(50):
        until_s: dict[str, float] = {}
        for fault in draw_plan(seed, 900):
            assert all(until <= fault.at_s for part, until in until_s.items() if hands_meet(part, fault.target))
            until_s[fault.target] = fault.at_s + fault.lasts_s


@pytest.mark.parametrize(
    ("part", "other", "meet"),
    [
        ("broker-1", "broker-1:s3", True),
        ("broker-1", "brokers", True),
        ("brokers", "broker-2:clients", True),
        ("zookeepers", "zookeeper-3", True),
        ("broker-1", "broker-2", False),
        ("broker-1:s3", "broker-1:clients", False),
        ("kafka-1", "zookeepers", False),
    ],
)
def test_a_broker_and_its_links_are_one_part(part: str, other: str, meet: bool) -> None:
    assert hands_meet(part, other) is meet
    assert hands_meet(other, part) is meet


def test_an_hour_has_every_kind_and_a_pause_longer_than_the_dedup_window() -> None:
    plan = draw_plan(1, 3_600)
    assert {fault.kind for fault in plan} == {kind.name for kind in (*KINDS, *SPARK_KINDS)}
    assert any(fault.kind == "broker-pause" and fault.lasts_s > 80 for fault in plan)
