"""promtool of Debian's package `prometheus`: a skip where it is missing, in the CI a failure."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

MISSING = "promtool is missing (Debian, Ubuntu: sudo apt-get install prometheus)"


def required() -> bool:
    """Whether what is missing on this machine is a failure."""
    return any(os.environ.get(name, "0") not in ("", "0", "false") for name in ("CI", "MEMQ_REQUIRE_SERVERS"))


def tool(name: str, missing: str) -> str:
    """Return where a program lies; without it the test is skipped, or fails where it is required."""
    found = shutil.which(name)
    if found is None:
        (pytest.fail if required() else pytest.skip)(missing)
    return found


def check_with_promtool(arguments: Sequence[str], *, stdin: str = "", folder: Path | None = None) -> None:
    """Run promtool; what it finds is the failure's text."""
    command = [tool("promtool", MISSING), *arguments]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
