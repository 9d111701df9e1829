"""Processes by identity: a process is its id and its start time, so that an id given out again is never hit."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

LOOK_EVERY_S = 0.02


@dataclass(frozen=True, slots=True)
class Identity:
    """One process of this machine, among all that ever had its id."""

    pid: int
    started: str  # as the system tells it; only compared

    @property
    def lives(self) -> bool:
        """Whether this very process runs or is stopped; a zombie does neither."""
        return identity_of(self.pid) == self

    def send(self, number: signal.Signals) -> bool:
        """Send a signal to this very process; False when it is gone."""
        if not self.lives:
            return False
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return True

    def wait_gone(self, timeout_s: float) -> bool:
        """Wait until the process is gone; False when it is still there after so many seconds."""
        deadline = time.monotonic() + timeout_s
        while self.lives:
            if time.monotonic() > deadline:
                return False
            time.sleep(LOOK_EVERY_S)
        return True


def identity_of(pid: int) -> Identity | None:
    """Return who has that id now, or None when nobody does or only a zombie."""
    if Path("/proc/self/stat").exists():
        return _identity_from_proc(pid)
    shown = subprocess.run(
        ["/bin/ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    state, _, started = shown.stdout.strip().partition(" ")
    return Identity(pid, started.strip()) if state and not state.startswith("Z") else None


def _identity_from_proc(pid: int) -> Identity | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold spaces and brackets
    state, ticks = fields[0], fields[19]  # fields 3 and 22 of proc(5)
    return None if state in "ZX" else Identity(pid, ticks)
