"""Commands of memq as processes in a folder, and a wait for what they do."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from memq.runtime.clock import SystemClock

WAIT_S = 60.0
POLL_S = 0.02


def until(holds: Callable[[], object], seen: Callable[[], object] = lambda: "") -> None:
    """Wait until something holds; fail after a minute, with what is `seen` then."""
    pause, clock = threading.Event(), SystemClock()
    until_s = clock.monotonic() + WAIT_S
    while not holds():
        assert clock.monotonic() < until_s, seen()
        pause.wait(POLL_S)


class Shell:
    """Runs commands against a broker; `lines` are those that the programs of a test have written to `$WRITTEN`."""

    def __init__(self, folder: Path, address: str) -> None:
        self.folder = folder
        self.address = address
        self.written = folder / "written"
        self._environment = os.environ | {"MEMQ_BROKERS": address, "WRITTEN": str(self.written)}

    def run(self, *arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
        """Run a command to its end, with `text` on stdin."""
        return subprocess.run(
            [sys.executable, "-m", "memq", *arguments],
            input=text,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
            cwd=self.folder,
            env=self._environment,
        )

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command, whose stderr is a pipe."""
        return subprocess.Popen(
            [sys.executable, "-m", "memq", *arguments],
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env=self._environment,
        )

    @property
    def lines(self) -> list[str]:
        """The lines that were written so far."""
        return self.written.read_text().splitlines() if self.written.exists() else []
