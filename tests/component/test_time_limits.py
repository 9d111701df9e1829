"""Every test has a time limit, and one that hangs fails: the run continues."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HANGING = """
import asyncio, threading

def test_one_that_waits_for_a_thread():
    threading.Event().wait()

def test_one_that_waits_on_a_loop():
    asyncio.run(asyncio.Event().wait())

def test_the_next_one():
    pass
"""


def test_this_test_has_a_limit(request: pytest.FixtureRequest) -> None:
    marker = request.node.get_closest_marker("timeout")
    assert marker is not None
    assert 0 < marker.args[0] <= 300


def test_tests_that_hang_fail_and_the_next_ones_run(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    (tmp_path / "test_hanging.py").write_text(HANGING)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(pytestconfig.inipath)]
    command += ["--rootdir", str(tmp_path), "-o", "timeout=1", str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.stdout.count("Timeout (>1.0s)") >= 2, found.stdout + found.stderr
    assert "2 failed, 1 passed" in found.stdout
