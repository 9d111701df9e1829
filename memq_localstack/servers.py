"""Starts real servers on this machine and returns handles, for tests, demos and the command line.

    with start_kafka(folder / "kafka") as kafka, start_s3(folder / "s3") as s3:
        ...  # kafka.address, s3.endpoint, s3.access_key, s3.secret_key

Every server keeps its data, settings and log in its own folder and listens on the loopback address only. A handle can
`stop`, `kill` (SIGKILL), `pause`, `resume` and `restart` on the same data and port; leaving the `with` block stops it.
"""

from __future__ import annotations

import http.client
import ssl
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from memq_localstack import LocalstackError, kafka, s3, zookeeper
from memq_localstack.launch import Launch, NotReadyError, Server
from memq_localstack.ports import HOST, free_ports, is_free
from memq_localstack.s3 import ADMIN, Identity, signed_headers

__all__ = [
    "ADMIN",
    "Identity",
    "LocalstackError",
    "S3Server",
    "Server",
    "start_broker",
    "start_kafka",
    "start_s3",
    "start_zookeeper",
]

PORT_TRIES_MAX = 5
DRAIN_TIMEOUT_S = 60.0  # a broker stores and acks what it holds; a store that is slow makes that long
REQUEST_TIMEOUT_S = 30


class S3Server(Server):
    """A handle on an S3 server, with what a client needs."""

    @property
    def endpoint(self) -> str:
        """The URL of the server; buckets are addressed by path."""
        return f"{self.launch.details['scheme']}://{self.address}"

    @property
    def access_key(self) -> str:
        """The key id of the identity that may do everything."""
        return self.launch.details["access_key"]

    @property
    def secret_key(self) -> str:
        """The secret of that identity."""
        return self.launch.details["secret_key"]

    @property
    def region(self) -> str:
        """The region that requests are signed for."""
        return s3.REGION

    def create_bucket(self, name: str) -> None:
        """Make a bucket; one that is there is fine."""
        headers = signed_headers(
            "PUT",
            self.address,
            f"/{name}",
            access_key=self.access_key,
            secret_key=self.secret_key,
            region=self.region,
            now=datetime.now(UTC),
        )
        connection = self._connection()
        try:
            connection.request("PUT", f"/{name}", headers=headers)
            answer = connection.getresponse()
            said = answer.read().decode(errors="replace")
        finally:
            connection.close()
        if answer.status not in (200, 409):
            raise LocalstackError(f"{self.endpoint} made no bucket {name!r}: {answer.status} {said}")

    def _connection(self) -> http.client.HTTPConnection:
        if self.endpoint.startswith("http:"):
            return http.client.HTTPConnection(self.address, timeout=REQUEST_TIMEOUT_S)
        own = ssl._create_unverified_context()  # noqa: S323 - it is our own server, of any name, on the loopback address
        return http.client.HTTPSConnection(self.address, timeout=REQUEST_TIMEOUT_S, context=own)


Handle = TypeVar("Handle", bound=Server)


def start_kafka(
    folder: Path, port: int = 0, *, settings: Mapping[str, str] | None = None, java_options: Sequence[str] = ()
) -> Server:
    """Start Kafka 4.1 on a folder and wait until it serves; about 4 s.

    Args:
        folder: its data, settings and log; with data in it, Kafka goes on with them.
        port: of the clients; 0 draws a free one, or takes again the one that was used on this folder.
        settings: Kafka's own, over those of `memq_localstack.kafka`; `{port}`, `{controller_port}` and `{data}` are
            replaced.
        java_options: for the virtual machine, over those of `memq_localstack.kafka`, which keep it small.

    Raises:
        LocalstackError: no Java, no jars, a port that is taken, or Kafka ended; the message has the end of its log.
    """
    absolute = folder.absolute()
    return _start(
        Server, folder, port, kafka.PORTS, lambda ports: kafka.launch(absolute, ports, settings or {}, java_options)
    )


def start_zookeeper(folder: Path, port: int = 0, *, settings: Mapping[str, str] | None = None) -> Server:
    """Start ZooKeeper 3.9 on a folder and wait until it serves; about a second. Arguments and errors as of Kafka."""
    absolute = folder.absolute()
    return _start(
        Server, folder, port, zookeeper.PORTS, lambda ports: zookeeper.launch(absolute, ports, settings or {})
    )


def start_s3(
    folder: Path,
    port: int = 0,
    *,
    server: str = "",
    buckets: Sequence[str] = (s3.BUCKET,),
    identities: Sequence[Identity] = (ADMIN,),
    certificate: tuple[Path, Path] | None = None,
    arguments: Sequence[str] = (),
) -> S3Server:
    """Start an S3 server on a folder, wait until it serves, and make the buckets; about 2 s.

    Args:
        folder: its data, settings and log; with data in it, it goes on with them.
        port: of the clients; 0 draws a free one, or takes again the one that was used on this folder.
        server: `seaweedfs`, `versitygw`; by default the one whose data the folder holds, SeaweedFS when it is new.
        buckets: are made when they are not there.
        identities: who may do what; the first must be allowed to make buckets, and the handle has its keys.
        certificate: files of a certificate and its key, PEM: it serves HTTPS alone then.
        arguments: more of the server's own (`weed server -h`, `versitygw --help`).

    Raises:
        LocalstackError: it is not installed, a port is taken, or it ended; the message has the end of its log.
    """
    before = S3Server.load(folder.absolute())
    held = before.launch.details["server"] if before is not None else server or "seaweedfs"
    if server not in ("", held):
        raise LocalstackError(f"{folder} holds the data of {held}, not of {server}", hint="take another folder")
    launch, count = s3.LAUNCHES[held]
    order = s3.Order(folder.absolute(), identities, certificate, arguments)
    handle = _start(S3Server, folder, port, count, lambda ports: launch(order, ports))
    try:
        for name in buckets:
            handle.create_bucket(name)
    except BaseException:
        handle.kill()
        raise
    return handle


def start_broker(folder: Path, config: Path, name: str, port: int = 0, *, arguments: Sequence[str] = ()) -> Server:
    """Start the broker `name` of a cluster and wait until it serves.

    Args:
        folder: its log; a broker has no data of its own.
        config: the settings file of the cluster, as `memq_localstack.stack` writes it.
        name: its id in the cluster.
        port: of the clients; 0 draws a free one, or takes again the one that was used on this folder.
        arguments: more of `memq broker`.

    Raises:
        LocalstackError: a port is taken, or it ended; the message has the end of its log.
    """
    command = [sys.executable, "-m", "memq", "broker", "--config", str(config), "--broker-id", name]
    command += ["--spool", str(config.parent / name / "spool"), "--host", HOST]

    def launch(ports: list[int]) -> Launch:
        return Launch(
            kind=name,
            command=(*command, "--port", str(ports[0]), "--http-port", "-1", *arguments),
            address=f"{HOST}:{ports[0]}",
            ports=tuple(ports),
            ready=("memq ready: ",),
            stop_timeout_s=DRAIN_TIMEOUT_S,
        )

    return _start(Server, folder, port, 1, launch)


def _start(kind: type[Handle], folder: Path, port: int, count: int, launch: Callable[[list[int]], Launch]) -> Handle:
    """Start a server on ports that nobody has; when another was quicker at one of them, on others.

    `port` 0 prefers the ports that the server had on this folder before: clients may still know them.
    """
    folder = folder.absolute()
    before = kind.load(folder)
    if before is not None and before.running:
        raise LocalstackError(f"a server runs on {folder} already, at {before.address}", hint="stop it first")
    for attempt in range(PORT_TRIES_MAX):
        if attempt == 0 and before is not None and port in (0, before.launch.ports[0]) and _all_free(before.launch):
            ports = list(before.launch.ports)
        else:
            ports = [port, *free_ports(count - 1)] if port else free_ports(count)
        try:
            return kind(folder, launch(ports)).start()
        except NotReadyError as error:
            if not error.port_taken or attempt == PORT_TRIES_MAX - 1:
                raise
    raise AssertionError("the last try raised")


def _all_free(launch: Launch) -> bool:
    return all(map(is_free, launch.ports))
