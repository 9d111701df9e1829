"""The file store on a failing disk: stored objects survive a loss of power, whatever fsync returned."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import stat
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from awscrt.checksums import crc32c

from memq.errors import DeniedError, StoreError
from memq.storage_handlers.files import ObjectFiles, sync_folder
from memq.storage_handlers.filesystem import FilesystemHandler
from tests.failing_files import FailingFiles


def test_objects_in_a_store_of_files_survive_failed_fsyncs_and_a_loss_of_power(tmp_path: Path) -> None:
    root = tmp_path / "disk"
    for folder in ("objects/t", "tmp"):
        (root / folder).mkdir(parents=True)
    disk = FailingFiles(root, random.Random(7))
    bodies = {f"t/{number:04d}": b"object %d" % number * 100 for number in range(60)}

    async def put(store: FilesystemHandler, key: str, body: bytes) -> None:
        while True:
            try:
                await store.put(key, [body], crc32c(body))
            except StoreError:
                continue
            return

    async def work() -> None:
        store = FilesystemHandler(root / "objects", root / "tmp")
        await store.put("t/first", [b"x"], crc32c(b"x"))
        for folder in (root, root / "objects"):
            sync_folder(folder)
        disk.fail_share = 0.3
        await asyncio.gather(*(put(store, key, body) for key, body in bodies.items()))
        disk.fail_share, disk.read_only = 0.0, True
        with pytest.raises(DeniedError, match="read-only"):
            await store.put("t/late", [b"x"], crc32c(b"x"))
        await store.close()

    with disk.installed():
        asyncio.run(work())
    disk.lose_power(tmp_path / "after")
    found = {key: (tmp_path / "after" / "objects" / key).read_bytes() for key in bodies}
    assert found == bodies
    assert disk.failed > 10


def test_a_put_believes_no_sync_that_another_ones_failing_sync_overlaps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel tells the first of two syncs of the error, which has not come back from it yet."""
    for name in ("objects/t", "tmp"):
        (tmp_path / name).mkdir(parents=True)
    files = ObjectFiles(tmp_path / "objects", tmp_path / "tmp")
    files.put("t/before", [b"x"], crc32c(b"x"))
    met, over, fsync, believed = threading.Event(), threading.Event(), os.fsync, []

    def failing_once(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode) and not met.is_set():
            met.set()
            over.wait(0.5)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(handle)

    def put(key: str) -> None:
        with suppress(OSError):
            files.put(key, [b"x"], crc32c(b"x"))
            believed.append(key)

    monkeypatch.setattr(os, "fsync", failing_once)
    first, second = threading.Thread(target=put, args=["t/one"]), threading.Thread(target=put, args=["t/two"])
    first.start()
    assert met.wait(60)
    second.start()
    second.join(0.3)
    over.set()
    for thread in (first, second):
        thread.join(60)
    assert believed == []
    put("t/two")
    assert believed == ["t/two"]


def test_a_folder_whose_name_was_part_of_a_failed_sync_is_not_relied_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("objects/t", "tmp"):
        (tmp_path / name).mkdir(parents=True)
    files = ObjectFiles(tmp_path / "objects", tmp_path / "tmp")
    files.put("t/before", [b"x"], crc32c(b"x"))
    fsync, failing = os.fsync, [str(tmp_path / "objects" / "t")]

    def failing_once(handle: int) -> None:
        path = os.readlink(f"/proc/self/fd/{handle}")
        if path in failing:
            failing.remove(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", failing_once)
    for key in ("t/new/one", "t/new/two", "t/new/one"):
        with pytest.raises(OSError, match=r"Input/output|failed"):
            files.put(key, [b"x"], crc32c(b"x"))
    files.put("t/other/one", [b"x"], crc32c(b"x"))
    for key in ("t/new/one", "t/new/two"):
        files.delete(key)
    files.put("t/new/one", [b"x"], crc32c(b"x"))


def test_a_folder_that_could_not_be_opened_for_its_sync_is_synced_by_the_next_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was synced, so nothing is lost: a store that was away for a moment takes the same key again."""
    for name in ("objects/t", "tmp"):
        (tmp_path / name).mkdir(parents=True)
    files = ObjectFiles(tmp_path / "objects", tmp_path / "tmp")
    files.put("t/before", [b"x"], crc32c(b"x"))
    opened, away = os.open, [tmp_path / "objects" / "t"]

    def open_file(path: str | Path, *options: int) -> int:
        if Path(path) in away:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        return opened(path, *options)

    monkeypatch.setattr(os, "open", open_file)
    with pytest.raises(NotADirectoryError):
        files.put("t/new/one", [b"x"], crc32c(b"x"))
    away.clear()
    synced: list[str] = []
    fsync = os.fsync

    def noted(handle: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", noted)
    files.put("t/new/one", [b"x"], crc32c(b"x"))
    assert str(tmp_path / "objects" / "t") in synced


def test_a_folder_that_another_process_has_made_again_is_synced_by_the_next_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process may have been killed before it synced the names of its new folders."""
    for name in ("objects", "tmp"):
        (tmp_path / name).mkdir()
    root = tmp_path / "objects"
    files = ObjectFiles(root, tmp_path / "tmp", shared=True)
    files.put("t/a/one", [b"x"], crc32c(b"x"))
    ObjectFiles(root, tmp_path / "tmp").delete("t/a/one")
    assert os.listdir(root) == []
    (root / "t" / "a").mkdir(parents=True)
    synced: list[str] = []
    fsync = os.fsync

    def noted(handle: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", noted)
    files.put("t/a/two", [b"x"], crc32c(b"x"))
    assert {str(root), str(root / "t"), str(root / "t" / "a")} < set(synced)
