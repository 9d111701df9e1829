"""Every example runs as documented, in its own process; the demo on a part of its records."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
TIMEOUT_S = 120.0
# Run elsewhere, as spark_….py are.
OTHERS = {
    "demo.py",
    "flights.py",
    "folders.py",
    "read_object.py",
    "audit_demo.py",
    "faults.py",
    "cluster_demo.py",
    "secure_demo.py",
    "messaging_demo.py",
    "messaging_workers.py",
    "queue_demo.py",
    "queue_demo_worker.py",
}


def run(*command: str, cwd: Path) -> str:
    """Run an example and return what it printed; it must succeed."""
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_demo_compares_every_byte_and_audits(tmp_path: Path) -> None:
    said = run(str(EXAMPLES / "demo.py"), "--records", "20000", "--data", "demo-data", cwd=tmp_path)
    assert "all 20,000 records are equal" in said
    assert "clean" in said
    shown = next(line for line in said.splitlines() if line.startswith("look into one"))
    path = tmp_path / shown.split()[-1]
    assert path.is_file()
    assert "carrier" in run(str(EXAMPLES / "read_object.py"), str(path), cwd=tmp_path)


NAMES = sorted(path.name for path in EXAMPLES.glob("*.py") if not path.name.startswith("spark_"))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in OTHERS])
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    assert run(str(EXAMPLES / name), cwd=tmp_path)
