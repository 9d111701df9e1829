"""The Spark demo on a part of its records: a process and a Spark of its own, batch and stream equal to pandas."""

from __future__ import annotations

from pathlib import Path

from tests.demos import run_demo

TIMEOUT_S = 400.0


def test_batch_and_stream_equal_pandas(tmp_path: Path) -> None:
    printed = run_demo("spark_demo", tmp_path, 20_000, TIMEOUT_S)
    assert "batch: delays of 20,000 flights" in printed
    assert "stream: delays of 20,000 flights" in printed
    assert "DIFFERENT" not in printed
