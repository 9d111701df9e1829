"""The Spark demo on a part of its records: a process and a Spark of its own, batch and stream equal to pandas."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

DEMO = Path(__file__).parents[2] / "examples" / "spark_demo.py"
TIMEOUT_S = 400.0


def test_batch_and_stream_equal_pandas(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(DEMO), "--records", "20000"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "batch: delays of 20,000 flights" in done.stdout
    assert "stream: delays of 20,000 flights" in done.stdout
    assert "DIFFERENT" not in done.stdout
