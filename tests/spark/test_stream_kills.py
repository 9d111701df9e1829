"""Streaming reads and writes whose driver and whose tasks are killed with SIGKILL lose no row and double none."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import memq
from tests.servers import DevServer
from tests.soak import repetitions, report
from tests.spark.topics import make_topic, numbers, send, values_of

KILLS = repetitions(few=1, many=20)  # of the driver, and as many of tasks
RECORDS = 2_000 * KILLS
END_S = 600


class Job:
    """The job in a session of its own, so that all its processes are known, and only they."""

    def __init__(self, broker: DevServer, topic: str, folder: Path) -> None:
        self._log = (folder / "job.log").open("a")
        command = [sys.executable, "-m", "tests.spark.streaming_job", broker.address, topic, str(folder)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self._log, text=True, start_new_session=True
        )

    def line(self) -> str:
        """Return the next line that it says; nothing when it has ended."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill_all(self) -> None:
        """End driver, JVM and tasks as `kill -9` does."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.close()

    def kill_a_task(self, chance: random.Random) -> bool:
        """End one Python that runs tasks; false when none runs just now."""
        tasks = [pid for pid in self._pids() if "pyspark.daemon" in _command_of(pid)]
        children = [pid for pid in tasks if _parent_of(pid) in tasks]  # the first one only forks
        if not children:
            return False
        try:
            os.kill(chance.choice(children), signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def close(self) -> None:
        """Wait for the end."""
        self.process.wait(END_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._log.close()

    def _pids(self) -> list[int]:
        found = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
        return [pid for pid in found if _session_of(pid) == self.process.pid]


def _session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return -1


def _command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def _parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return -1


@pytest.mark.soak
def test_kills_lose_and_double_nothing(spark: SparkSession, broker: DevServer, tmp_path: Path) -> None:
    chance = random.Random(RECORDS)
    make_topic(broker.address, "killed", partitions=3)
    make_topic(broker.address, "killed-copy", partitions=2)
    for first in range(0, RECORDS, 500):
        send(broker.address, "killed", numbers(first, first + 500))
    drivers = tasks = 0
    while True:
        job = Job(broker, "killed", tmp_path)
        wait = chance.randrange(1, 4)  # micro-batches
        while (line := job.line()) not in ("", "all read"):
            wait -= 1
            if tasks < KILLS and job.kill_a_task(chance):
                tasks += 1
            elif wait <= 0 and drivers < KILLS:
                drivers += 1
                job.kill_all()
                break
        else:
            job.close()
            assert line == "all read", f"the job ended by itself:\n{(tmp_path / 'job.log').read_text()[-4_000:]}"
            break
    report(f"streaming read: {drivers} drivers and {tasks} tasks killed over {RECORDS} records")
    assert drivers == KILLS
    assert values_of(spark.read.parquet(str(tmp_path / "out"))) == list(range(RECORDS))
    with memq.Consumer(broker.address, ["killed-copy"], start="beginning", end="end") as consumer:
        copied = sorted(int(value or b"") for batch in consumer for value in batch.values())
    assert copied == list(range(RECORDS))
