"""A broker that is started again and again next to a working one: no start crashes."""

from __future__ import annotations

from pathlib import Path

import pytest

from memq_localstack.servers import S3Server, Server
from tests.load import Sender, check_read, create
from tests.processes import broker_processes
from tests.soak import repetitions, report


@pytest.mark.soak
def test_every_start_comes_to_its_end(tmp_path: Path, zookeeper: Server, kafka: Server, reads_s3: S3Server) -> None:
    """The library looks for leaders on two threads at once while its client is young, unless memq looks before it asks.

    One start in nine hundred died of it.
    """
    with broker_processes(tmp_path, zookeeper, kafka, reads_s3, count=2) as brokers:
        create(brokers)
        _, again = brokers
        with Sender(brokers) as one:
            for number in range(repetitions(few=3, many=1_000)):
                assert again.stop() == 0, again.log.read_text()
                again.start()
                if number % 100 == 99:
                    report(f"start {number + 1}: {one.sent} sent")
            one.wait_for_all(10)
        check_read(brokers, one)
