"""The live audit next to Spark: an exactly-once write and a restarted streaming query are ok."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from memq.audit.finding import Finding
from memq.audit.minutes import MinuteRow
from tests.spark.audited import audit_until, auditing_broker
from tests.spark.streams import run_to_end
from tests.spark.topics import make_topic, values_of

TOPIC, STREAM = "audited", "report"
WRITTEN = 300


def test_records_that_spark_writes_and_follows_are_ok(spark: SparkSession, tmp_path: Path) -> None:
    def is_whole(row: MinuteRow, findings: list[Finding]) -> bool:
        assert findings == [], "not even for a while"
        queue, stream = row.side(""), row.side(STREAM)
        report = (queue["sent"], queue["acked"], queue["committed"], stream["processed"])
        return report == (WRITTEN,) * 4 and (row.word(""), row.word(STREAM)) == ("ok", "ok")

    with auditing_broker(tmp_path) as broker:
        make_topic(broker.address, TOPIC, partitions=2)
        rows = spark.range(0, WRITTEN, numPartitions=2).selectExpr("cast(id as string) as value")
        rows.write.format("memq").mode("append").options(brokers=broker.address, topic=TOPIC).save()
        stream = spark.readStream.format("memq").options(
            brokers=broker.address, topics=TOPIC, maxRecordsPerTrigger="200", columns="value", auditName=STREAM
        )
        for value in ("raise_error('this is too much')", "value"):  # the second begins with what the first has read
            frame = stream.load().selectExpr(f"cast({value} as binary) as value")
            writer = frame.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "checkpoint"))
            if value == "value":
                run_to_end(writer, str(tmp_path / "out"))
            else:
                with pytest.raises(StreamingQueryException, match="this is too much"):
                    run_to_end(writer, str(tmp_path / "out"))
        assert values_of(spark.read.parquet(str(tmp_path / "out"))) == list(range(WRITTEN))
        audit_until(broker, tmp_path, TOPIC, is_whole)
