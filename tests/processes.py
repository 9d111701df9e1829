"""The brokers of one cluster as real processes, on real servers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from memq_localstack.s3 import BUCKET
from memq_localstack.servers import S3Server, Server
from tests.memq_process import BrokerServer

SESSION_TIMEOUT_MS = 1_500
_BEHIND = """
import sys, time
from memq.runtime.clock import SystemClock
SystemClock.wall_ms = lambda self: time.time_ns() // 1_000_000 - {}
from memq.cli import main
sys.exit(main())
"""


class BrokerProcess(BrokerServer):
    """`memq broker` under one id."""

    def __init__(self, config: Path, name: str, *, behind_ms: int = 0, http: bool = False, log: str = "") -> None:
        """`behind_ms`: how far the wall clock of the process is behind. `http`: its log names an HTTP port."""
        super().__init__(config.parent / (log or f"{name}.log"))
        self.config = config
        self.name = name
        self.behind_ms = behind_ms
        self.spool = config.parent / f"{name}-spool"
        self._options = ["--config", str(config), "--broker-id", name, "--http-port", "0" if http else "-1"]

    def command(self) -> list[str]:
        """Return what Python is given to start it."""
        start = ["-c", _BEHIND.format(self.behind_ms)] if self.behind_ms else ["-m", "memq"]
        return [*start, "broker", *self._options, "--port", str(self.port), "--spool", str(self.spool)]


_QUICK = """
import sys
from memq.state_log import state_log
state_log.SNAPSHOT_S = 1.0
from memq.cli import main
sys.exit(main())
"""


class SavingBrokerProcess(BrokerProcess):
    """A broker with a snapshot of each state log soon after its first decision."""

    def command(self) -> list[str]:
        """Return what Python is given to start it."""
        return ["-c", _QUICK, *super().command()[2:]]


@contextmanager
def broker_processes(
    folder: Path,
    zookeeper: Server,
    kafka: Server,
    s3: S3Server,
    *,
    count: int = 3,
    top: str = "",
    session_timeout_ms: int = SESSION_TIMEOUT_MS,
    kind: type[BrokerProcess] = BrokerProcess,
    **session: str,
) -> Iterator[list[BrokerProcess]]:
    """Run brokers on real servers, with objects, topics and nodes of their own there; all are ended.

    `top`: more settings, before all sections; `session`: more of the section `[zookeeper]`.
    """
    config = folder / "memq.toml"
    config.write_text(top + settings_text(folder, zookeeper, kafka, s3, session, session_timeout_ms))
    brokers = [kind(config, f"b{number + 1}") for number in range(count)]
    try:
        for broker in brokers:
            broker.launch()
        for broker in brokers:
            broker.become_ready()
        yield brokers
    finally:
        for broker in brokers:
            broker.close()


def settings_text(
    folder: Path,
    zookeeper: Server,
    kafka: Server,
    s3: S3Server,
    session: Mapping[str, str],
    session_timeout_ms: int = SESSION_TIMEOUT_MS,
) -> str:
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
        session_timeout_ms = {session_timeout_ms}
        {more}
        """


def path_of(folder: Path) -> str:
    """Return the node below which a cluster lies in ZooKeeper."""
    return f"/{folder.parent.name}/{folder.name}"
