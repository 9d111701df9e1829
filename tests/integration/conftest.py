"""Real servers and the browser of the integration tests: started once; a missing one is a failure."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from memq_localstack.servers import S3Server, Server, start_s3
from tests.browsers import chromium
from tests.integration.kafka import running_kafka
from tests.processes import BrokerProcess, broker_processes


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One Kafka for all tests that only use it; those that stop or kill it start their own."""
    with running_kafka(tmp_path_factory.mktemp("kafka")) as server:
        yield server


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One SeaweedFS for all tests that only use it."""
    with start_s3(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def reads_s3(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """Let consumers and commands of this test read the objects themselves."""
    monkeypatch.setenv("MEMQ_S3_TRUSTED_ENDPOINTS", s3.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.secret_key)
    return s3


@pytest.fixture
def brokers(tmp_path: Path, zookeeper: Server, kafka: Server, reads_s3: S3Server) -> Iterator[list[BrokerProcess]]:
    """Three brokers as processes, on S3, Kafka and ZooKeeper."""
    with broker_processes(tmp_path, zookeeper, kafka, reads_s3) as processes:
        yield processes


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One chromium for a module; each test opens tabs of its own."""
    with chromium() as started:
        yield started
