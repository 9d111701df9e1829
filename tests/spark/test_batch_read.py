"""A batch read returns what was produced: every column, byte for byte, for all codecs and fields."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

from tests.servers import DevServer
from tests.soak import repetitions
from tests.spark.mixed_records import check_mixed, send_mixed
from tests.spark.topics import make_topic, read


@pytest.mark.soak
def test_every_record_comes_back_byte_for_byte(spark: SparkSession, broker: DevServer) -> None:
    make_topic(broker.address, "mixed", partitions=3)
    sent = send_mixed(broker.address, "mixed", repetitions(few=9_000, many=1_000_000))
    check_mixed(read(spark, broker.address, "mixed"), broker.address, "mixed", sent)


def test_a_session_that_pushes_no_filters_reads_as_well(spark: SparkSession, broker: DevServer) -> None:
    make_topic(broker.address, "unpushed", partitions=2)
    sent = send_mixed(broker.address, "unpushed", 300)
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "false")
    try:
        frame = read(spark, broker.address, "unpushed")
        check_mixed(frame, broker.address, "unpushed", sent)
        assert frame.where("partition = 7").count() == 0
    finally:
        spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")


def test_an_empty_topic_is_an_empty_frame(spark: SparkSession, broker: DevServer) -> None:
    make_topic(broker.address, "empty")
    assert read(spark, broker.address, "empty").count() == 0
