"""A child process: starts it, sends commands as lines of JSON, reads its CPU and memory, stops it."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).resolve().parent.parent
ANSWER_S_MAX = 120.0
STOP_S_MAX = 10.0


class Child:
    """A running `python -m benchmarks.children.NAME`; its first answer is in `ready`.

    `environment` comes over what this process has.
    """

    def __init__(self, name: str, *, environment: Mapping[str, str] | None = None, **options: object) -> None:
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"benchmarks.children.{name}", json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            text=True,
        )
        self.ready = self.answer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def send_command(self, command: str, **options: object) -> None:
        """Send a command and go on."""
        assert self.process.stdin is not None, "started with a pipe"
        self.process.stdin.write(json.dumps({"command": command, **options}) + "\n")
        self.process.stdin.flush()

    def answer(self, timeout_s: float = ANSWER_S_MAX) -> dict[str, Any]:
        """Wait for the next line. Raises: RuntimeError when the child is gone or silent."""
        assert self.process.stdout is not None, "started with a pipe"
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                self.process.kill()
                raise RuntimeError(f"child '{self.name}' did not answer for {timeout_s:g} s")
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"child '{self.name}' ended with code {self.process.wait(STOP_S_MAX)}")
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, command: str, **options: object) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self.send_command(command, **options)
        return self.answer()

    def cpu_s(self) -> float:
        """Return the CPU seconds that the process has used."""
        return cpu_s(self.process.pid)

    def memory_bytes(self) -> int:
        """Return the memory that the process alone is charged for (PSS)."""
        return pss_bytes(self.process.pid)

    def stop(self) -> None:
        """End the process: its stdin ends, and then it should."""
        assert self.process.stdin is not None, "started with a pipe"
        self.process.stdin.close()
        try:
            self.process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


def cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process has used, all threads, to the nanosecond."""
    return time.clock_gettime((~pid << 3) | 2)  # the clock that clock_getcpuclockid(3) names


def pss_bytes(pid: int) -> int:
    """Return a process's proportional set size: its own pages, and its share of those that others map as well."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no Pss of process {pid}")
