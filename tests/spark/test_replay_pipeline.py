"""A replay sends each record once and in order, also after kills, and refuses what it can't promise."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pyspark
import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

import memq
from memq.errors import InvalidRequestError, PositionExpiredError
from memq.spark.options import read_options
from memq.spark.pipelines import __main__ as main
from memq.spark.pipelines.inputs import options_of
from memq.spark.pipelines.replay import ReplayTarget, replay
from tests.servers import DevServer
from tests.soak import repetitions
from tests.spark.conftest import JAVA_OPTIONS
from tests.spark.faulty_topic import inject_faults
from tests.spark.produced import numbers_in, produce

pytestmark = pytest.mark.soak


def records_of(broker: DevServer, topic: str) -> dict[bytes | None, list[Any]]:
    """Return the records of a topic by key, in their order."""
    found: dict[bytes | None, list[Any]] = {}
    with memq.Consumer(broker.address, topic, end="end") as consumer:
        for batch in consumer:
            for each in batch:
                fields = (bytes(each.value or b""), each.timestamp_ms, each.tag, tuple(each.headers))
                found.setdefault(each.key and bytes(each.key), []).append(fields)
    return found


def run(broker: DevServer, *arguments: str) -> str:
    done = CliRunner().invoke(
        main.pipelines, ["replay", *arguments, "-b", broker.address], standalone_mode=False, catch_exceptions=False
    )
    assert done.return_value == 0
    return done.stdout


def test_a_topic_is_replayed_once_and_continues(spark: SparkSession, broker: DevServer) -> None:
    produce(broker, "source", range(300))
    with memq.Producer(broker.address) as producer:
        producer.send("source", None, key=b"gone", headers=[("a", b"1"), ("b", None)], tag="web", timestamp_ms=7)
    with memq.Admin(broker.address) as admin:
        admin.create_topic("target", partitions=3)
    assert run(broker, "source", "--to-topic", "target") == "301 records sent to topic 'target'\n"
    assert records_of(broker, "target") == records_of(broker, "source")
    assert run(broker, "source", "--to-topic", "target") == "0 records sent to topic 'target'\n"
    produce(broker, "source", range(300, 350))
    assert run(broker, "source", "--to-topic", "target") == "50 records sent to topic 'target'\n"
    assert records_of(broker, "target") == records_of(broker, "source")


def test_a_range_goes_to_files(spark: SparkSession, broker: DevServer, tmp_path: Path) -> None:
    produce(broker, "ranged", range(200))
    with memq.Consumer(broker.address, "ranged", end="end") as consumer:
        first = {batch.partition: batch.next for batch in reversed(list(consumer))}
    start = ",".join(map(str, first.values()))
    with memq.Consumer(broker.address, "ranged", start=list(first.values()), end="end") as consumer:
        wanted = sorted(int(bytes(each.value or b"").split()[0]) for batch in consumer for each in batch)
    run(broker, "ranged", "--to", str(tmp_path / "files"), "-o", f"start={start}")
    assert 0 < len(wanted) < 200
    assert numbers_in(spark, tmp_path / "files") == wanted
    run(broker, "ranged", "--to", str(tmp_path / "files"), "-o", f"start={start}")
    assert numbers_in(spark, tmp_path / "files") == wanted


@pytest.mark.parametrize("seed", range(repetitions(few=1, many=20)))
def test_a_killed_replay_loses_and_doubles_nothing(spark: SparkSession, broker: DevServer, seed: int) -> None:
    source, target = f"source-{seed}", f"target-{seed}"
    produce(broker, source, range(1_000))
    with memq.Admin(broker.address) as admin:
        admin.create_topic(target, partitions=2)
    submit = Path(pyspark.__file__).parent / "bin" / "spark-submit"  # becomes Java, by exec
    settings = ["spark.ui.enabled=false", f"spark.driver.extraJavaOptions={JAVA_OPTIONS}"]
    confs = [word for setting in settings for word in ("--conf", setting)]
    command = [str(submit), "--master", "local[2]", *confs, str(main.__file__), "replay"]
    process = subprocess.Popen(
        [*command, source, "-b", broker.address, "--to-topic", target],
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    with memq.Consumer(broker.address, target) as consumer:
        assert consumer.poll(timeout=180) is not None, "the replay sends nothing"
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    options = options_of(source, broker.address, [])[1]
    replay(spark, options, ReplayTarget(target, broker.address, f"replay.{source}.{target}"))
    assert records_of(broker, target) == records_of(broker, source)


def test_options_that_a_second_replay_could_not_repeat_are_refused(spark: SparkSession, broker: DevServer) -> None:
    target = ReplayTarget("target", broker.address, "again")
    with pytest.raises(InvalidRequestError, match="neither skips damage"):
        replay(spark, options_of("source", broker.address, ["onDamaged=skip"])[1], target)


def test_a_start_that_retention_moves_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    topic = inject_faults(tmp_path, 1)
    topic.trim(0, 3)
    target = ReplayTarget("target", None, "again")
    with pytest.raises(InvalidRequestError, match="a second run would start elsewhere") as caught:
        replay(spark, read_options(topic.options, "batch"), target)
    assert caught.value.hint == "begin at positions: -o start=0:3:0,1:0:0"
    with pytest.raises(PositionExpiredError, match="0:2:0"):
        replay(spark, read_options({**topic.options, "start": "0:2:0"}, "batch"), target)
