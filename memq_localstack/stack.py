"""Starts, inspects and stops all servers of one state folder, from any process that knows the folder."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from memq_localstack import LocalstackError
from memq_localstack.launch import Server
from memq_localstack.s3 import BUCKET, preferred
from memq_localstack.servers import S3Server, start_broker, start_kafka, start_s3, start_zookeeper

NAME = "memq.toml"


def write_settings(folder: Path) -> Path | None:
    """Write the file and return its path; None while one of the servers never was up.

    Only its owner may read it: it has the keys of the bucket.
    """
    s3, zookeeper, kafka = (
        S3Server.load(folder / "s3"),
        Server.load(folder / "zookeeper"),
        Server.load(folder / "kafka"),
    )
    if s3 is None or zookeeper is None or kafka is None:
        return None
    path = folder / NAME
    path.touch(mode=0o600)
    path.write_text(
        f"""# Written by memq-localstack; memq broker --config {path}
store = "s3://{BUCKET}?endpoint={s3.endpoint}&region={s3.region}"
queue = "kafka://{kafka.address}"
coordinator = "zookeeper://{zookeeper.address}/memq"

[s3]
access_key_id = "{s3.access_key}"
secret_access_key = "{s3.secret_key}"

[kafka]
replication_factor = 1

[zookeeper]
session_timeout_ms = 3000
""",
        encoding="utf-8",
    )
    return path


def _start_s3(folder: Path, port: int) -> Server:
    """Start the S3 server whose data lie there; on a new folder the preferred one."""
    return start_s3(folder, port, server="" if (folder / "server.json").exists() else preferred())


# In the order of start; the way down is the other way round.
STARTS: dict[str, Callable[[Path, int], Server]] = {
    "s3": _start_s3,
    "zookeeper": start_zookeeper,
    "kafka": start_kafka,
}
BROKER = "broker-"
HANDLES: dict[str, type[Server]] = {"s3": S3Server, "zookeeper": Server, "kafka": Server}


@dataclass(frozen=True, slots=True)
class Found:
    """One server as it was found."""

    name: str
    server: Server
    began: bool = False  # by this very call

    @property
    def state(self) -> str:
        """`runs`, or `dead` for one that ended without being told to."""
        return "runs" if self.server.running else "dead"


def state_folder() -> Path:
    """Return the state folder that is used when none is named: memq-localstack in the user's state folder."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "memq-localstack"


def up(folder: Path, ports: Mapping[str, int], brokers: int = 0) -> Iterator[Found]:
    """Start the servers that `ports` names and so many brokers on them; yield each when it is ready.

    One that runs is left as it is, a dead one is started again on its data. Port 0 is a free one, or that of the last
    time. The brokers' settings are written to `memq.toml`.

    Raises:
        LocalstackError: one did not start; those before it stay up. Brokers need all three servers.
    """
    with _alone(folder):
        for name, port in ports.items():
            server = HANDLES[name].load(folder / name)
            if server is not None and server.running:
                if port not in (0, server.launch.ports[0]):
                    raise LocalstackError(f"{name} runs at {server.address}, not at port {port}", hint="stop it first")
                yield Found(name, server)
            else:
                yield Found(name, STARTS[name](folder / name, port), began=True)
        config = write_settings(folder)
        for name in [f"{BROKER}{number}" for number in range(1, brokers + 1)]:
            server = Server.load(folder / name)
            if server is not None and server.running:
                yield Found(name, server)
            elif config is None:
                raise LocalstackError(f"{name} needs {', '.join(STARTS)}", hint="start them all")
            else:
                yield Found(name, start_broker(folder / name, config, name), began=True)


def status(folder: Path) -> list[Found]:
    """Return the servers that are up, or should be."""
    loaded = [(name, HANDLES.get(name, Server).load(folder / name)) for name in _names(folder)]
    return [Found(name, server) for name, server in loaded if server is not None and server.pid]


def down(folder: Path, *, purge: bool = False) -> Iterator[Found]:
    """Stop the servers, the last first; yield each as it was before. `purge` deletes their data, too."""
    with _alone(folder):
        for found in reversed(status(folder)):
            yield found
            found.server.stop()
        if purge:
            for name in _names(folder):
                shutil.rmtree(folder / name, ignore_errors=True)
            (folder / NAME).unlink(missing_ok=True)


def _names(folder: Path) -> list[str]:
    """Return what may have been started in the folder, in the order of start."""
    numbers = [path.name.removeprefix(BROKER) for path in folder.glob(f"{BROKER}*")]
    return [*STARTS, *(f"{BROKER}{number}" for number in sorted(map(int, filter(str.isdecimal, numbers))))]


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let one command change the folder at a time; the next one waits."""
    folder.mkdir(0o700, parents=True, exist_ok=True)  # it has the keys of the store
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
