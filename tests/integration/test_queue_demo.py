"""The queue demo on a part of its records: priorities, delays and failures, with workers and the broker killed."""

from __future__ import annotations

from pathlib import Path

from tests.demos import run_demo

TIMEOUT_S = 300


def test_the_queue_demo_acks_each_job_once_after_each_kill(tmp_path: Path) -> None:
    printed = run_demo("queue_demo", tmp_path, 8_000, TIMEOUT_S)
    assert printed.count("killed the broker with SIGKILL") == 2
    assert printed.count("killed worker-") == 3
    assert "handled twice, all of them by a killed worker first" in printed
    assert "audit clean: 8,000 items acked" in printed
    assert "each of 8,000 jobs was acked exactly once" in printed
