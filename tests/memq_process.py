"""A serving command of memq as a real process: waits for its ready line, ends it by its process id."""

from __future__ import annotations

import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from pathlib import Path

from memq.cli.run import TIMED_OUT, UNREACHABLE
from memq.runtime.clock import SystemClock
from memq_localstack import guard
from memq_localstack.ports import free_ports
from memq_localstack.processes import identity_of

CLOCK = SystemClock()
END_TIMEOUT_S = 60.0
START_S = 300.0  # a third of the time limit of a test that has servers
REFUSALS = (UNREACHABLE, TIMED_OUT)


class MemqProcess(ABC):
    """Runs again and again; what it says on stderr, of all runs, is in `log`."""

    ready = "memq ready: "  # how the line begins that tells of it

    def __init__(self, log: Path) -> None:
        self.log = log
        self._process: subprocess.Popen[str] | None = None

    @abstractmethod
    def command(self) -> list[str]:
        """Return what Python is given to start it."""

    def environment(self) -> dict[str, str] | None:
        """Return its environment; None for this process's own."""
        return None

    @property
    def process(self) -> subprocess.Popen[str]:
        """The process that runs."""
        assert self._process is not None, f"it was not started; its log would be {self.log}"
        return self._process

    def start(self) -> None:
        """Start and wait until it is ready."""
        self.launch()
        self.wait_ready()

    def launch(self) -> None:
        """Start; until it is ready, `wait_ready` is the only thing to do with it."""
        with self.log.open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, *self.command()],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self.environment(),
            )
        guard.watch(identity_of(self._process.pid))

    def wait_ready(self) -> str:
        """Wait for the ready line, and return what it tells."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith(self.ready), f"no ready line but {line!r}; log:\n{self.log.read_text()}"
        return line.removeprefix(self.ready).strip()

    def become_ready(self, limit_s: float = START_S) -> None:
        """Wait until it is ready; start it again, as a service manager does, if its servers did not answer in time.

        On a busy machine Kafka and ZooKeeper may have no turn for longer than a start waits for them.
        """
        until_s = CLOCK.monotonic() + limit_s
        while True:
            assert self.process.stdout is not None
            line = self.process.stdout.readline()
            if line.startswith(self.ready):
                return
            code = self.wait()
            again = code in REFUSALS and CLOCK.monotonic() < until_s
            assert again, f"no ready line but {line!r}, and exit code {code}; log:\n{self.log.read_text()}"
            self.launch()

    def kill(self) -> None:
        """End it as `kill -9` does."""
        self.process.kill()
        self.wait()

    def signal(self, number: int = signal.SIGTERM) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def stop(self) -> int:
        """Drain it and return its exit code."""
        self.signal()
        return self.wait()

    def pause(self) -> None:
        """Stop its clock, so to speak."""
        found = identity_of(self.process.pid)
        assert found is not None, "it does not run"
        assert found.pause(), "it runs on"

    def resume(self) -> None:
        """Let it continue."""
        self.signal(signal.SIGCONT)

    def wait(self) -> int:
        """Wait for the end and return the exit code."""
        code = self.process.wait(END_TIMEOUT_S)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return code

    def close(self) -> None:
        """End what still runs."""
        if self._process is not None and self._process.returncode is None:
            self.resume()
            self.kill()


class BrokerServer(MemqProcess):
    """One that clients connect to: its port stays from one start to the next."""

    def __init__(self, log: Path) -> None:
        super().__init__(log)
        (self.port,) = free_ports(1)  # one that no client's connection is given while the server is down

    @property
    def address(self) -> str:
        """Where clients connect."""
        return f"127.0.0.1:{self.port}"


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `memq` with some arguments to its end."""
    line = [sys.executable, "-m", "memq", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
