"""The pytest fixture `memq_cluster`: add `memq.testing.plugin` to `pytest_plugins`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from memq.testing.cluster import Cluster


@pytest.fixture
def memq_cluster() -> Iterator[Cluster]:
    """A new cluster for each test."""
    with Cluster() as cluster:
        yield cluster
