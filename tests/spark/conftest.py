"""The Spark session of all tests of this folder, and a broker on a folder whose objects tasks can read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from memq_localstack.java import small, spark_class_path, spark_environment
from tests.servers import DevServer, dev_server

ROOT = Path(__file__).parents[2]
JAVA_OPTIONS = " ".join(small(spark_class_path()))
CONFIG = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.extraJavaOptions": JAVA_OPTIONS,
    "spark.driver.host": "127.0.0.1",
    "spark.driver.memory": "768m",
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.enabled": "false",
}


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Start Spark once; its Python processes run this Python, and find this tree's packages."""
    folder = tmp_path_factory.mktemp("spark")
    os.environ.update(spark_environment(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    builder = SparkSession.builder.master("local[2]").appName("memq's tests")
    for name, value in CONFIG.items():
        builder = builder.config(name, value)
    session = builder.config("spark.sql.warehouse.dir", str(folder / "warehouse")).getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevServer]:
    """One broker for all tests that only use it; each has topics of its own."""
    with dev_server(tmp_path_factory.mktemp("spark-broker") / "data") as server:
        yield server
