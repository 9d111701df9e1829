"""The way of a simulated producer to the store, for the large parts of its transactions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from memq.client.metadata import ClusterMetadata
from memq.client.transactions import staging
from memq.runtime.runtime import Runtime
from memq.storage_handlers import StorageHandler


class StagingDoors:
    """The store of each process that makes transactions, by its runtime."""

    def __init__(self) -> None:
        self.of: dict[int, StorageHandler] = {}

    def open(self, metadata: ClusterMetadata, runtime: Runtime, *, patient: bool) -> ProcessStores:
        """Return the stores of a process; see `memq.client.stores.OpenStores`."""
        return ProcessStores(self.of.get(id(runtime)))

    @contextmanager
    def used(self) -> Iterator[None]:
        """Let producers open the store through these doors."""
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(staging, "OpenStores", self.open)
            yield


class ProcessStores:
    """The stores of one process."""

    def __init__(self, store: StorageHandler | None) -> None:
        self._store = store

    def __call__(self, name: str) -> StorageHandler | None:
        """Return the only store."""
        return self._store

    async def close(self) -> None:
        """The process ends with its door."""
