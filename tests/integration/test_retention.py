"""Retention by age and by bytes in S3 and Kafka: pointers go first, then their objects, and nothing that is named."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import boto3
import pytest

import memq
from memq.broker.sweep.log_reading import keys_of, whole_log
from memq.errors import PositionExpiredError
from memq.runtime.clock import SystemClock
from memq.topic import Position, read_partitions
from memq_localstack.s3 import BUCKET
from memq_localstack.servers import S3Server, Server
from tests.integration.kafka import kafka_queue
from tests.integration.retained_batches import BATCHES, HANG_S, QUICK, old_batches, send
from tests.processes import BrokerProcess


class View:
    """What lies in Kafka and in S3 of one topic."""

    def __init__(self, folder: Path, kafka: Server, s3: S3Server, broker: BrokerProcess, topic: str) -> None:
        self._kafka = kafka.address
        self._prefix = f"{folder.name}."
        self._s3 = s3
        self._root = f"{folder.name}/"
        with memq.Admin(broker.address) as admin:
            self.topic = admin.topic(topic).topic

    def named(self) -> dict[str, int]:
        """Return the keys that pointers name, with the offsets of these."""
        return asyncio.run(self._named())

    async def _named(self) -> dict[str, int]:
        queue = kafka_queue(self._kafka, prefix=self._prefix)
        try:
            (partition,) = read_partitions(self.topic)
            _, found = await whole_log(queue, partition, pytest.fail)
            return {key: entry.offset for entry, pointer in found for key in keys_of(pointer)}
        finally:
            await queue.close()

    def stored(self) -> set[str]:
        """Return the keys of the objects."""
        client = boto3.client("s3", endpoint_url=self._s3.endpoint, region_name=self._s3.region)
        prefix = f"{self._root}memq/topics/{self.topic.name}/"
        listed: list[Any] = client.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", [])
        client.close()
        return {str(entry["Key"]).removeprefix(self._root) for entry in listed}

    def wait_for(self, batches: int) -> dict[str, int]:
        """Wait until so many batches are left, and nothing but they; what is named throughout is there all the time."""
        clock, before = SystemClock(), self.named()
        until_s = clock.monotonic() + HANG_S
        while clock.monotonic() < until_s:
            stored = self.stored()
            after = self.named()
            assert set(before) & set(after) <= stored, "an object went before its pointer"
            if len(after) == batches and stored == set(after):
                return after
            assert len(after) >= batches, f"{batches - len(after)} batches too many are gone"
            before = after
        raise AssertionError(f"{len(before)} batches are named, {len(self.stored())} stored, {batches} were to be left")


def test_retention_by_age_and_bytes_reports_the_gap_to_readers(
    tmp_path: Path, zookeeper: Server, kafka: Server, reads_s3: S3Server
) -> None:
    with old_batches(tmp_path, zookeeper, kafka, reads_s3) as broker, memq.Admin(broker.address) as admin:
        aged, sized = (View(tmp_path, kafka, reads_s3, broker, topic) for topic in ("aged", "sized"))
        assert len(aged.wait_for(BATCHES)) == len(sized.wait_for(BATCHES)) == BATCHES
        for topic in ("aged", "sized"):
            with memq.Consumer(broker.address, topic, group="report", auto_commit=False) as consumer:
                consumer.commit(consumer.poll(HANG_S))  # the first record
        admin.alter_topic("sized", settings={**QUICK, "retention_bytes": 2_500})
        send(broker, "sized", 1)
        left = sized.wait_for(3)  # the third last brings what is left to 2,500 bytes
        admin.alter_topic("aged", settings={**QUICK, "retention_ms": QUICK["dedup_window_ms"]})
        send(broker, "aged", 1)
        (last,) = aged.wait_for(1).values()
        for topic, first, records in (("sized", min(left.values()), 3), ("aged", last, 1)):
            with memq.Consumer(broker.address, topic, group="report", end="end") as consumer:
                with pytest.raises(PositionExpiredError, match=f"{BATCHES - records} records are gone") as report:
                    consumer.poll(HANG_S)
                assert Position.parse(report.value.first).pointer_offset <= first
                consumer.seek(topic, 0, Position.parse(report.value.first))
                assert sum(len(batch) for batch in consumer) == records
