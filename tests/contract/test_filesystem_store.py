"""Promises of the filesystem store alone: durability, torn writes, errors of the system, races."""

from __future__ import annotations

import asyncio
import errno
import mmap
import multiprocessing
import os
import random
import resource
import shutil
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from awscrt.checksums import crc32c

from memq.errors import (
    ClosedError,
    CorruptDataError,
    DeniedError,
    InvalidRequestError,
    MemqError,
    NotFoundError,
    ObjectExistsError,
    StoreError,
)
from memq.storage_handlers import KEPT_CHECK, files
from memq.storage_handlers.files import DIRECT_BYTES_MIN
from memq.storage_handlers.filesystem import FilesystemHandler, TempSweep
from tests.contract.stores import open_filesystem

SPAWN = multiprocessing.get_context("spawn")
NOBODY = 65_534
WRITES: dict[str, Callable[..., int]] = {"writev": os.writev, "pwrite": os.pwrite}
DIRECT = pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="direct writes are Linux's")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FilesystemHandler]:
    handler = open_filesystem(tmp_path)
    yield handler
    asyncio.run(handler.close())


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users can reach, which pytest's own are not."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def temporary_files(folder: Path) -> list[str]:
    return sorted(os.listdir(folder / "tmp"))


async def put(store: FilesystemHandler, key: str, body: bytes) -> None:
    await store.put(key, [body], crc32c(body))


# ---- around the page cache -------------------------------------------------------------------


@DIRECT
@pytest.mark.parametrize("size", [DIRECT_BYTES_MIN, DIRECT_BYTES_MIN + 1, (1 << 20) - 1, 1 << 20, (3 << 20) + 4_097])
@pytest.mark.parametrize("buffers", [1, 7])
def test_a_large_object_is_written_directly_and_whole(
    store: FilesystemHandler, size: int, buffers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "writev")  # the other way
    body = random.Random(size).randbytes(size)
    cuts = [size * number // buffers for number in range(buffers + 1)]
    views = [memoryview(body)[start:end] for start, end in pairwise(cuts)]
    asyncio.run(store.put("a", views, crc32c(body)))
    assert asyncio.run(store.get("a")) == body
    asyncio.run(store.put("a", views, crc32c(body)))
    with pytest.raises(CorruptDataError, match="its bytes have crc32c"):
        asyncio.run(store.put("b", views, crc32c(body) ^ 1))
    with pytest.raises(NotFoundError):
        asyncio.run(store.get("b"))


@DIRECT
@pytest.mark.parametrize("refuser", ["open", "pwrite"])
def test_a_file_system_without_direct_writes_is_asked_once(
    store: FilesystemHandler, tmp_path: Path, refuser: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, real = 0, getattr(os, refuser)

    def refuse(*args: Any) -> int:
        nonlocal asked
        if refuser == "open" and not args[1] & os.O_DIRECT:
            return int(real(*args))
        asked += 1
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, refuser, refuse)
    body = random.Random(1).randbytes(3 << 20)
    for key in ("a", "b"):
        asyncio.run(put(store, key, body))
        assert asyncio.run(store.get(key)) == body
    assert (asked, temporary_files(tmp_path)) == (1, [])


@DIRECT
def test_a_disk_that_fills_up_in_the_midst_of_a_direct_write_leaves_nothing(
    store: FilesystemHandler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, room = os.pwrite, [3 * 4_096 + 5]

    def write(handle: int, data: memoryview, offset: int) -> int:
        length = min(len(data), room[0])
        room[0] -= length
        return real(handle, data[: length // 512 * 512], offset)

    monkeypatch.setattr(os, "pwrite", write)
    with pytest.raises(StoreError, match="no space left") as caught:
        asyncio.run(put(store, "a", bytes(DIRECT_BYTES_MIN)))
    assert "the disk is full" in caught.value.hint
    assert temporary_files(tmp_path) == []


@DIRECT
def test_writes_one_after_another_share_the_memory_of_one(
    store: FilesystemHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    real = mmap.mmap

    def counted(handle: int, length: int) -> mmap.mmap:
        made.append(length)
        return real(handle, length)

    monkeypatch.setattr(mmap, "mmap", counted)
    for number in range(3):
        asyncio.run(put(store, str(number), bytes(2 << 20)))
    assert len(made) == 1


@DIRECT
def test_a_direct_write_that_is_refused_behind_its_first_chunk_is_an_error(
    store: FilesystemHandler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite

    def write(handle: int, data: memoryview, offset: int) -> int:
        if offset:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(handle, data, offset)

    monkeypatch.setattr(os, "pwrite", write)
    with pytest.raises(StoreError):
        asyncio.run(put(store, "a", bytes(3 << 20)))
    assert temporary_files(tmp_path) == []
    with pytest.raises(NotFoundError):
        asyncio.run(store.get("a"))


# ---- durability ------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc to see what is synced")
def test_the_file_is_synced_before_its_name_and_every_folder_after_it(
    store: FilesystemHandler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A spy on the real fsync notes what is synced, and what its folder holds at that moment."""
    synced: list[tuple[str, list[str]]] = []
    real = os.fsync

    def spy(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        synced.append((path.relative_to(tmp_path).parts[0] if path.is_file() else str(path.relative_to(tmp_path)), []))
        if path.is_dir():
            synced[-1][1].extend(sorted(os.listdir(path)))
        real(handle)

    monkeypatch.setattr(os, "fsync", spy)
    asyncio.run(put(store, "a/b/one", b"1"))
    assert synced == [("tmp", []), ("objects/a/b", ["one"]), ("objects/a", ["b"]), ("objects", ["a"])]
    synced.clear()
    asyncio.run(put(store, "a/b/two", b"2"))
    assert synced == [("tmp", []), ("objects/a/b", ["one", "two"])]
    synced.clear()
    asyncio.run(put(store, "a/b/two", b"2"))
    assert synced[-1] == ("objects/a/b", ["one", "two"]), "an object that was there may not be durable yet"
    asyncio.run(store.delete("a/b/one"))
    asyncio.run(store.delete("a/b/two"))
    synced.clear()
    asyncio.run(put(store, "a/b/one", b"1"))
    assert synced[1:] == [("objects/a/b", ["one"]), ("objects/a", ["b"]), ("objects", ["a"])]


def test_a_new_handler_trusts_no_folder_that_it_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "objects" / "a").mkdir(parents=True)
    store = open_filesystem(tmp_path)
    calls: list[int] = []
    real = os.fsync

    def spy(handle: int) -> None:
        calls.append(handle)
        real(handle)

    monkeypatch.setattr(os, "fsync", spy)
    asyncio.run(put(store, "a/one", b"1"))
    asyncio.run(store.close())
    assert len(calls) == 3  # the file, the root for `a`, `a` for the name


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc to see what is synced")
def test_folders_that_are_known_to_be_durable_are_forgotten_at_their_bound(
    store: FilesystemHandler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memq.storage_handlers.files.KNOWN_FOLDERS_MAX", 2)
    synced: list[str] = []
    real = os.fsync

    def spy(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        synced.append(str(path.relative_to(tmp_path / "objects")) if path.is_dir() else "file")
        real(handle)

    monkeypatch.setattr(os, "fsync", spy)
    for folder in ("a", "b", "a", "c", "c", "a"):
        asyncio.run(put(store, f"{folder}/{len(synced)}", b"1"))
    assert [each for each in synced if each != "file"] == ["a", ".", "b", ".", "a", "c", ".", "c", "a", "."]


# ---- torn and cancelled puts -----------------------------------------------------------------


def test_a_put_leaves_no_temporary_file_whatever_its_end(store: FilesystemHandler, tmp_path: Path) -> None:
    async def scenario() -> None:
        await put(store, "a", b"1")
        with pytest.raises(MemqError):
            await put(store, "a", b"2")
        with pytest.raises(MemqError):
            await put(store, "a/below", b"3")
        with pytest.raises(CorruptDataError):
            await store.put("b", [b"4"], 0)

    asyncio.run(scenario())
    assert temporary_files(tmp_path) == []


def test_torn_temporary_files_are_swept_and_counted(store: FilesystemHandler, tmp_path: Path) -> None:
    (tmp_path / "tmp" / "77-0").write_bytes(b"half an obj")
    (tmp_path / "tmp" / "77-1").write_bytes(b"")
    for name in ("notes.txt", "77-0.txt", "2026-11-25"):
        (tmp_path / "tmp" / name).write_bytes(b"of the user")
    asyncio.run(put(store, "a", b"whole"))
    assert asyncio.run(store.sweep_temp()) == TempSweep(files=2, bytes=11)
    assert asyncio.run(store.sweep_temp()) == TempSweep(files=0, bytes=0)
    assert temporary_files(tmp_path) == ["2026-11-25", "77-0.txt", "notes.txt"], "what no put made stays"
    assert asyncio.run(store.get("a")) == b"whole"


def test_a_temporary_file_of_an_earlier_process_with_this_pid_is_passed_over(
    store: FilesystemHandler, tmp_path: Path
) -> None:
    left = tmp_path / "tmp" / f"{os.getpid()}-0"
    left.write_bytes(b"torn")
    asyncio.run(put(store, "a", b"whole"))
    assert (left.read_bytes(), asyncio.run(store.get("a"))) == (b"torn", b"whole")


def test_a_cancelled_put_has_let_go_of_the_buffers(
    store: FilesystemHandler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The buffers change as soon as the cancellation is through: no object may show that."""
    size = 8 << 20

    async def scenario() -> int:
        loop = asyncio.get_running_loop()
        stored = 0
        for turn in range(8):
            buffer = bytearray(size)
            writing = asyncio.Event()

            def spy(*args: Any, real: Callable[..., int], writing: asyncio.Event = writing) -> int:
                loop.call_soon_threadsafe(writing.set)
                return real(*args)

            for name, real in WRITES.items():
                monkeypatch.setattr(os, name, partial(spy, real=real))
            task = asyncio.create_task(store.put(f"turn/{turn}", [buffer], crc32c(bytes(size))))
            await writing.wait()
            task.cancel()
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            buffer[:] = b"\xff" * size
            assert temporary_files(tmp_path) == [], "the thread still works on it"
            found = [entry async for entry in store.list(f"turn/{turn}")]
            assert [await store.get(entry.key) == bytes(size) for entry in found] in ([], [True])
            stored += len(found)
        return stored

    assert asyncio.run(scenario()) == 8, "a put that runs is finished"


def test_a_put_without_a_thread_is_given_up_at_once(store: FilesystemHandler, monkeypatch: pytest.MonkeyPatch) -> None:
    real, go_on = os.fsync, threading.Event()

    def held(handle: int) -> None:
        go_on.wait(60)
        real(handle)

    async def scenario() -> list[str]:
        tasks = [asyncio.create_task(put(store, f"k{number:02d}", bytes(1 << 20))) for number in range(40)]
        await asyncio.sleep(0)
        for task in tasks[20:]:
            task.cancel()
        results = await asyncio.gather(*tasks[20:], return_exceptions=True)  # while each thread is held by its put
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        go_on.set()
        await asyncio.gather(*tasks[:20])
        return [entry.key async for entry in store.list()]

    monkeypatch.setattr(os, "fsync", held)
    assert asyncio.run(scenario()) == [f"k{number:02d}" for number in range(20)]


# ---- races -----------------------------------------------------------------------------------


def race_puts(folder: Path, start: Connection, byte: int) -> None:
    async def run() -> list[bool]:
        store = open_filesystem(folder)
        won = []
        for turn in range(50):
            with suppress(ObjectExistsError):
                await put(store, f"race/{turn:02d}", bytes([byte]) * 100_000)
            won.append((await store.get(f"race/{turn:02d}"))[0] == byte)
        await store.close()
        return won

    start.recv()
    start.send(asyncio.run(run()))


def test_one_process_of_several_wins_each_put(tmp_path: Path) -> None:
    open_filesystem(tmp_path)
    pipes = [SPAWN.Pipe() for _ in range(3)]
    processes = [SPAWN.Process(target=race_puts, args=(tmp_path, child, byte)) for byte, (_, child) in enumerate(pipes)]
    for process in processes:
        process.start()
    for parent, _ in pipes:
        parent.send("go")
    results = [parent.recv() for parent, _ in pipes]
    for process in processes:
        process.join()
    assert [sum(turn) for turn in zip(*results, strict=True)] == [1] * 50
    assert temporary_files(tmp_path) == []


def test_puts_and_deletes_in_the_same_folders_never_lose_an_object(store: FilesystemHandler, tmp_path: Path) -> None:
    async def come_and_go(number: int) -> None:
        for turn in range(60):
            key = f"shared/{turn % 3}/deep/{number}"
            await put(store, key, b"x")
            assert await store.get(key) == b"x"
            await store.delete(key)

    async def scenario() -> None:
        await asyncio.gather(*(come_and_go(number) for number in range(6)))
        assert [entry async for entry in store.list()] == []

    asyncio.run(scenario())
    assert os.listdir(tmp_path / "objects") == [], "empty folders go"


def test_folders_that_another_process_removes_are_made_again(store: FilesystemHandler, tmp_path: Path) -> None:
    async def scenario() -> None:
        other = open_filesystem(tmp_path)
        for key in ("a/b/1", "a/b/2", "a/b/3"):
            await put(store, key, b"x")
            await other.delete(key)
            assert os.listdir(tmp_path / "objects") == []
        await other.close()

    asyncio.run(scenario())


def test_checks_of_several_processes_do_not_disturb_each_other(store: FilesystemHandler, tmp_path: Path) -> None:
    async def check(handler: FilesystemHandler) -> None:
        for _ in range(50):
            await handler.check()

    async def scenario() -> None:
        other = open_filesystem(tmp_path)
        await asyncio.gather(check(store), check(other))
        await other.close()

    asyncio.run(scenario())
    assert os.listdir(tmp_path / "objects") == []


@pytest.mark.parametrize(("place", "name"), [(files.ObjectFiles, "delete"), (os, "scandir")])
def test_a_check_lists_and_deletes_nothing_if_its_process_may_not(
    place: object, name: str, store: FilesystemHandler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*parts: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    async def scenario() -> None:
        await store.check(deletes=False)
        await store.check(deletes=False)
        with pytest.raises(DeniedError):
            await store.check()

    monkeypatch.setattr(place, name, refuse)
    asyncio.run(scenario())
    assert (tmp_path / "objects" / KEPT_CHECK).is_file()


# ---- what the operating system refuses -------------------------------------------------------


def put_over_limit(folder: Path, answer: Connection) -> None:
    """A limit on the size of files is the full disk that every machine has."""
    store = open_filesystem(folder)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))

    async def run() -> list[str]:
        await put(store, "small", bytes(1 << 20))
        with pytest.raises(StoreError) as caught:
            await put(store, "large", bytes(3 << 20))
        said = [str(caught.value), caught.value.hint]
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        await put(store, "large", bytes(3 << 20))
        said += [f"{entry.key} {entry.size}" async for entry in store.list()]
        await store.close()
        return said

    answer.send(asyncio.run(run()))


def test_a_disk_that_takes_no_more_is_a_store_error_and_leaves_nothing(tmp_path: Path) -> None:
    message, hint, *listing = in_process(put_over_limit, tmp_path)
    assert "object 'large' not stored: file too large" in message
    assert "ulimit" in hint
    assert listing == [f"large {3 << 20}", f"small {1 << 20}"]
    assert temporary_files(tmp_path) == []


def put_without_rights(folder: Path, answer: Connection) -> None:
    if os.getuid() == 0:
        os.setuid(NOBODY)

    async def run() -> list[str]:
        store = open_filesystem(folder)
        said = [(await store.get("there")).decode()]
        for call in (put(store, "new", b"1"), store.delete("there"), store.check()):
            with pytest.raises(DeniedError) as caught:
                await call
            said.append(f"{caught.value} | {caught.value.hint}")
        await store.close()
        return said

    answer.send(asyncio.run(run()))


def test_a_disk_that_gives_other_bytes_fails_the_check_of_the_store(
    store: FilesystemHandler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "read_exactly", lambda file, key, offset, length: bytes(length))
    with pytest.raises(StoreError, match="read back with other bytes") as caught:
        asyncio.run(store.check())
    assert caught.value.hint == "the disk fails: check the system's log"
    assert [each for each in tmp_path.rglob("*") if each.is_file()] == []


def test_a_folder_without_rights_is_denied_with_a_hint(open_folder: Path) -> None:
    async def prepare() -> None:
        store = open_filesystem(open_folder)
        await put(store, "there", b"readable")
        await store.close()

    asyncio.run(prepare())
    folders = (open_folder / "objects", open_folder / "tmp")
    for folder in folders:
        folder.chmod(0o555)
    (open_folder / "objects" / "there").chmod(0o444)  # memq gives it to its owner alone
    read, *refused = in_process(put_without_rights, open_folder)
    for folder in folders:
        folder.chmod(0o755)
    assert read == "readable"
    assert len(refused) == 3
    assert all("permission denied | give memq the right" in text for text in refused)


def in_process(target: object, folder: Path) -> list[str]:
    parent, child = SPAWN.Pipe()
    process = SPAWN.Process(target=target, args=(folder, child))  # type: ignore[arg-type]
    process.start()
    child.close()
    said: list[str] = parent.recv()
    process.join()
    return said


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, StoreError),
        (errno.EIO, StoreError),
        (errno.EACCES, DeniedError),
        (errno.EROFS, DeniedError),
        (errno.EXDEV, InvalidRequestError),
        (errno.ENOTTY, StoreError),
    ],
)
def test_each_refusal_has_its_kind(
    store: FilesystemHandler, number: int, kind: type[MemqError], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(kind, match="object 'a' not stored: ") as caught:
        asyncio.run(put(store, "a", b"1"))
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize(("number", "kind"), [(errno.EIO, StoreError), (errno.EACCES, DeniedError)])
def test_object_that_can_not_be_listed_read_or_deleted_is_an_error(
    store: FilesystemHandler, number: int, kind: type[MemqError], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def keys() -> list[str]:
        return [entry.key async for entry in store.list("a/")]

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    calls: list[tuple[object, str, Callable[[], Coroutine[Any, Any, object]]]] = [
        (os, "scandir", keys),
        (Path, "unlink", lambda: store.delete("a/b")),
        (Path, "stat", lambda: store.size("a/b")),
        (files, "FileIO", lambda: store.get("a/b")),
        (files, "FileIO", lambda: store.get_range("a/b", 0, 1)),
    ]
    asyncio.run(put(store, "a/b", b"1"))
    for owner, name, call in calls:
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, refuse)
            with pytest.raises(kind):
                asyncio.run(call())
    assert asyncio.run(keys()) == ["a/b"]


def test_a_store_whose_folder_went_says_so(store: FilesystemHandler, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "objects")
    with pytest.raises(StoreError, match="no such file") as caught:
        asyncio.run(put(store, "a/b", b"1"))
    assert "the folder of the store is gone" in caught.value.hint


def test_a_cut_object_is_corrupt_and_not_a_short_answer(store: FilesystemHandler, tmp_path: Path) -> None:
    asyncio.run(put(store, "a", b"12345678"))
    os.truncate(tmp_path / "objects" / "a", 3)
    with pytest.raises(CorruptDataError, match="3 bytes"):
        asyncio.run(store.get_range("a", 2, 4))


def test_after_close_every_call_is_refused(store: FilesystemHandler) -> None:
    async def scenario() -> None:
        running = asyncio.create_task(put(store, "a", b"1"))
        await asyncio.sleep(0)
        await store.close()
        await running
        with pytest.raises(ClosedError):
            await store.get("a")

    asyncio.run(scenario())


def test_an_error_without_a_number_is_none_of_rights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: object, key: str) -> None:
        raise OSError("odd")

    monkeypatch.setattr(files.ObjectFiles, "delete", failing)

    async def work() -> None:
        store = open_filesystem(tmp_path)
        with pytest.raises(StoreError, match="odd"):
            await store.delete("k")
        await store.close()

    asyncio.run(work())
