"""The pytest fixture `memq_cluster`, for those who list this module in `pytest_plugins`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from memq.testing.cluster import Cluster


@pytest.fixture
def memq_cluster() -> Iterator[Cluster]:
    """A cluster of its own for each test."""
    with Cluster() as cluster:
        yield cluster
