"""A real `memq dev` on a folder, started as a user starts it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

MEMQ = (sys.executable, "-m", "memq")
STOP_S_MAX = 20.0


@dataclass(frozen=True, slots=True)
class Dev:
    """A running `memq dev`."""

    address: str
    pid: int


@contextmanager
def dev_broker(folder: Path) -> Iterator[Dev]:
    """Start it on any free port, wait for its ready line, and stop it at the end."""
    command = [
        *MEMQ,
        "dev",
        "--data",
        str(folder),
        "--port",
        "0",
        "--http-port",
        "-1",
        "--dashboard-port",
        "0",
        "--log-level",
        "warning",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None, "started with a pipe"
        line = process.stdout.readline()
        try:
            if not line.startswith("memq ready: "):
                raise RuntimeError(f"memq dev printed {line!r}")
            yield Dev(line.split(": ", 1)[1].strip(), process.pid)
        finally:
            process.terminate()
            try:
                process.wait(STOP_S_MAX)
            except subprocess.TimeoutExpired:
                process.kill()
