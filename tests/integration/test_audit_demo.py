"""The audit demo on a part of its records: a loss, a doubling and a damaged block, each named, and no other."""

from __future__ import annotations

from pathlib import Path

from tests.demos import run_demo

TIMEOUT_S = 400


def test_the_audit_demo_names_each_injury(tmp_path: Path) -> None:
    printed = run_demo("audit_demo", tmp_path, 30_000, TIMEOUT_S)
    assert "is ok" in printed
    for kind in ("lost", "doubled", "corrupt"):
        assert f" {kind}" in printed.split("named by the auditor")[1]
