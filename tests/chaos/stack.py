"""The servers and brokers of a chaos run, each behind links of its own, and the faults that strike them."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from memq.runtime.clock import SystemClock
from memq_localstack import s3
from memq_localstack.java import class_path, find_java, small
from memq_localstack.launch import Launch, Server
from memq_localstack.ports import HOST, free_ports
from memq_localstack.servers import S3Server, start_kafka, start_s3
from tests.chaos.links import Links
from tests.chaos.plan import BROKERS, KAFKAS, ZOOKEEPERS, Fault
from tests.memq_process import BrokerServer

SESSION_TIMEOUT_MS = 3_000
COME_BACK_S = 240.0  # on a busy machine a start takes a minute, and bad weather may refuse three
DRAIN_S = 240.0
SERVER_S = 300.0  # what a killed server may take to start again on a busy machine
REFUSALS = (1, 4, 5, 6)  # exit codes of a start that a part refused: failed, denied, unreachable, timeout
CLOCK = SystemClock()
SPOOL_MIB = 24  # of a broker's disk, where it has one of its own
PREFIX = "chaos."
TOPIC = {
    "delivery_timeout_ms": 30_000,
    "stale_publish_ms": 5_000,
    "dedup_window_ms": 80_000,
    "batch_age_ms_max": 50,
}
# libfaketime is no choice: under it time.sleep of Python 3.11 fails with EINVAL (clock_nanosleep until a moment).
_CLOCKED = """
import sys, time
try:
    from memq.runtime.clock import SystemClock
except ImportError:  # an earlier revision
    from memq.clock import SystemClock
seen = [-1.0, 0]
def wall_ms(self):
    if time.monotonic() - seen[0] > 0.05:
        seen[:] = time.monotonic(), int(open({clock!r}).read())
    return time.time_ns() // 1_000_000 + seen[1]
SystemClock.wall_ms = wall_ms
from memq.cli import main
sys.exit(main())
"""


class ChaosBroker(BrokerServer):
    """`memq broker` with links, a clock and a disk of its own; `tree` is the source tree that it runs from."""

    def __init__(self, folder: Path, name: str, advertise: int, config: Path, tree: Path) -> None:
        super().__init__(folder / f"{name}.log")
        self.name = name
        self.tree = tree
        self.config = config
        self.clock = folder / f"{name}.clock"
        self.spool = folder / f"{name}-disk"
        self._advertise = advertise
        self.spool.mkdir(exist_ok=True)
        self.step_clock(0.0)

    def command(self) -> list[str]:
        """Return what Python is given to start it."""
        return [
            "-c", _CLOCKED.format(clock=str(self.clock)), "broker",
            "--config", str(self.config), "--broker-id", self.name, "--host", HOST,
            "--port", str(self.port), "--advertise", f"{HOST}:{self._advertise}", "--http-port", "-1",
            "--spool", str(self.spool / "spool"),
        ]  # fmt: skip

    def environment(self) -> dict[str, str]:
        """Return the environment, with the source tree that it runs from; Python puts no folder before that one."""
        return {**os.environ, "PYTHONPATH": str(self.tree), "PYTHONSAFEPATH": "1"}

    def come_back(self) -> None:
        """Start again, as a supervisor does, until it is ready: a start in bad weather is refused with a reason."""
        until_s = CLOCK.monotonic() + COME_BACK_S
        while True:
            self.launch()
            assert self.process.stdout is not None
            if self.process.stdout.readline().startswith(self.ready):
                return
            code = self.wait()
            if code not in REFUSALS or CLOCK.monotonic() > until_s:
                raise AssertionError(f"{self.name} ended at its start with {code}: {self.log.read_text()[-600:]}")

    def step_clock(self, seconds: float) -> None:
        """Set the wall clock of the process off by so many seconds, at once."""
        draft = self.clock.with_suffix(".new")
        draft.write_text(f"{int(seconds * 1000)}\n")
        draft.replace(self.clock)

    @property
    def ballast(self) -> Path:
        """The file that fills its disk."""
        return self.spool / "ballast"


def mount(folder: Path) -> bool:
    """Give a folder a small file system of its own; False where that needs rights that this process lacks."""
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SPOOL_MIB}m", "none", str(folder)], capture_output=True, check=False
    )
    return done.returncode == 0


class Stack:
    """Three of each: Kafka, ZooKeeper, brokers; one S3 server. `before` is the tree that the brokers start from."""

    def __init__(self, folder: Path, seed: int, tree: Path, before: Path | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.links = Links(seed)
        self.tree = tree
        self.kafkas: dict[str, Server] = {}
        self.zookeepers: dict[str, Server] = {}
        self.brokers: dict[str, ChaosBroker] = {}
        self._before = before or tree
        self._mounted: list[Path] = []
        self._s3: S3Server | None = None
        self._lock = threading.Lock()

    @property
    def s3(self) -> S3Server:
        """The store's server."""
        assert self._s3 is not None, "not started"
        return self._s3

    @property
    def addresses(self) -> str:
        """Where clients begin: the brokers' links."""
        return ",".join(self.links[f"{name}:clients"].address for name in self.brokers)

    @property
    def bootstrap(self) -> str:
        """Kafka's addresses, by its links."""
        return ",".join(self.links[name].address for name in self.kafkas)

    def start(self) -> None:
        """Start everything and wait until it is ready."""
        self.links.start()
        with ThreadPoolExecutor(8) as pool:
            store = pool.submit(start_s3, self.folder / "s3", server=s3.preferred())
            kafkas, zookeepers = self.launch_kafkas(pool), self._launch_zookeepers(pool)
            self._s3 = store.result()
            for name, future in kafkas.items():
                self.kafkas[name] = future.result()
            for name, started in zookeepers.items():
                self.zookeepers[name] = started.result()
        for number in range(1, BROKERS + 1):
            self._add_broker(f"broker-{number}")
        for broker in self.brokers.values():
            broker.launch()
        for broker in self.brokers.values():
            broker.wait_ready()

    def launch_kafkas(self, pool: ThreadPoolExecutor) -> dict[str, Future[Server]]:
        """Start three Kafka nodes, each of which sends clients to its link."""
        ports = free_ports(3 * KAFKAS)
        voters = ",".join(f"{number + 1}@{HOST}:{ports[3 * number + 1]}" for number in range(KAFKAS))
        found = {}
        for number in range(KAFKAS):
            name, (port, controller, inner) = f"kafka-{number + 1}", ports[3 * number : 3 * number + 3]
            link = self.links.add(name, port)
            settings = {
                "node.id": str(number + 1),
                "controller.quorum.voters": voters,
                "listeners": f"CLIENT://{HOST}:{port},INNER://{HOST}:{inner},CONTROLLER://{HOST}:{controller}",
                "advertised.listeners": f"CLIENT://{link.address},INNER://{HOST}:{inner}",
                "listener.security.protocol.map": "CLIENT:PLAINTEXT,INNER:PLAINTEXT,CONTROLLER:PLAINTEXT",
                "inter.broker.listener.name": "INNER",
                "offsets.topic.replication.factor": "3",
                "default.replication.factor": "3",
                "min.insync.replicas": "2",
                "replica.lag.time.max.ms": "3000",
                "controller.quorum.election.timeout.ms": "1000",
                "controller.quorum.fetch.timeout.ms": "2000",
                "initial.broker.registration.timeout.ms": "240000",
            }
            found[name] = pool.submit(start_kafka, self.folder / name, port, settings=settings)
        return found

    def _launch_zookeepers(self, pool: ThreadPoolExecutor) -> dict[str, Future[Server]]:
        ports = free_ports(3 * ZOOKEEPERS)
        quorum = "".join(
            f"server.{number + 1}={HOST}:{ports[3 * number + 1]}:{ports[3 * number + 2]}\n"
            for number in range(ZOOKEEPERS)
        )
        found = {}
        for number in range(ZOOKEEPERS):
            name, port = f"zookeeper-{number + 1}", ports[3 * number]
            server = Server(self.folder / name, zookeeper_launch(self.folder / name, number + 1, port, quorum))
            found[name] = pool.submit(server.start)
        return found

    def _add_broker(self, name: str) -> None:
        config = self.folder / f"{name}.toml"
        store = self.links.add(f"{name}:s3", self.s3.launch.ports[0])
        nodes = [self.links.add(f"{name}:{each}", server.launch.ports[0]) for each, server in self.zookeepers.items()]
        config.write_text(f"""
            store = "s3://{s3.BUCKET}/chaos?endpoint=http://{store.address}&region={self.s3.region}"
            queue = "kafka://{self.bootstrap}"
            coordinator = "zookeeper://{",".join(node.address for node in nodes)}/chaos"
            memory_bytes_max = "64MiB"
            cluster = "chaos"
            log_level = "info"
            [s3]
            access_key_id = "{self.s3.access_key}"
            secret_access_key = "{self.s3.secret_key}"
            [kafka]
            prefix = "{PREFIX}"
            [zookeeper]
            session_timeout_ms = {SESSION_TIMEOUT_MS}
            """)
        (advertised,) = free_ports(1)
        broker = ChaosBroker(self.folder, name, advertised, config, self._before)
        self.links.add(f"{name}:clients", broker.port, advertised)
        if mount(broker.spool):
            self._mounted.append(broker.spool)
        self.brokers[name] = broker

    @property
    def disks(self) -> bool:
        """Whether brokers have disks of their own that can be filled up."""
        return bool(self._mounted)

    # ---- faults ----------------------------------------------------------------------------

    def begin(self, fault: Fault) -> None:
        """Let a fault begin. Raises: what its server raises."""
        kind, target = fault.kind, fault.target
        if kind in ("broker-kill", "broker-restart", "broker-pause"):
            broker = self.brokers[target]
            if kind == "broker-restart":
                drain(broker)
            else:
                broker.kill() if kind == "broker-kill" else broker.pause()
        elif kind == "rolling-restart":
            for broker in self.brokers.values():
                drain(broker)
                broker.come_back()
        elif kind == "clock-step":
            self.brokers[target].step_clock(fault.amount)
        elif kind == "disk-full":
            if self.disks:
                fill(self.brokers[target].ballast)
        elif kind.startswith(("link-", "store-")) and kind not in ("store-kill", "store-pause"):
            for link in self._links_of(target):
                self.links[link].set(kind.partition("-")[2])
        else:
            for server in self._servers_of(target):
                server.kill() if kind.endswith("kill") else server.pause()

    def end(self, fault: Fault) -> None:
        """Heal what a fault did."""
        kind, target = fault.kind, fault.target
        if kind in ("broker-kill", "broker-restart"):
            self.brokers[target].come_back()
        elif kind == "broker-pause":
            self.brokers[target].resume()
        elif kind == "clock-step":
            self.brokers[target].step_clock(0.0)
        elif kind == "disk-full":
            self.brokers[target].ballast.unlink(missing_ok=True)
        elif kind.startswith(("link-", "store-")) and kind not in ("store-kill", "store-pause"):
            for link in self._links_of(target):
                self.links[link].set("pass")
        elif kind != "rolling-restart":
            for server in self._servers_of(target):
                server.start(SERVER_S) if kind.endswith("kill") else server.resume()

    def upgrade(self, name: str) -> None:
        """Drain one broker and start it again from the present tree."""
        broker = self.brokers[name]
        drain(broker)
        broker.tree = self.tree
        broker.come_back()

    def _links_of(self, target: str) -> list[str]:
        broker, _, part = target.partition(":")
        return [f"{broker}:{name}" for name in self.zookeepers] if part == "zookeeper" else [target]

    def _servers_of(self, target: str) -> list[Server]:
        if target == "zookeepers":
            return list(self.zookeepers.values())
        return [{**self.kafkas, **self.zookeepers, "s3": self.s3}[target]]

    def close(self) -> None:
        """End everything that runs."""
        for broker in self.brokers.values():
            broker.close()
        for server in (*self.kafkas.values(), *self.zookeepers.values(), *([self._s3] if self._s3 else [])):
            server.kill()
        self.links.close()
        for folder in self._mounted:
            subprocess.run(["umount", str(folder)], check=False)


def drain(broker: ChaosBroker) -> None:
    """Stop a broker by SIGTERM. Raises: AssertionError when it does not drain, TimeoutExpired when it does not end."""
    broker.signal()
    try:
        code = broker.process.wait(DRAIN_S)  # in bad weather each try to forward what it acked with 1 may take 30 s
    finally:
        broker.kill()
    assert code == 0, f"{broker.name} drained with {code}: {broker.log.read_text()[-600:]}"


def zookeeper_launch(folder: Path, number: int, port: int, quorum: str) -> Launch:
    """Write the settings of one member of a ZooKeeper ensemble and say how to start it."""
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    (data / "myid").write_text(f"{number}\n")
    config = folder / "zoo.cfg"
    config.write_text(
        f"tickTime=250\ninitLimit=40\nsyncLimit=20\nmaxSessionTimeout=60000\ndataDir={data}\nclientPort={port}\n"
        f"clientPortAddress={HOST}\nmaxClientCnxns=0\nadmin.enableServer=false\n4lw.commands.whitelist=*\n{quorum}"
    )
    jars = class_path("zookeeper")
    command = (find_java(), "-Xmx96m", *small(jars), "-cp", jars)
    main = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
    return Launch("zookeeper", (*command, main, str(config)), f"{HOST}:{port}", (port,), ())


def fill(path: Path) -> None:
    """Fill the file system of `path` up."""
    with path.open("wb", buffering=0) as file:
        try:
            while shutil.disk_usage(path.parent).free:
                file.write(bytes(64 * 1024))
        except OSError:
            pass
