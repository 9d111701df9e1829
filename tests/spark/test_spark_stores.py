"""Spark behaves the same on moto and on a real S3 server with Kafka; reads also without a broker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.integration.kafka import running_kafka
from tests.processes import BrokerProcess
from tests.s3_servers import BUCKET, S3Place, moto, seaweedfs
from tests.soak import SOAKING
from tests.spark.mixed_records import check_mixed, send_mixed
from tests.spark.stored_copies import contents, piped_copies, written_copies
from tests.spark.streams import run_to_end
from tests.spark.topics import make_topic, read

TOPIC = "stored"
COUNT = 1_500


@contextmanager
def running_broker(folder: Path, place: S3Place, queue: str) -> Iterator[tuple[BrokerProcess, Path]]:
    """Run a broker on a bucket and a queue; its settings file has the keys for who reads."""
    config = folder / "memq.toml"
    config.write_text(
        f"""
        store = "s3://{BUCKET}/{folder.name}?endpoint={place.endpoint}"
        queue = "{queue}"
        coordinator = "standalone:{folder}/topics.sqlite"
        memory_bytes_max = "64MiB"
        [s3]
        access_key_id = "{place.access_key_id}"
        secret_access_key = "{place.secret_access_key}"
        [kafka]
        prefix = "{folder.name}."
        replication_factor = 1
        """
    )
    broker = BrokerProcess(config, "b1")
    try:
        broker.start()
        yield broker, config
    finally:
        broker.close()


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["localstack", *(["moto"] if SOAKING else [])])
def test_all_stores_and_queues_read_alike(spark: SparkSession, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / f"spark-{kind}"
    folder.mkdir()
    with ExitStack() as stack:
        if kind == "moto":
            place, queue = stack.enter_context(moto()), f"sqlite:{folder}/queue.sqlite"
        else:
            place = stack.enter_context(seaweedfs(tmp_path / "s3"))
            queue = f"kafka://{stack.enter_context(running_kafka(tmp_path / 'kafka')).address}"
        broker, config = stack.enter_context(running_broker(folder, place, queue))
        make_topic(broker.address, TOPIC, partitions=2)
        sent = send_mixed(broker.address, TOPIC, COUNT)
        store = f"s3://{BUCKET}/{folder.name}?endpoint={place.endpoint}"
        with pytest.MonkeyPatch.context() as environment:  # the consumer that is compared with reads the store, too
            environment.setenv("MEMQ_S3_TRUSTED_ENDPOINTS", place.endpoint)
            environment.setenv("AWS_ACCESS_KEY_ID", place.access_key_id)
            environment.setenv("AWS_SECRET_ACCESS_KEY", place.secret_access_key)
            check_mixed(read(spark, broker.address, TOPIC, config=str(config)), broker.address, TOPIC, sent)
            options = {"queue": queue, "store": store, "topics": TOPIC, "config": str(config)}
            direct = spark.read.format("memq").options(**options).load()
            check_mixed(direct, broker.address, TOPIC, sent)
        check_stream(spark, options, tmp_path)
        assert spark.read.format("memq").options(path=store, config=str(config)).load().count() == COUNT
        wanted = contents(direct)
        for copy in written_copies(spark, broker.address, TOPIC, str(config), tmp_path):
            assert contents(copy) == wanted
        for name, made in piped_copies(spark, broker.address, options, store.replace("?", "-files?"), COUNT):
            if name == "report":
                assert sum(json.loads(row.value)["delivered"] for row in made.collect()) == COUNT
            else:
                assert contents(made) == wanted, name


def check_stream(spark: SparkSession, options: dict[str, str], folder: Path) -> None:
    """Follow the topic to its end, without a broker."""
    frame = spark.readStream.format("memq").options(maxRecordsPerTrigger="1000", **options).load()
    writer = frame.select("partition", "offset").writeStream.format("parquet")
    query = run_to_end(writer.option("checkpointLocation", str(folder / "checkpoint")), str(folder / "out"))
    assert [each["numInputRows"] for each in query.recentProgress if each["numInputRows"]] == [1_000, COUNT - 1_000]
    assert spark.read.parquet(str(folder / "out")).distinct().count() == COUNT
