"""`memq dev` as a real process: started on a folder, waited for by its ready line, ended by its process id."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from localstack import guard
from localstack.ports import free_ports
from localstack.processes import identity_of

END_TIMEOUT_S = 60.0
NO_DASHBOARD = ("--dashboard-port", "-1")


class DevServer:
    """One folder on which `memq dev` runs, again and again; the port stays after the first start."""

    def __init__(self, data: Path, *options: str, http: bool = False) -> None:
        self.data = data
        (self.port,) = free_ports(1)  # one that no client's connection is given while the server is down
        self.log = data.parent / f"{data.name}.log"
        self._options = options
        self._http = ["--http-port", "0" if http else "-1", *([] if "--dashboard-port" in options else NO_DASHBOARD)]
        self._process: subprocess.Popen[str] | None = None

    @property
    def address(self) -> str:
        """Where clients connect."""
        return f"127.0.0.1:{self.port}"

    @property
    def process(self) -> subprocess.Popen[str]:
        """The process that runs."""
        assert self._process is not None, "the server was not started"
        return self._process

    def objects_of(self, topic: str) -> list[Path]:
        """Return the files of a topic's own objects; reports to the audit lie in shared ones."""
        found = (self.data / "objects").glob(f"*/topics/{topic}/**/*")
        return sorted(path for path in found if path.is_file())

    def start(self) -> None:
        """Start and wait for the ready line."""
        command = [sys.executable, "-m", "memq.cli", "dev", "--data", str(self.data), "--port", str(self.port)]
        with self.log.open("a") as log:
            self._process = subprocess.Popen(
                [*command, *self._http, *self._options], stdout=subprocess.PIPE, stderr=log, text=True
            )
        guard.watch(identity_of(self._process.pid))
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line.startswith("memq ready: "), f"no ready line but {line!r}; log:\n{self.log.read_text()}"
        self.port = int(line.rsplit(":", 1)[1])

    def kill(self) -> None:
        """End it as `kill -9` does."""
        self.process.kill()
        self.wait()

    def signal(self, number: int = signal.SIGTERM) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def wait(self) -> int:
        """Wait for the end and return the exit code."""
        code = self.process.wait(END_TIMEOUT_S)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return code

    def close(self) -> None:
        """End what still runs."""
        if self._process is not None and self._process.returncode is None:
            self.kill()


@contextmanager
def dev_server(data: Path, *options: str, http: bool = False) -> Iterator[DevServer]:
    """Run `memq dev` on a folder for a test."""
    server = DevServer(data, *options, http=http)
    try:
        server.start()
        yield server
    finally:
        server.close()
