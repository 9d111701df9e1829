"""`python -m tests.class_archives`: archives of the classes that Kafka, ZooKeeper and Spark load when they start.

Tests start some 60 virtual machines of Java. With an archive a start takes half of the CPU time. An archive lies in the
user's cache and is made once for each Java and each set of jars. Without one every test passes, too.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from memq_localstack import LocalstackError, guard, kafka, zookeeper
from memq_localstack.java import (
    SMALL,
    archive_of,
    class_path,
    find_java,
    one_at_a_time,
    spark_class_path,
    spark_environment,
)
from memq_localstack.launch import Launch, Server
from memq_localstack.ports import free_ports

END_S = 180.0  # a Java that ends writes its archive first


def make(archive: Path, jars: str, train: Callable[[str], None]) -> bool:
    """Make an archive by a start with the option that `train` gets; false if this Java can't make or use one."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    with one_at_a_time(archive.with_suffix(".lock")):
        if archive.exists():
            return True
        draft = archive.with_suffix(".draft")
        draft.unlink(missing_ok=True)
        try:
            with suppress(LocalstackError, subprocess.SubprocessError):
                train(f"-XX:ArchiveClassesAtExit={draft}")
            if draft.exists() and is_usable(draft, jars):
                draft.rename(archive)
        finally:
            draft.unlink(missing_ok=True)
    return archive.exists()


def is_usable(archive: Path, jars: str) -> bool:
    """Whether Java takes classes from an archive; one that a killed Java left is cut short."""
    options = (*SMALL, "-Xshare:on", "-XX:+VerifySharedSpaces", f"-XX:SharedArchiveFile={archive}")
    command = [find_java(), *options, "-cp", jars, "-version"]
    with tempfile.TemporaryDirectory() as folder:  # at some cuts Java ends by SIGBUS, and writes a report
        return subprocess.run(command, cwd=folder, capture_output=True, timeout=END_S, check=False).returncode == 0


def start_and_stop(launched: Callable[[Path], Launch], folder: Path, option: str) -> None:
    """Start a server with one more option of Java, and wait for its end."""
    launch = launched(folder)
    command = (launch.command[0], option, *launch.command[1:])
    Server(folder, replace(launch, command=command, stop_timeout_s=END_S)).start().stop()


def run_spark(option: str) -> None:
    """Run a session of Spark with one more option of Java: queries, files, a stream, tasks in Python."""
    command = [sys.executable, "-m", "tests.class_archives", option]
    subprocess.run(command, check=True, capture_output=True, timeout=2 * END_S)


def train_spark(option: str) -> None:
    """Do what most sessions of tests do, and end the session's Java."""
    with tempfile.TemporaryDirectory() as kept:
        os.environ.update(spark_environment(Path(kept, "environment")))
        from pyspark import SparkContext
        from pyspark.sql import SparkSession

        builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
        builder = builder.config("spark.driver.extraJavaOptions", " ".join([*SMALL, option]))
        spark = builder.config("spark.sql.warehouse.dir", f"{kept}/warehouse").getOrCreate()
        spark.range(100).selectExpr("id", "id % 3 AS third").groupBy("third").count().collect()
        spark.range(100).mapInArrow(lambda batches: batches, "id LONG").write.parquet(f"{kept}/files")
        stream = spark.readStream.schema("id LONG").parquet(f"{kept}/files").writeStream.format("parquet")
        stream = stream.option("checkpointLocation", f"{kept}/checkpoint").option("path", f"{kept}/out")
        stream.trigger(availableNow=True).start().awaitTermination()
        spark.stop()
        gateway = SparkContext._gateway
        assert gateway is not None
        gateway.shutdown()
        gateway.proc.stdin.close()  # its Java ends with it
        gateway.proc.wait(END_S)


def main() -> int:
    """Make what is not there yet; what can't be made is no failure."""
    if len(sys.argv) > 1:
        train_spark(sys.argv[1])
        return 0
    guard.begin()
    with tempfile.TemporaryDirectory() as folder:
        servers: dict[str, Callable[[Path], Launch]] = {
            "kafka": lambda path: kafka.launch(path, free_ports(kafka.PORTS), {}, ()),
            "zookeeper": lambda path: zookeeper.launch(path, free_ports(zookeeper.PORTS), {}),
        }
        for name, launch in servers.items():
            jars, place = class_path(name), Path(folder, name)
            if not make(archive_of(jars), jars, partial(start_and_stop, launch, place)):
                print(f"no archive of the classes of {name}: its starts take longer", flush=True)
    jars = spark_class_path()
    if not make(archive_of(jars), jars, run_spark):
        print("no archive of the classes of Spark: its starts take longer", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
