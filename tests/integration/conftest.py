"""Real servers that the integration tests share: started once per session, and a failure when one is missing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from localstack.servers import Server
from tests.integration.kafka import running_kafka


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One Kafka for all tests that only use it; those that stop or kill it start their own."""
    with running_kafka(tmp_path_factory.mktemp("kafka")) as server:
        yield server
