"""Blocks of code on pages of the documents, run as a reader would paste them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run_block(code: str, folder: Path, variables: Mapping[str, str], timeout_s: float, *, language: str = "sh") -> str:
    """Run a block of shell or Python in a folder, with the `memq` of this tree, and return what it printed."""
    memq = folder / "bin" / "memq"
    if not memq.exists():
        memq.parent.mkdir()
        memq.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m memq "$@"\n', encoding="utf-8")
        memq.chmod(0o755)
    done = subprocess.run(
        ["/bin/sh", "-euc", code] if language == "sh" else [sys.executable, "-c", code],
        env={**os.environ, "PATH": f"{memq.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), **variables},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    assert done.returncode == 0, f"{code}{done.stdout}{done.stderr}"
    return done.stdout
