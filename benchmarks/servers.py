"""The real servers that the rows of a cluster run on: Kafka, ZooKeeper, S3, and a broker of memq for each store."""

from __future__ import annotations

import http.client
import os
import re
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path

from benchmarks.child import Child, cpu_s, pss_bytes
from benchmarks.concurrent_runs import ConcurrentRuns
from memq_localstack.ports import HOST, free_ports
from memq_localstack.s3 import BUCKET, preferred
from memq_localstack.servers import S3Server, Server, start_broker, start_kafka, start_s3, start_zookeeper

# What Kafka's own start script gives its virtual machine, over what localstack takes to keep it small.
KAFKA_JAVA = (
    "-Xms1g", "-Xmx1g", "-XX:TieredStopAtLevel=4", "-XX:-UseSerialGC", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20",
    "-XX:InitiatingHeapOccupancyPercent=35", "-XX:+ExplicitGCInvokesConcurrent",
)  # fmt: skip
KAFKA_SETTINGS = {"log.segment.delete.delay.ms": "100"}  # what a row deletes goes at once, not after a minute
REQUEST_TIMEOUT_S = 30


class Process:
    """A server whose CPU and memory are read from the kernel."""

    def __init__(self, server: Server) -> None:
        self.server = server

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return self.server.address

    def cpu_s(self) -> float:
        """Return the CPU seconds that the process has used."""
        return cpu_s(self.server.pid)

    def memory_bytes(self) -> int:
        """Return the memory that the process alone is charged for (PSS)."""
        return pss_bytes(self.server.pid)


class Broker(Process):
    """A broker of memq, whose counters can be read."""

    def __init__(self, server: Server, http_port: int) -> None:
        super().__init__(server)
        self._metrics_address = f"{HOST}:{http_port}"

    def counter(self, name: str) -> float:
        """Return a counter of `/metrics`, over all its labels."""
        connection = http.client.HTTPConnection(self._metrics_address, timeout=REQUEST_TIMEOUT_S)
        try:
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
        finally:
            connection.close()
        found = re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
        if not found:
            raise RuntimeError(f"the broker at {self.address} counts no {name}")
        return sum(map(float, found))


class RealServers(ConcurrentRuns):
    """One Kafka, which is the peer and holds memq's pointers, one ZooKeeper, one S3 server, and the brokers.

    Leaving the `with` block ends them all and removes their data. `s3_environment` has what clients need to read.
    """

    def __init__(self, *stores: str) -> None:
        """`stores` are the kinds of store that get a broker: `files`, `s3`."""
        with ExitStack() as stack:
            self._stack = stack
            folder = tempfile.TemporaryDirectory(prefix="memq-bench-", ignore_cleanup_errors=True)
            self.folder = Path(stack.enter_context(folder))
            s3_folder, kafka_folder = self.folder / "s3", self.folder / "kafka"
            self._s3: S3Server = stack.enter_context(start_s3(s3_folder, server=preferred()))
            self._zookeeper = stack.enter_context(start_zookeeper(self.folder / "zookeeper"))
            kafka = start_kafka(kafka_folder, settings=KAFKA_SETTINGS, java_options=KAFKA_JAVA)
            self.kafka = Process(stack.enter_context(kafka))
            self.s3 = Process(self._s3)
            self.s3_environment = {
                "MEMQ_S3_TRUSTED_ENDPOINTS": self._s3.endpoint,
                "AWS_ACCESS_KEY_ID": self._s3.access_key,
                "AWS_SECRET_ACCESS_KEY": self._s3.secret_key,
                "AWS_DEFAULT_REGION": self._s3.region,
            }
            self.brokers = {store: self._broker(store) for store in stores}
            self._stack = stack.pop_all()

    @property
    def s3_kind(self) -> str:
        """Which S3 server it is."""
        return self._s3.launch.details["server"]

    @property
    def s3_address(self) -> dict[str, str]:
        """Where the bucket is."""
        return {"bucket": BUCKET, "endpoint": self._s3.endpoint, "region": self._s3.region}

    @property
    def s3_url(self) -> str:
        """The bucket, as a store's URL."""
        return f"s3://{BUCKET}?endpoint={self._s3.endpoint}&region={self._s3.region}"

    def client(self, kind: str, address: str) -> Child:
        """Start a client process; it ends with the servers."""
        return self._stack.enter_context(Child(kind, environment=self.s3_environment, address=address))

    def child(self, kind: str, **options: object) -> Child:
        """Start a child that needs no address of its own; it ends with the servers."""
        return self._stack.enter_context(Child(kind, environment=self.s3_environment, **options))

    def drop_files(self, topic: str) -> None:
        """Delete a topic's objects from the folder of the store `files`."""
        shutil.rmtree(self.folder / "objects" / "bench-files" / "topics" / topic)

    def _broker(self, store: str) -> Broker:
        """Start a cluster of one broker, with names of its own in ZooKeeper and Kafka."""
        url = self.s3_url if store == "s3" else f"file:{self.folder / 'objects'}"
        config = self.folder / f"{store}.toml"
        config.touch(mode=0o600)
        config.write_text(
            f'store = "{url}"\nqueue = "kafka://{self.kafka.address}"\ncluster = "bench-{store}"\n'
            f'coordinator = "zookeeper://{self._zookeeper.address}/bench-{store}"\nlog_level = "warning"\n'
            f'[kafka]\nprefix = "bench-{store}."\nreplication_factor = 1\n'
            f'[s3]\naccess_key_id = "{self._s3.access_key}"\nsecret_access_key = "{self._s3.secret_key}"\n',
            encoding="utf-8",
        )
        (http_port,) = free_ports(1)
        arguments = ("--http-port", str(http_port))
        server = start_broker(self.folder / f"broker-{store}", config, f"{store}-1", arguments=arguments)
        return Broker(self._stack.enter_context(server), http_port)


def load() -> float:
    """Return how many processes wanted a core within the last minute: what other work the figures suffered."""
    return os.getloadavg()[0]
