"""Runs a demo of `examples/` as a user does, on a part of its records."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from memq_localstack.java import small, spark_class_path

EXAMPLES = Path(__file__).parents[1] / "examples"


def run_demo(name: str, folder: Path, records: int, timeout_s: float) -> str:
    """Run `examples/NAME.py` in a folder and return what it printed; it must end with 0."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), "--records", str(records)],
        cwd=folder,
        env={**os.environ, "JAVA_TOOL_OPTIONS": " ".join(small(spark_class_path()))},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout
