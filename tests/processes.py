"""Brokers of one cluster as real processes: each waited for by its ready line, ended by its own process id."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

END_TIMEOUT_S = 60.0
SESSION_TIMEOUT_MS = 1_500


class BrokerProcess:
    """`memq broker` under one id; started again it listens on the same port."""

    def __init__(self, config: Path, name: str) -> None:
        self.name = name
        self.port = 0
        self.log = config.parent / f"{name}.log"
        self._config = config
        self._process: subprocess.Popen[str] | None = None

    @property
    def address(self) -> str:
        """Where clients connect."""
        return f"127.0.0.1:{self.port}"

    @property
    def process(self) -> subprocess.Popen[str]:
        """The process that runs."""
        assert self._process is not None, f"{self.name} was not started"
        return self._process

    def start(self) -> None:
        """Start and wait for the ready line."""
        options = ["--broker-id", self.name, "--port", str(self.port), "--http-port", "-1"]
        command = [sys.executable, "-m", "memq.cli", "broker", "--config", str(self._config), *options]
        with self.log.open("a") as log:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line.startswith("memq ready: "), f"no ready line but {line!r}; log:\n{self.log.read_text()}"
        self.port = int(line.rsplit(":", 1)[1])

    def kill(self) -> None:
        """End it as `kill -9` does."""
        self.process.kill()
        self.wait()

    def stop(self) -> int:
        """Drain it and return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def pause(self) -> None:
        """Stop its clock, so to speak."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        self.process.send_signal(signal.SIGCONT)

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


@contextmanager
def broker_processes(folder: Path, zookeeper: str, count: int = 3, *, kafka: str = "") -> Iterator[list[BrokerProcess]]:
    """Run brokers on a store in `folder`, coordinated by a real ZooKeeper; all are ended.

    Without the address of a Kafka the queue is a SQLite file: enough where no broker is paused, for that one may hold
    the file's lock.
    """
    queue = f"kafka://{kafka}" if kafka else f"sqlite:{folder}/queue.sqlite"
    config = folder / "memq.toml"
    config.write_text(
        f"""
        store = "file:{folder}/objects"
        queue = "{queue}"
        coordinator = "zookeeper://{zookeeper}/{folder.parent.name}/{folder.name}"
        memory_bytes_max = "64MiB"
        [kafka]
        prefix = "{folder.name}."
        [zookeeper]
        session_timeout_ms = {SESSION_TIMEOUT_MS}
        """
    )
    brokers = [BrokerProcess(config, f"b{number + 1}") for number in range(count)]
    try:
        for broker in brokers:
            broker.start()
        yield brokers
    finally:
        for broker in brokers:
            broker.close()
