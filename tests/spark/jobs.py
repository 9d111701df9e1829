"""A Spark job as a process in its own session: its output, and its processes, which tests kill."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from memq_localstack.launch import Server
from memq_localstack.processes import kill_session, session_pids
from tests.spark.conftest import JAVA_OPTIONS, ROOT

END_S = 600
PIPELINES = (sys.executable, "-m", "memq.spark.pipelines")
JAVA = f"'{JAVA_OPTIONS}'"
CLUSTER = {
    "cores.max": 2,
    "driver.bindAddress": "127.0.0.1",
    "driver.host": "127.0.0.1",
    "executor.cores": 1,
    "executor.extraJavaOptions": JAVA,
    "executor.memory": "512m",
    "executorEnv.PYTHONPATH": ROOT,
    "task.maxFailures": 40,  # executors are killed on purpose
}


class Job:
    """The job; all its processes are in its session, and only they."""

    def __init__(self, command: Sequence[str], master: str = "local[2]", driver_memory: str = "1g") -> None:
        settings: dict[str, object] = {"driver.extraJavaOptions": JAVA, "ui.enabled": "false"}
        settings |= {"driver.memory": driver_memory} | (CLUSTER if master.startswith("spark:") else {})
        arguments = " ".join(f"--conf spark.{name}={value}" for name, value in settings.items())
        submitted = {"PYSPARK_SUBMIT_ARGS": f"--master {master} {arguments} pyspark-shell"}
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env=os.environ | submitted,
        )
        self._last: deque[str] = deque(maxlen=60)

    def line(self) -> str:
        """Return the next line that it says, or step of Spark's progress; nothing at its end."""
        assert self.process.stdout is not None
        self._last.append(self.process.stdout.readline())
        return self._last[-1]

    @property
    def said(self) -> str:
        """What it said last."""
        return "".join(self._last)

    def kill_all(self) -> None:
        """End driver, JVM and tasks as `kill -9` does."""
        kill_session(self.process.pid)
        self.close()

    def kill_a_task(self, chance: random.Random) -> bool:
        """End one Python that runs tasks; false when none runs just now."""
        tasks = [pid for pid in session_pids(self.process.pid) if "pyspark.daemon" in _command_of(pid)]
        children = [pid for pid in tasks if _parent_of(pid) in tasks]  # the first one only forks
        return bool(children) and _kill(chance.choice(children))

    def close(self) -> int:
        """Wait for the end, and return the exit code."""
        code = self.process.wait(END_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


def kill_an_executor(workers: Sequence[Server], chance: random.Random) -> bool:
    """End one of the processes that workers of a cluster run; false when there is none just now."""
    tasks = [path for worker in workers for path in Path(f"/proc/{worker.pid}/task").glob("*/children")]
    children = [int(pid) for path in tasks for pid in path.read_text().split()]
    executors = [pid for pid in children if _state_of(pid) not in ("", "Z")]  # a dead one stays until it is waited for
    return bool(executors) and _kill(chance.choice(executors))


def _kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def _parent_of(pid: int) -> int:
    fields = _fields_of(pid)
    return int(fields[1]) if fields else -1


def _state_of(pid: int) -> str:
    fields = _fields_of(pid)
    return fields[0] if fields else ""


def _fields_of(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; none when there is no such process any more."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
