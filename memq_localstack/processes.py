"""Processes by identity: a process is its id and its start time, so a reused id is never killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

LOOK_EVERY_S = 0.02
PAUSE_S_MAX = 30.0


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

    def pause(self, timeout_s: float = PAUSE_S_MAX) -> bool:
        """Stop it where it is (SIGSTOP), and wait until it stands; False when it is gone, or stands not in time.

        The signal alone is not enough: on a busy machine threads may go on for a while after it was sent.
        """
        deadline = time.monotonic() + timeout_s
        if not self.send(signal.SIGSTOP):
            return False
        while not _stands(self.pid):
            if time.monotonic() > deadline or not self.lives:
                return False
            time.sleep(LOOK_EVERY_S)
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
    state, _, started = _shown_by_ps(pid).partition(" ")
    return Identity(pid, started.strip()) if state and not state.startswith("Z") else None


def _shown_by_ps(pid: int) -> str:
    shown = subprocess.run(
        ["/bin/ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return shown.stdout.strip()


def kill_session(leader: int) -> int:
    """End all processes of the session that `leader` began, as `kill -9` does; return how many there were."""
    count = 0
    while found := [pid for pid in session_pids(leader) if identity_of(pid)]:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        count += len(found)
        time.sleep(LOOK_EVERY_S)
    return count


def session_pids(leader: int) -> list[int]:
    """Return the ids of all processes of the session that `leader` began, zombies among them."""
    found = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in found if _session_of(pid) == leader]


def _session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return -1


def _identity_from_proc(pid: int) -> Identity | None:
    fields = _stat(Path(f"/proc/{pid}"))
    return None if fields is None or fields[0] in "ZX" else Identity(pid, fields[19])


def _stands(pid: int) -> bool:
    """Whether no thread of a process runs, as SIGSTOP leaves it."""
    tasks = Path(f"/proc/{pid}/task")
    if not tasks.exists():
        return _shown_by_ps(pid).startswith("T")
    found = [_stat(task) for task in tasks.iterdir()]
    return all(fields is None or fields[0] in "TtZX" for fields in found)


def _stat(folder: Path) -> list[str] | None:
    """Return the fields of proc(5) from the third, the state, on; the 22nd is when it began. None when it is gone."""
    try:
        text = (folder / "stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()  # the name before it may hold spaces and brackets
