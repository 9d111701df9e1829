"""Compaction writes each record once, and continues where it ended."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

from memq.errors import InvalidSettingError
from memq.spark.pipelines.__main__ import pipelines
from memq.spark.pipelines.topic_files import location_of_text, manifest_of, read_files
from tests.servers import DevServer
from tests.spark.produced import HOUR_MS, START_MS, numbers_in, produce


def test_each_record_is_written_once_and_runs_continue(spark: SparkSession, broker: DevServer, tmp_path: Path) -> None:
    produce(broker, "compacted", range(500))
    folder = tmp_path / "files"
    arguments = ["compact", "compacted", "-b", broker.address, "--to", str(folder), "-o", "partitionBytes=128KiB"]

    def compact(*more: str) -> str:
        done = CliRunner().invoke(pipelines, [*arguments, *more], standalone_mode=False, catch_exceptions=False)
        assert done.return_value == 0
        return done.stdout

    with pytest.raises(InvalidSettingError, match="need the column timestamp"):
        compact("-o", "columns=key,value")
    assert "0 records in 0 files" in compact()  # all of it may still have late copies
    compact("--unsettled", "--tasks", "1")
    location = location_of_text(str(folder))
    manifest = manifest_of(location)
    assert manifest.number > 2
    assert numbers_in(spark, folder) == [*range(500)]
    compact("--unsettled")
    assert manifest_of(location) == manifest
    produce(broker, "compacted", range(500, 600))
    compact("--unsettled")
    again = manifest_of(location)
    assert again.files[: len(manifest.files)] == manifest.files
    assert numbers_in(spark, folder) == [*range(600)]
    assert {(file.date, file.hour) for file in again.files} == {("2026-01-01", hour) for hour in range(6)}
    hour = read_files(spark, location, least_ms=START_MS + 2 * HOUR_MS, greatest_ms=START_MS + 3 * HOUR_MS - 1)
    assert hour.count() == len(range(2, 600, 6))
    read = spark.read.format("memq").options(brokers=broker.address, topics="compacted").load()
    assert read_files(spark, location).exceptAll(read).count() == 0
