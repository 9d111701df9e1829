"""Starts Apache ZooKeeper as one standalone server, with a tick short enough for sessions of a second."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from memq_localstack.java import class_path, find_java, small
from memq_localstack.launch import Launch
from memq_localstack.ports import HOST

PORTS = 1
HEAP = "-Xmx64m"
MAIN = "org.apache.zookeeper.server.ZooKeeperServerMain"

SETTINGS = {
    "tickTime": "250",  # a session is 2 to 20 ticks long unless it is said otherwise
    "maxSessionTimeout": "60000",
    "dataDir": "{data}",
    "clientPort": "{port}",
    "clientPortAddress": HOST,
    "maxClientCnxns": "0",
    "admin.enableServer": "false",
    "4lw.commands.whitelist": "*",
}


def launch(folder: Path, ports: list[int], settings: Mapping[str, str]) -> Launch:
    """Write the settings and say how to start ZooKeeper on the folder.

    `settings` come over those above, and one without a value is left out; `{port}` and `{data}` are filled in.
    """
    (port,) = ports
    lines = []
    for name, value in {**SETTINGS, **settings}.items():
        if not value:
            continue
        lines.append(f"{name}={value.replace('{port}', str(port)).replace('{data}', str(folder / 'data'))}\n")
    config = folder / "zoo.cfg"
    folder.mkdir(parents=True, exist_ok=True)
    config.write_text("".join(lines), encoding="utf-8")
    jars = class_path("zookeeper")
    return Launch(
        kind="zookeeper",
        command=(find_java(), HEAP, *small(jars), "-cp", jars, MAIN, str(config)),
        address=f"{HOST}:{port}",
        ports=(port,),
        ready=("PrepRequestProcessor (sid:0) started",),  # the port is bound and the data are loaded before it
    )
