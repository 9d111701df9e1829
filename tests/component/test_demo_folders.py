"""The folder of a demo: only files that demos made are replaced."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.demos import EXAMPLES

CLAIM = """
import pathlib, sys
from folders import claim, clear
folder = pathlib.Path(sys.argv[1])
lock = claim(folder)
clear(folder)
print("claimed", flush=True)
sys.stdin.read()
"""


def claimed(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CLAIM, str(folder)],
        cwd=EXAMPLES,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_demo_removes_what_demos_have_left_and_nothing_else(tmp_path: Path) -> None:
    mine, left = tmp_path / "mine", tmp_path / "made" / "left"
    mine.write_text("mine")
    for folder, said in ((tmp_path, "is not a demo's (remove it"), (mine, "File exists (choose another folder")):
        _, error = claimed(folder).communicate(timeout=60)
        assert said in error
        assert mine.read_text() == "mine"
    for _ in range(2):
        assert claimed(left.parent).communicate(timeout=60) == ("claimed\n", "")
        assert not left.exists()
        left.mkdir()


def test_two_demos_do_not_share_a_folder(tmp_path: Path) -> None:
    with claimed(tmp_path) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "claimed\n"
        _, error = claimed(tmp_path).communicate(timeout=60)
        assert f"a demo runs in '{tmp_path}'" in error
