"""Restores the queue of one data folder: in a file of its own, which takes its place when it is whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from memq.broker.process import STORE_NAME
from memq.broker.restore.restore import Restored, Restorer
from memq.governor.data_folder import DataFolder
from memq.governor.standalone import StandaloneCoordinator
from memq.notification.sqlite.file import copy_database
from memq.notification.sqlite.queue import SqliteQueue
from memq.runtime.network import Runtime
from memq.storage_handlers.files import sync_folder
from memq.storage_handlers.filesystem import FilesystemHandler


async def restore_folder(
    path: Path,
    *,
    dry_run: bool = False,
    moved: Callable[[int], None] = lambda count: None,
    runtime: Runtime | None = None,
) -> list[Restored]:
    """Restore the queue of the data folder at `path` for all topics; return the results of each.

    The new queue appears whole or not at all: with half of it a start would sweep the objects that it does not name.
    `moved` gets the number of objects that are done.
    A queue that is there keeps what it has, and gets the partitions whose log it lost.
    Raises: InvalidRequestError when the folder is in use; CorruptDataError of a damaged queue; MemqError of its parts.
    """
    runtime = runtime or Runtime()
    folder = DataFolder.open(path, runtime.random, queue_gone=True)
    try:
        made = folder.tmp / folder.queue.name
        _remove(made)
        if folder.queue.exists() and folder.queue.stat().st_size:
            copy_database(folder.queue, made, "queue")  # partitions that it has, and positions of groups, stay
        told = await _restore(folder, made, runtime, dry_run, moved)
        if not dry_run:
            _remove(folder.queue)  # an empty file, or the log of the one that is gone
            made.replace(folder.queue)
            sync_folder(path)
        return told
    finally:
        folder.close()


async def _restore(
    folder: DataFolder, made: Path, runtime: Runtime, dry_run: bool, moved: Callable[[int], None]
) -> list[Restored]:
    store = FilesystemHandler(folder.objects, folder.tmp)
    queue = SqliteQueue(made, runtime.clock)
    coordinator = StandaloneCoordinator(folder.topics, folder.cluster, runtime.clock)
    restorer = Restorer(folder.cluster, STORE_NAME, store, queue, runtime.clock, dry_run=dry_run, moved=moved)
    try:
        return [await restorer.restore(topic) for topic in await coordinator.topics()]
    finally:
        await coordinator.close()
        await queue.close()
        await store.close()
        if dry_run:
            _remove(made)


def _remove(queue: Path) -> None:
    """Remove a queue's file and the files that SQLite keeps next to it."""
    for ending in ("", "-wal", "-shm", "-journal"):
        queue.with_name(queue.name + ending).unlink(missing_ok=True)
