"""The cluster demo on a part of its records: real servers, a broker and the governor killed, every byte compared."""

from __future__ import annotations

from pathlib import Path

from tests.demos import run_demo

TIMEOUT_S = 180.0


def test_the_cluster_demo_loses_and_doubles_nothing(tmp_path: Path) -> None:
    printed = run_demo("cluster_demo", tmp_path, 30_000, TIMEOUT_S)
    assert "a broker, with SIGKILL after 10,000 records" in printed
    assert "the governor, with SIGKILL after 20,000 records" in printed
    assert "compared: all 30,000 records are equal" in printed
    assert "verdict: clean" in printed
    assert "from the store" in printed, "the auditor read the objects, not what a broker remembers"
