"""Brokers of one cluster as real processes: each waited for by its ready line, ended by its own process id."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from localstack import guard
from localstack.ports import free_ports
from localstack.processes import identity_of
from localstack.s3 import BUCKET
from localstack.servers import S3Server, Server

END_TIMEOUT_S = 60.0
SESSION_TIMEOUT_MS = 1_500
_BEHIND = """
import sys, time
from memq.clock import SystemClock
SystemClock.wall_ms = lambda self: time.time_ns() // 1_000_000 - {}
from memq.cli import main
sys.exit(main())
"""


class BrokerProcess:
    """`memq broker` under one id; started again it listens on the same port."""

    def __init__(self, config: Path, name: str, *, behind_ms: int = 0, http: bool = False) -> None:
        """`behind_ms`: how far the wall clock of the process is behind. `http`: its log names an HTTP port."""
        self.name = name
        self.behind_ms = behind_ms
        self._http_port = "0" if http else "-1"
        (self.port,) = free_ports(1)  # one that no client's connection is given while the broker is down
        self.log = config.parent / f"{name}.log"
        self.spool = config.parent / f"{name}-spool"
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
        """Start and wait until clients can come."""
        self.launch()
        self.wait_ready()

    def launch(self) -> None:
        """Start; until it is ready, `wait_ready` is the only thing to do with it."""
        options = ["--broker-id", self.name, "--port", str(self.port), "--spool", str(self.spool)]
        options += ["--http-port", self._http_port]
        start = ["-c", _BEHIND.format(self.behind_ms)] if self.behind_ms else ["-m", "memq.cli"]
        command = [sys.executable, *start, "broker", "--config", str(self._config), *options]
        with self.log.open("a") as log:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        guard.watch(identity_of(self._process.pid))

    def wait_ready(self) -> None:
        """Wait for the ready line."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
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
def broker_processes(
    folder: Path, zookeeper: Server, kafka: Server, s3: S3Server, *, count: int = 3, top: str = "", **session: str
) -> Iterator[list[BrokerProcess]]:
    """Run brokers on real servers, with objects, topics and nodes of their own there; all are ended.

    `top`: more settings, before all sections; `session`: more of the section `[zookeeper]`.
    """
    config = folder / "memq.toml"
    config.write_text(top + settings_text(folder, zookeeper, kafka, s3, session))
    brokers = [BrokerProcess(config, f"b{number + 1}") for number in range(count)]
    try:
        for broker in brokers:
            broker.launch()
        for broker in brokers:
            broker.wait_ready()
        yield brokers
    finally:
        for broker in brokers:
            broker.close()


def settings_text(folder: Path, zookeeper: Server, kafka: Server, s3: S3Server, session: Mapping[str, str]) -> str:
    """Return the settings of a cluster whose name on the servers is that of the folder."""
    more = "\n".join(f'{name} = "{value}"' for name, value in session.items())
    return f"""
        store = "s3://{BUCKET}/{folder.name}?endpoint={s3.endpoint}&region={s3.region}"
        queue = "kafka://{kafka.address}"
        coordinator = "zookeeper://{zookeeper.address}{path_of(folder)}"
        memory_bytes_max = "64MiB"
        [s3]
        access_key_id = "{s3.access_key}"
        secret_access_key = "{s3.secret_key}"
        [kafka]
        prefix = "{folder.name}."
        replication_factor = 1
        [zookeeper]
        session_timeout_ms = {SESSION_TIMEOUT_MS}
        {more}
        """


def path_of(folder: Path) -> str:
    """Return the node below which a cluster lies in ZooKeeper."""
    return f"/{folder.parent.name}/{folder.name}"
