"""The cluster demo on a part of its records: real servers, a broker and the governor killed, every byte compared."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

DEMO = Path(__file__).parents[2] / "examples" / "cluster_demo.py"
TIMEOUT_S = 180.0


def test_the_cluster_demo_loses_and_doubles_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(DEMO), "--records", "30000"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "a broker, with SIGKILL after 10,000 records" in done.stdout
    assert "the governor, with SIGKILL after 20,000 records" in done.stdout
    assert "compared: all 30,000 records are equal" in done.stdout
    assert "verdict: clean" in done.stdout
    assert "from the store" in done.stdout, "the auditor read the objects, not what a broker remembers"
