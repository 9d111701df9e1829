"""The brokers of a chaos run use the source tree that they are given, from any working folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.stack import ChaosBroker

CLOCK = "import time\nclass SystemClock:\n    def wall_ms(self):\n        return time.time_ns() // 1_000_000\n"
CLI = """\
import memq, sys
def main():
    print(memq.__file__, memq.{module}.SystemClock().wall_ms(), sys.argv[1])
"""
TREES: dict[str, dict[str, str]] = {
    "this revision": {
        "runtime/__init__.py": "",
        "runtime/clock.py": CLOCK,
        "cli.py": CLI.format(module="runtime.clock"),
    },
    "an earlier one": {"clock.py": CLOCK, "cli.py": CLI.format(module="clock")},
}


@pytest.mark.parametrize("tree", TREES)
def test_a_broker_runs_from_its_tree_with_its_clock(tmp_path: Path, tree: str) -> None:
    package = tmp_path / "before" / "memq"
    for name, text in {"__init__.py": "", **TREES[tree]}.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    broker = ChaosBroker(tmp_path, "broker-1", 1, tmp_path / "broker.toml", package.parent)
    broker.step_clock(-1_000_000_000)
    command = [sys.executable, *broker.command()]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, env=broker.environment(), cwd=root, capture_output=True, text=True, check=True)
    place, wall_ms, word = done.stdout.split()
    assert Path(place) == package / "__init__.py"
    assert int(wall_ms) < 1_000_000_000_000, "its clock is stepped back by 30 years"
    assert word == "broker"
