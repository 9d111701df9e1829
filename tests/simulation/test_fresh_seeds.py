"""Fresh seeds: the same for one commit, others for another, and some where there is no git."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.simulation.fresh_seeds import FIRST, fresh_start
from tests.simulation.run import main


def commit(root: Path, text: str) -> None:
    source = root / "memq" / "a.py"
    source.parent.mkdir(exist_ok=True)
    source.write_text(text)
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-q", "-m", text]):
        subprocess.run(["git", *command], cwd=root, check=True)


def test_each_commit_has_seeds_of_its_own(tmp_path: Path) -> None:
    commit(tmp_path, "one")
    first = fresh_start(tmp_path)
    assert first == fresh_start(tmp_path) >= FIRST
    commit(tmp_path, "two")
    assert fresh_start(tmp_path) != first


def test_outside_of_git_the_sources_draw_the_seeds(tmp_path: Path) -> None:
    source = tmp_path / "memq" / "a.py"
    source.parent.mkdir()
    source.write_text("one")
    first = fresh_start(tmp_path)
    assert first == fresh_start(tmp_path)
    source.write_text("two")
    assert fresh_start(tmp_path) != first


def test_several_processes_run_the_same_seeds_as_one() -> None:
    assert main(["--seeds", "2", "--start", "71", "--jobs", "2", "--quiet"]) == 0
