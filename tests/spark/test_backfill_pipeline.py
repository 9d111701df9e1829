"""A backfill in parallel: each record once to files, at least once to a function, then a commit."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

import memq
from memq.errors import InvalidRequestError
from memq.spark.pipelines.__main__ import pipelines
from memq.spark.pipelines.backfill import backfill, backfill_files
from memq.spark.pipelines.inputs import options_of
from memq.spark.pipelines.spread import Batches
from memq.spark.pipelines.topic_files import location_of_text, manifest_of
from tests.servers import DevServer
from tests.spark.produced import numbers_in, produce
from tests.spark.topics import left_of


def consume_some(broker: DevServer, topic: str, group: str) -> set[int]:
    """Read one batch of a topic as a group, commit it, and return its numbers."""
    with memq.Consumer(broker.address, topic, group=group, auto_commit=False, end="end") as consumer:
        batch = next(iter(consumer))
        numbers = {int(bytes(record.value or b"").split()[0]) for record in batch}
        consumer.commit(batch)
    return numbers


def test_files_get_what_a_group_has_not_read(spark: SparkSession, broker: DevServer, tmp_path: Path) -> None:
    produce(broker, "backfilled", range(400))
    read = consume_some(broker, "backfilled", "files")
    folder = tmp_path / "files"
    arguments = ["backfill", "backfilled", "-b", broker.address, "-G", "files", "--to", str(folder)]
    done = CliRunner().invoke(
        pipelines, [*arguments, "-o", "partitionBytes=64KiB"], standalone_mode=False, catch_exceptions=False
    )
    assert f"{400 - len(read)} records in files" in done.stdout
    assert numbers_in(spark, folder) == sorted({*range(400)} - read)
    assert left_of(broker, "files") == 0
    produce(broker, "backfilled", range(400, 450))
    with memq.Admin(broker.address) as admin:  # as if a run had been killed before its commits
        began = manifest_of(location_of_text(str(folder))).starts
        admin.reset_group("files", "backfilled", {("backfilled", each): position for each, position in began.items()})
    options = options_of("backfilled", broker.address, [])[1]
    backfill_files(spark, options, "files", location_of_text(str(folder)))
    assert numbers_in(spark, folder) == sorted({*range(450)} - read)
    assert left_of(broker, "files") == 0


def test_files_that_begin_behind_a_group_are_refused(spark: SparkSession, broker: DevServer, tmp_path: Path) -> None:
    """The group was moved to the end of the files, and never got the records before their beginning."""
    produce(broker, "begun", range(400))
    read = consume_some(broker, "begun", "first")
    location = location_of_text(str(tmp_path / "files"))
    options = options_of("begun", broker.address, [])[1]
    assert backfill_files(spark, options, "first", location).records == 400 - len(read)
    with pytest.raises(InvalidRequestError, match=r"group 'second' is at .* begin at "):
        backfill_files(spark, options, "second", location)
    with memq.Admin(broker.address) as admin:
        assert "second" not in admin.groups()
        admin.reset_group("first", "begun", "beginning")
    with pytest.raises(InvalidRequestError, match=r"group 'first' is at .* begin at "):
        backfill_files(spark, options, "first", location)
    assert left_of(broker, "first") == 400
    assert numbers_in(spark, tmp_path / "files") == sorted({*range(400)} - read)


def test_a_function_gets_every_record_and_a_failed_round_comes_again(
    spark: SparkSession, broker: DevServer, tmp_path: Path
) -> None:
    produce(broker, "worked", range(300))
    marks = tmp_path / "marks"
    marks.mkdir()

    def mark(batches: Batches) -> None:
        for batch in batches:
            for value in batch.column("value").to_pylist():
                number = value.split()[0].decode()
                if number == "299" and not (marks / "failed").exists():
                    (marks / "failed").touch()
                    raise RuntimeError("once")
                (marks / number).touch()

    options = options_of("worked", broker.address, ["partitionBytes=64KiB"])[1]
    with pytest.raises(Exception, match="once"):
        backfill(spark, options, "workers", mark, tasks=1)
    backfill(spark, options, "workers", mark, tasks=1)
    assert {path.name for path in marks.iterdir()} == {"failed", *map(str, range(300))}
    assert left_of(broker, "workers") == 0
    assert backfill(spark, options, "workers", mark) == 0


def test_a_group_with_members_is_refused(spark: SparkSession, broker: DevServer) -> None:
    produce(broker, "held", range(5))
    with memq.Consumer(broker.address, "held", group="holders") as consumer:
        assert consumer.poll(timeout=60) is not None
        with pytest.raises(InvalidRequestError, match="has 1 members"):
            backfill(spark, options_of("held", broker.address, [])[1], "holders", lambda batches: None)
