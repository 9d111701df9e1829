"""Opens the sweep of a data folder or of a cluster for `memq sweep`, outside of brokers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from memq.broker.assembly import open_store, opened_parts
from memq.broker.data_folder import DataFolder, cluster_of
from memq.broker.sweep.sweep import Sweep
from memq.broker.sweep.sweep_lists import SweepLists
from memq.governor.standalone import StandaloneCoordinator
from memq.notification.sqlite.queue import SqliteQueue
from memq.runtime.runtime import Runtime
from memq.settings import PartSettings
from memq.storage_handlers.filesystem import FilesystemHandler

Note = Callable[[str], None]


@asynccontextmanager
async def cluster_sweep(
    cluster: str, parts: PartSettings, note: Note, confirm_ms: int, *, runtime: Runtime | None = None
) -> AsyncIterator[Sweep]:
    """Open the parts that the settings name; brokers may run (`memq.broker.sweep.sweep`).

    Raises: MemqError of the parts.
    """
    runtime = runtime or Runtime()
    async with opened_parts(parts, runtime, cluster) as (coordinator, store, queue):
        yield Sweep(cluster, store, queue, coordinator, runtime.clock, note, confirm_ms)


@asynccontextmanager
async def folder_sweep(
    path: Path, note: Note, confirm_ms: int, *, runtime: Runtime | None = None
) -> AsyncIterator[Sweep]:
    """Open a data folder for exclusive use.

    Raises: InvalidRequestError when another process does.
    """
    runtime = runtime or Runtime()
    folder = DataFolder.open(path, runtime.random)
    try:
        store = FilesystemHandler(folder.objects, folder.tmp)
        queue = SqliteQueue(folder.queue, runtime.clock)
        coordinator = StandaloneCoordinator(folder.topics, folder.cluster, runtime.clock)
        try:
            yield Sweep(folder.cluster, store, queue, coordinator, runtime.clock, note, confirm_ms)
        finally:
            await queue.close()
            await store.close()
            await coordinator.close()
    finally:
        folder.close()


@asynccontextmanager
async def cluster_lists(
    cluster: str, parts: PartSettings, note: Note, *, runtime: Runtime | None = None
) -> AsyncIterator[SweepLists]:
    """Open the lists of a cluster's sweeps alone. Raises: as the store."""
    store = open_store(parts, runtime or Runtime(), cluster)
    try:
        yield SweepLists(cluster, store, note)
    finally:
        await store.close()


@asynccontextmanager
async def folder_lists(path: Path, note: Note) -> AsyncIterator[SweepLists]:
    """Open the lists of a data folder's sweeps; a broker may run on it.

    Raises: CorruptDataError, as the store.
    """
    store = FilesystemHandler(path / "objects", path / "tmp")
    try:
        yield SweepLists(cluster_of(path), store, note)
    finally:
        await store.close()
