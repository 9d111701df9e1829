"""Runs tasks in forks of this process, some at a time, each under a limit of wall time, CPU time and memory."""

from __future__ import annotations

import math
import os
import resource
import selectors
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from memq.runtime.clock import SystemClock

Send = Callable[[dict[str, Any]], None]
START_LIMIT_S = 60.0
MEMORY_BYTES_MAX = 4 << 30  # beyond what the parent has


@dataclass(frozen=True, slots=True)
class Task:
    """`call` runs in a fork, and says what it finds; a message with `limit_s` says how long the next one may take."""

    name: str
    call: Callable[[Send], None]
    cpu_s_max: int = 900


@dataclass(slots=True)
class Ended:
    """A task that has ended: by itself, or `killed` because of a limit; `last` is its last message with a limit."""

    task: Task
    messages: list[dict[str, Any]] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)
    killed: bool = False
    cpu_s: float = 0.0
    wall_s: float = 0.0

    def find(self, key: str) -> Any:
        """Return what the last message with `key` says, None when there is none."""
        return next((message[key] for message in reversed(self.messages) if key in message), None)


class _Child:
    """One fork: its process group, its pipe, and until when it must speak again."""

    def __init__(self, task: Task, now_s: float) -> None:
        self.ended = Ended(task)
        self.folder = Path(tempfile.mkdtemp(prefix="memq-mutant-"))
        self.started_s = now_s
        self.deadline_s = now_s + START_LIMIT_S
        self._rest = b""
        self._starved_s = 0.0
        self.reader, writer = os.pipe()
        sys.stdout.flush()
        self.pid = os.fork()
        if not self.pid:
            os.close(self.reader)
            _run(task, writer, self.folder)
        os.close(writer)

    def take(self, now_s: float) -> bool:
        """Read what it says; False when it has ended."""
        data = os.read(self.reader, 1 << 16)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            message = msgspec.json.decode(line, type=dict[str, Any])
            self.ended.messages.append(message)
            if "limit_s" in message:
                self.ended.last = message
                self.deadline_s = now_s + message["limit_s"]
                self._starved_s = _starved_s(self.pid)
        return bool(data)

    def is_late(self, now_s: float) -> bool:
        """Whether its time is up; that in which it was ready to run and had no core does not count."""
        if now_s < self.deadline_s:
            return False
        starved_s = _starved_s(self.pid)
        self.deadline_s += starved_s - self._starved_s
        self._starved_s = starved_s
        return now_s >= self.deadline_s

    def end(self, now_s: float) -> Ended:
        """Kill what is left of it and forget it."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        status, usage = os.wait4(self.pid, 0)[1:]
        os.close(self.reader)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.ended.killed = self.ended.killed or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU)
        self.ended.cpu_s = usage.ru_utime + usage.ru_stime
        self.ended.wall_s = now_s - self.started_s
        return self.ended


def _starved_s(pid: int) -> float:
    """Return for how long a process has waited for a core; 0 where the system does not say."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def _run(task: Task, writer: int, folder: Path) -> None:
    """Be the fork: never returns."""
    status = 1
    try:
        os.setsid()
        quiet = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(quiet, number)
        os.environ["PYTEST_DEBUG_TEMPROOT"] = os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
        spent = resource.getrusage(resource.RUSAGE_SELF)
        resource.setrlimit(resource.RLIMIT_CPU, (task.cpu_s_max + int(spent.ru_utime),) * 2)
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY_BYTES_MAX,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

        def send(message: dict[str, Any]) -> None:
            left = msgspec.json.encode(message) + b"\n"
            while left:  # a signal may end a write early
                left = left[os.write(writer, left) :]

        try:
            task.call(send)
            status = 0
        except BaseException:  # noqa: BLE001 - what a mutant raises is a finding, whatever it is
            send({"error": traceback.format_exc()[-2000:]})
    finally:
        os._exit(status)  # no exit handler of the parent runs here


def run_tasks(tasks: Iterable[Task], jobs: int, seconds: float = math.inf) -> Iterator[Ended]:
    """Run all tasks, `jobs` at a time, and yield each as it ends; what runs still after `seconds` is dropped."""
    clock = SystemClock()
    stop_s = clock.monotonic() + seconds
    waiting = iter(tasks)
    with selectors.DefaultSelector() as selector:
        running: dict[int, _Child] = {}
        try:
            while True:
                while len(running) < jobs and (task := next(waiting, None)) is not None:
                    child = _Child(task, clock.monotonic())
                    running[child.reader] = child
                    selector.register(child.reader, selectors.EVENT_READ)
                if not running or clock.monotonic() >= stop_s:
                    return
                until_s = min(stop_s, *(child.deadline_s for child in running.values()))
                ready = selector.select(max(0.0, until_s - clock.monotonic()))
                now_s = clock.monotonic()
                gone = [running[key.fd] for key, _ in ready if not running[key.fd].take(now_s)]
                late = [child for child in running.values() if child not in gone and child.is_late(now_s)]
                for child in (*gone, *late):
                    child.ended.killed = child in late
                    selector.unregister(child.reader)
                    del running[child.reader]
                    yield child.end(now_s)
        finally:
            for child in running.values():
                child.end(clock.monotonic())
