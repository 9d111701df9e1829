"""Kills the servers that a process started when that process has ended, also after SIGKILL.

A child process reads the id of each server from a pipe. When the pipe closes, the writer has ended, and the child kills
the servers that still run. `memq-localstack up`, whose servers must stay, does not use it.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec

from memq_localstack.processes import Identity

END_TIMEOUT_S = 10.0


class Guard:
    """The end of the pipe that this process holds; the child is started with the first server."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._child: subprocess.Popen[bytes] | None = None

    def watch(self, identity: Identity) -> None:
        """Have a process killed when this one is gone."""
        if os.getpid() != self._owner:
            return  # a fork: it is its parent's
        if self._child is None:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "memq_localstack.guard"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=Path(__file__).parents[1],
                start_new_session=True,  # what is sent to the group of this process is not for it
            )
            atexit.register(self._end)
        assert self._child.stdin is not None
        self._child.stdin.write(msgspec.json.encode(identity) + b"\n")
        self._child.stdin.flush()

    def _end(self) -> None:
        if self._child is not None and os.getpid() == self._owner:
            assert self._child.stdin is not None
            self._child.stdin.close()
            self._child.wait(END_TIMEOUT_S)


_guards: list[Guard] = []  # one, once this process has begun


def begin() -> None:
    """Let no server outlive this process from now on."""
    if not _guards:
        _guards.append(Guard())


def watch(identity: Identity | None) -> None:
    """Have a process that was just started killed when this one is gone, if it has begun."""
    if identity is not None:
        for guard in _guards:
            guard.watch(identity)


def main() -> None:
    """Read who is to be watched until nobody writes any more, and kill who is left."""
    known = [msgspec.json.decode(line, type=Identity) for line in sys.stdin.buffer]
    for identity in known:
        identity.send(signal.SIGKILL)


if __name__ == "__main__":
    main()
