"""A standalone cluster of Spark on this machine: a master and workers as processes, ended by id."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyspark

from memq_localstack.java import spark_environment
from memq_localstack.launch import Launch, Server
from memq_localstack.ports import HOST, free_ports
from tests.spark.conftest import JAVA_OPTIONS, ROOT

SPARK_HOME = Path(pyspark.__file__).resolve().parent  # as in the class path of the archive
MASTER, WORKER = "org.apache.spark.deploy.master.Master", "org.apache.spark.deploy.worker.Worker"
MEMORY = "512m"  # of each worker, all of it for one executor


@contextmanager
def standalone_cluster(folder: Path, workers: int = 2) -> Iterator[tuple[str, list[Server]]]:
    """Run a master and `workers` workers of one core each; yield the master's address, spark://…, and the workers."""
    environment = {
        **spark_environment(folder),
        "PYTHONPATH": str(ROOT),
        "SPARK_DAEMON_JAVA_OPTS": JAVA_OPTIONS,
        "SPARK_DAEMON_MEMORY": "128m",
        "SPARK_HOME": str(SPARK_HOME),
        "SPARK_LOCAL_IP": HOST,
    }

    def launch(kind: str, said: str, *command: str) -> Server:
        (port,) = free_ports(1)
        line = (str(SPARK_HOME / "bin" / "spark-class"), *command, "--port", str(port), "--webui-port", "0")
        server = Launch(kind, line, f"{HOST}:{port}", (port,), (said,), environment)
        return stack.enter_context(Server(folder / kind, server).start())

    with ExitStack() as stack:
        master = launch("master", "I have been elected leader", MASTER, "--host", HOST)
        url = f"spark://{master.address}"
        settings = ("--host", HOST, "--cores", "1", "--memory", MEMORY)
        yield (
            url,
            [
                launch(f"worker-{number}", "Successfully registered with master", WORKER, *settings, url)
                for number in range(workers)
            ],
        )
