"""The Grafana boards and the Prometheus rules of deploy/ use what memq exports; promtool runs the rules' own tests."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from memq.observe.metrics import METRICS
from tests.promtool import check_with_promtool

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = DEPLOY / "prometheus"
BOARDS = sorted((DEPLOY / "grafana").glob("*.json"))
EXPORTED = {name for metric in METRICS.values() for name in metric.exported}


def unknown_in(expression: str) -> set[str]:
    """Return the metrics of memq in an expression that nobody exports."""
    return set(re.findall(r"\bmemq_\w+", expression)) - EXPORTED


def expressions_of(board: dict[str, Any]) -> list[str]:
    queries = [each["query"] for each in board["templating"]["list"] if each["type"] == "query"]
    return queries + [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]


def test_boards_with_unknown_metrics_are_found() -> None:
    assert unknown_in('sum(rate(memq_broker_acks[5m])) / memq_nothing{name="x"}') == {
        "memq_broker_acks",
        "memq_nothing",
    }
    assert unknown_in("histogram_quantile(0.5, memq_broker_ack_seconds_bucket)") == set()


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_boards_use_what_is_exported(path: Path) -> None:
    board = json.loads(path.read_text())
    expressions = expressions_of(board)
    assert expressions
    assert {name for expression in expressions for name in unknown_in(expression)} == set()
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    assert all(panel["title"] and panel["description"] and panel["fieldConfig"]["defaults"]["unit"] for panel in panels)
    numbers = [panel["id"] for panel in board["panels"]]
    assert len(numbers) == len(set(numbers))


def test_boards_are_distinguished() -> None:
    names = [json.loads(path.read_text())["uid"] for path in BOARDS]
    assert len(names) == len(set(names)) == len(BOARDS) > 0


def test_rules_use_what_is_exported_and_each_has_a_case_where_it_fires() -> None:
    rules = [
        rule for group in yaml.safe_load((RULES / "memq-alerts.yaml").read_text())["groups"] for rule in group["rules"]
    ]
    assert {name for rule in rules for name in unknown_in(rule["expr"])} == set()
    tests = yaml.safe_load((RULES / "memq-alerts-test.yaml").read_text())["tests"]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    names = {rule["alert"] for rule in rules}
    assert {case["alertname"] for case in cases if case["exp_alerts"]} == names
    assert {case["alertname"] for case in cases if not case["exp_alerts"]} == names, "a sound cluster fires nothing"


def test_promtool_takes_the_rules_and_their_tests_pass() -> None:
    check_with_promtool(["check", "config", "prometheus.yaml"], folder=RULES)
    check_with_promtool(["check", "rules", "memq-alerts.yaml"], folder=RULES)
    check_with_promtool(["test", "rules", "memq-alerts-test.yaml"], folder=RULES)
