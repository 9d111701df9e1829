"""Files of the spool: open handles, order of fsyncs, and doctor's findings in a folder."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from memq.broker.spool import files
from memq.broker.spool.files import ASIDE, SpoolFiles, inspect_spool
from memq.errors import SpoolError
from memq.limits import FORWARD_S_MAX

NAME, OTHER = "0000000000000001-aaaaaaaa.spool", "0000000000000002-bbbbbbbb.spool"
NOW_MS = 1_800_000_000_000


def on(folder: Path, work: Callable[[SpoolFiles], Awaitable[None]]) -> None:
    async def opened() -> None:
        disk = SpoolFiles(folder)
        try:
            await work(disk)
        finally:
            await disk.close()

    asyncio.run(opened())


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """The folders that were synced, each with the names it had then."""
    found: list[tuple[str, list[str]]] = []

    def noted(folder: Path) -> None:
        found.append((folder.name, sorted(os.listdir(folder))))

    monkeypatch.setattr(files, "sync_folder", noted)
    return found


def test_a_segment_that_is_set_aside_is_in_its_new_folder_before_it_leaves_the_old_one(
    tmp_path: Path, synced: list[tuple[str, list[str]]]
) -> None:
    """A power loss in between leaves it in both or in one, never in none."""

    async def work(disk: SpoolFiles) -> None:
        await disk.append(NAME, [b"one"])
        synced.clear()
        assert await disk.set_aside(NAME) == str(tmp_path / ASIDE / NAME)
        (aside, moved), (folder, left) = synced
        assert (aside, moved) == (ASIDE, [NAME])
        assert folder == tmp_path.name
        assert NAME not in left
        synced.clear()
        await disk.set_aside(NAME)
        assert [name for name, _ in synced] == [ASIDE, tmp_path.name], "an earlier try may not have come so far"

    on(tmp_path, work)


@pytest.mark.parametrize("away", ["remove", "set_aside"])
def test_a_segment_of_a_name_that_went_is_a_new_file(tmp_path: Path, away: str) -> None:
    async def work(disk: SpoolFiles) -> None:
        await disk.append(NAME, [b"one"])
        await getattr(disk, away)(NAME)
        await disk.append(NAME, [b"two"])
        assert (tmp_path / NAME).read_bytes() == b"two"

    on(tmp_path, work)


def test_another_segment_that_goes_leaves_the_handle_of_the_open_one(tmp_path: Path) -> None:
    async def work(disk: SpoolFiles) -> None:
        await disk.append(OTHER, [b"other"])
        await disk.append(NAME, [b"one"])
        await disk.remove(OTHER)
        await disk.append(NAME, [b"two"])
        assert (tmp_path / NAME).read_bytes() == b"onetwo"

    on(tmp_path, work)


def test_a_file_of_another_process_is_not_appended_to(tmp_path: Path) -> None:
    async def work(disk: SpoolFiles) -> None:
        (tmp_path / NAME).write_bytes(b"another's")
        with pytest.raises(SpoolError):
            await disk.append(NAME, [b"one"])
        assert (tmp_path / NAME).read_bytes() == b"another's"

    on(tmp_path, work)


def test_each_read_of_a_segment_comes_from_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page cache would show damage of the way there to the second read, too."""
    dropped: list[tuple[int, int, int]] = []

    def drop(handle: int, offset: int, length: int, advice: int) -> None:
        assert os.lseek(handle, 0, os.SEEK_CUR) == 0, "before anything is read"
        dropped.append((offset, length, advice))

    monkeypatch.setattr(os, "posix_fadvise", drop, raising=False)
    monkeypatch.setattr(os, "POSIX_FADV_DONTNEED", 4, raising=False)

    async def work(disk: SpoolFiles) -> None:
        await disk.append(NAME, [b"one"])
        assert [await disk.read(NAME) for _ in range(2)] == [b"one"] * 2

    on(tmp_path, work)
    assert dropped == [(0, 0, 4)] * 2


def test_calls_come_one_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A removal closes the handle that an append may have just found."""
    go_on = threading.Event()
    monkeypatch.setattr(files, "sync_file", lambda _: go_on.wait())

    async def work(disk: SpoolFiles) -> None:
        before = threading.active_count()
        calls = [asyncio.create_task(disk.append(NAME, [b"one"])), asyncio.create_task(disk.remove(OTHER))]
        await asyncio.sleep(0)
        threads = threading.active_count() - before
        go_on.set()
        await asyncio.gather(*calls)
        assert threads == 1

    on(tmp_path, work)


def test_a_disk_that_closes_gives_back_its_file_and_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handles: list[int] = []
    monkeypatch.setattr(files, "sync_file", handles.append)

    async def work(disk: SpoolFiles) -> None:
        await disk.append(NAME, [b"one"])
        (handle,) = handles
        await disk.close()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(handle)
        again = SpoolFiles(tmp_path)
        await disk.close()  # a second time it closes nothing of others
        await again.append(OTHER, [b"two"])
        await again.close()

    on(tmp_path, work)


# ---- what doctor says ----------------------------------------------------------------------------


def written(folder: Path, *ages_ms: int) -> None:
    for number, age_ms in enumerate(ages_ms):
        path = folder / f"000000000000000{number}-aaaaaaaa.spool"
        path.write_bytes(b"12345")
        os.utime(path, ns=((NOW_MS - age_ms) * 1_000_000,) * 2)


def with_free(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))


def test_segments_wait_too_long_when_they_are_older_than_forwarding_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_free(monkeypatch, 1_000)
    limit_ms = int(FORWARD_S_MAX * 1_000)
    written(tmp_path, limit_ms, 0)
    assert inspect_spool(tmp_path, 1_000, NOW_MS) == (f"{tmp_path}: 2 segments with 10 bytes, 1000 bytes free", "")
    written(tmp_path, limit_ms + 1, limit_ms)
    text, wrong = inspect_spool(tmp_path, 1_000, NOW_MS)
    assert text.endswith(
        f", 1 segments wait for over {FORWARD_S_MAX:g} s, the oldest is 0000000000000000-aaaaaaaa.spool"
    )
    assert "given-up" in wrong


@pytest.mark.parametrize(("free", "enough"), [(90, True), (89, False)])
def test_a_disk_has_room_for_what_the_spool_may_still_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, *, enough: bool
) -> None:
    with_free(monkeypatch, free)
    written(tmp_path, 0, 0)
    _, wrong = inspect_spool(tmp_path, 100, NOW_MS)
    assert wrong == ("" if enough else "spool_bytes_max is 100: free some space, or lower it")


def test_a_folder_that_the_broker_can_not_write_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests may run as root, to whom every folder is open."""
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK | os.X_OK)
    text, wrong = inspect_spool(tmp_path / "later", 100, NOW_MS)
    assert text == f"{tmp_path} can't be written"
    assert wrong.startswith("give the folder to the broker's user")


def test_segments_that_were_set_aside_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_free(monkeypatch, 0)
    (tmp_path / ASIDE).mkdir()
    written(tmp_path / ASIDE, 0)
    text, wrong = inspect_spool(tmp_path, 100, NOW_MS)
    assert text.endswith("0 segments with 0 bytes, 0 bytes free, 1 segments set aside")
    assert str(tmp_path / ASIDE) in wrong
