"""Starts Apache Kafka in KRaft mode: broker and controller in one process, small, with few partitions of its own."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from memq_localstack import LocalstackError
from memq_localstack.java import class_path, find_java, one_at_a_time, small
from memq_localstack.launch import Launch
from memq_localstack.ports import HOST

PORTS = 2  # the clients', the controller's
CLUSTER_ID = "bWVtcS1sb2NhbHN0YWNrMQ"  # base64 of 16 bytes
HEAP = "-Xmx512m"
FORMAT_TIMEOUT_S = 240
FORMATTED_BY = ("node.id", "process.roles", "log.dirs", "log.dir", "metadata.log.dir")  # what the new folder depends on

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
    config = folder / "server.properties"
    folder.mkdir(parents=True, exist_ok=True)
    config.write_text(_properties({**SETTINGS, **settings}, filled), encoding="utf-8")
    jars = class_path("kafka")
    java = [find_java(), *small(jars), "-cp", jars]
    if not (folder / "data" / "meta.properties").exists():
        if any(name in settings for name in FORMATTED_BY):
            _format(java, config)
        else:
            shutil.copytree(_formatted(java, Path(jars).parent), folder / "data", dirs_exist_ok=True)
    return Launch(
        kind="kafka",
        command=(*java[:1], HEAP, *java[1:], *java_options, "kafka.Kafka", str(config)),
        address=f"{HOST}:{port}",
        ports=(port, controller_port),
        ready=("Kafka Server started",),
    )


def _properties(settings: Mapping[str, str], filled: Mapping[str, str]) -> str:
    lines = []
    for name, value in settings.items():
        for mark, text in filled.items():
            value = value.replace(mark, text)
        lines.append(f"{name}={value}\n")
    return "".join(lines)


def _formatted(java: list[str], jars: Path) -> Path:
    """Return a folder as Kafka formats it, made once and kept beside its jars: it takes a Java of its own, and 2 s."""
    kept = jars.with_name(f"{jars.name}-formatted")
    if not kept.exists():
        with one_at_a_time(kept.with_suffix(".lock")):
            if not kept.exists():
                draft = kept.with_suffix(".draft")
                shutil.rmtree(draft, ignore_errors=True)
                draft.mkdir()
                config = draft / "server.properties"
                filled = {"{port}": "9092", "{controller_port}": "9093", "{data}": str(draft / "data")}
                config.write_text(_properties(SETTINGS, filled), encoding="utf-8")
                _format(java, config)
                (draft / "data").rename(kept)
                shutil.rmtree(draft)
    return kept


def _format(java: list[str], config: Path) -> None:
    """Let Kafka write the identity of the cluster into its empty data folder."""
    command = [*java, "kafka.tools.StorageTool", "format", "-t", CLUSTER_ID, "-c", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=FORMAT_TIMEOUT_S)
    if done.returncode != 0:
        raise LocalstackError(f"kafka refused its settings in {config}:\n{done.stdout}{done.stderr}")
