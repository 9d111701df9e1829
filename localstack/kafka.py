"""Starts Apache Kafka in KRaft mode: broker and controller in one process, small, with few partitions of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from localstack.errors import LocalstackError
from localstack.jars import class_path
from localstack.java import find_java
from localstack.launch import Launch
from localstack.ports import HOST

PORTS = 2  # the clients', the controller's
CLUSTER_ID = "bWVtcS1sb2NhbHN0YWNrMQ"  # base64 of 16 bytes
SMALL = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData")  # starts fast, stays small
HEAP = "-Xmx512m"
FORMAT_TIMEOUT_S = 60

# One node holds everything once; what Kafka spreads over 50 partitions elsewhere lies in 4 here. Groups start at once.
# A killed broker may register again only when its session is over: with Kafka's own 9 s a restart takes 13.
SETTINGS = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "controller.quorum.voters": f"1@{HOST}:{{controller_port}}",
    "listeners": f"PLAINTEXT://{HOST}:{{port}},CONTROLLER://{HOST}:{{controller_port}}",
    "controller.listener.names": "CONTROLLER",
    "log.dirs": "{data}",
    "auto.create.topics.enable": "false",
    "broker.session.timeout.ms": "3000",
    "broker.heartbeat.interval.ms": "500",
    "group.initial.rebalance.delay.ms": "0",
    "offsets.topic.num.partitions": "4",
    "offsets.topic.replication.factor": "1",
    "transaction.state.log.num.partitions": "4",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "share.coordinator.state.topic.num.partitions": "4",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
}


def launch(folder: Path, ports: list[int], settings: Mapping[str, str], java_options: Sequence[str]) -> Launch:
    """Write the settings, format the data folder when it is new, and say how to start Kafka on it.

    `settings` come over those above; `{port}`, `{controller_port}` and `{data}` in a value are filled in.
    `java_options` come after those above, and win.
    """
    port, controller_port = ports
    filled = {"{port}": str(port), "{controller_port}": str(controller_port), "{data}": str(folder / "data")}
    lines = []
    for name, value in {**SETTINGS, **settings}.items():
        for mark, text in filled.items():
            value = value.replace(mark, text)
        lines.append(f"{name}={value}\n")
    config = folder / "server.properties"
    folder.mkdir(parents=True, exist_ok=True)
    config.write_text("".join(lines), encoding="utf-8")
    java = [find_java(), *SMALL, "-cp", class_path("kafka")]
    if not (folder / "data" / "meta.properties").exists():
        _format(java, config)
    return Launch(
        kind="kafka",
        command=(*java[:1], HEAP, *java[1:], *java_options, "kafka.Kafka", str(config)),
        address=f"{HOST}:{port}",
        ports=(port, controller_port),
        ready=("Kafka Server started",),
    )


def _format(java: list[str], config: Path) -> None:
    """Let Kafka write the identity of the cluster into its empty data folder."""
    command = [*java, "kafka.tools.StorageTool", "format", "-t", CLUSTER_ID, "-c", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=FORMAT_TIMEOUT_S)
    if done.returncode != 0:
        raise LocalstackError(f"kafka refused its settings in {config}:\n{done.stdout}{done.stderr}")
