"""Skipped damage: a record that was sent again is read from its intact copy, once."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import SparkSession

from tests.servers import DevServer
from tests.spark.streams import run_to_end
from tests.spark.topics import make_topic, numbers, publish_again, read, send, values_of


def test_the_sound_one_of_two_copies_is_read(spark: SparkSession, broker: DevServer, tmp_path: Path) -> None:
    make_topic(broker.address, "copied")
    for first in range(0, 300, 100):
        send(broker.address, "copied", numbers(first, first + 100))
    path = publish_again(broker.data, "copied", copied=True)

    def found() -> list[int]:
        return values_of(read(spark, broker.address, "copied", onDamaged="skip", missingSeconds="1"))

    assert found() == list(range(300))
    body = bytearray(path.read_bytes())
    body[100] ^= 1
    path.write_bytes(body)
    assert found() == list(range(300)), "the copy is read where the first one is damaged"
    damage = read(spark, broker.address, "copied", onDamaged="skip", columns="value,damage").where("damage is not null")
    assert damage.count() == 1
    options = {"brokers": broker.address, "topics": "copied", "onDamaged": "skip", "maxRecordsPerTrigger": "100"}
    writer = spark.readStream.format("memq").options(**options).load().select("value").writeStream.format("parquet")
    run_to_end(writer.option("checkpointLocation", str(tmp_path / "checkpoint")), str(tmp_path / "out"))
    assert values_of(spark.read.parquet(str(tmp_path / "out"))) == list(range(300)), "also by another micro-batch"
    path.unlink()
    assert found() == list(range(300))
    path.with_name(f"{path.name}-again").unlink()
    assert found() == list(range(100, 300))
