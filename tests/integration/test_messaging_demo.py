"""The messaging demo on a part of its records: filters, listeners, delays and transactions, with programs killed."""

from __future__ import annotations

from pathlib import Path

from tests.demos import run_demo

TIMEOUT_S = 400


def test_the_messaging_demo_has_the_expected_records_after_each_kill(tmp_path: Path) -> None:
    printed = run_demo("messaging_demo", tmp_path, 12_000, TIMEOUT_S)
    assert printed.count("killed the broker with SIGKILL") == 3
    assert "killed a listener with SIGKILL" in printed
    assert "killed the biller with SIGKILL; its transaction is open" in printed
    assert "verdict: clean: topic 'flights', 12,000 records" in printed
    assert "live audit of 12,000 flights, and all that came of them: no findings" in printed
    assert "every step has the expected records" in printed
