"""The data folder: created completely, owned by one process, refused if parts are missing."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random

import msgspec
import pytest

from memq.broker.data_folder import DataFolder, make_folder
from memq.errors import (
    CorruptDataError,
    DeniedError,
    InvalidRequestError,
    MemqError,
    StoreError,
    UnsupportedFormatError,
)
from memq.topic import check_name

SPAWN = multiprocessing.get_context("spawn")
NOBODY = 65_534


def open_folder(path: Path, seed: int = 1) -> DataFolder:
    return DataFolder.open(path, Random(seed))


def test_a_new_folder_has_all_parts_and_a_name(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "deep" / "data")
    assert sorted(os.listdir(folder.path)) == ["cluster.json", "lock", "objects", "tmp"]
    assert os.listdir(folder.tmp) == []
    assert check_name(folder.cluster, "cluster") == folder.cluster
    assert (folder.path / "lock").read_text() == f"{os.getpid()}\n"
    assert [path.name for path in (folder.topics, folder.queue)] == ["topics.sqlite", "queue.sqlite"]
    folder.close()
    folder.close()


def test_other_users_can_not_open_what_memq_creates(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir(0o755)
    DataFolder.open(kept / "new" / "data", Random(1)).close()
    modes = {
        path.relative_to(kept).as_posix(): path.stat().st_mode & 0o777 for path in kept.rglob("*") if path.is_dir()
    }
    assert modes.pop("new") == modes.pop("new/data") == 0o700
    assert set(modes.values()) == {0o700}
    assert kept.stat().st_mode & 0o777 == 0o755, "the operator's own"


def test_the_name_stays_and_differs_from_folder_to_folder(tmp_path: Path) -> None:
    names = []
    for path, seed in ((tmp_path / "a", 1), (tmp_path / "b", 2), (tmp_path / "a", 3)):
        folder = open_folder(path, seed)
        names.append(folder.cluster)
        folder.close()
    assert names[0] == names[2] != names[1]


@pytest.mark.parametrize(("number", "hint"), [(errno.EMFILE, "ulimit -n"), (errno.ENOSPC, "check the disk")])
def test_a_folder_that_can_not_be_opened_has_a_hint_that_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, hint: str
) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StoreError, match=f"can't be opened: {os.strerror(number)}") as raised:
        make_folder(tmp_path / "data")
    assert hint in raised.value.hint


def test_a_moved_folder_opens(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "a")
    name = folder.cluster
    folder.close()
    moved = open_folder((tmp_path / "a").rename(tmp_path / "b"))
    assert (moved.cluster, moved.objects) == (name, tmp_path / "b" / "objects")
    moved.close()


def hold(path: Path, pipe: Connection) -> None:
    folder = open_folder(path)
    pipe.send(folder.cluster)
    pipe.recv()


def test_a_second_process_learns_which_process_holds_it_until_that_dies(tmp_path: Path) -> None:
    parent, child = SPAWN.Pipe()
    process = SPAWN.Process(target=hold, args=(tmp_path, child))
    process.start()
    name = parent.recv()
    with pytest.raises(InvalidRequestError, match=f"in use by the process with pid {process.pid}") as caught:
        open_folder(tmp_path)
    assert "--data" in caught.value.hint
    process.kill()
    process.join()
    folder = open_folder(tmp_path)
    assert folder.cluster == name
    with pytest.raises(InvalidRequestError, match=str(os.getpid())):
        open_folder(tmp_path)
    folder.close()


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"id": ".."}', b'{"id": 5, "layout": 1}', b"\xff"])
def test_a_damaged_identity_is_corrupt(tmp_path: Path, body: bytes) -> None:
    open_folder(tmp_path).close()
    (tmp_path / "cluster.json").write_bytes(body)
    with pytest.raises(CorruptDataError, match=r"cluster\.json"):
        open_folder(tmp_path)


def test_a_newer_layout_is_unsupported(tmp_path: Path) -> None:
    open_folder(tmp_path).close()
    identity = msgspec.json.decode((tmp_path / "cluster.json").read_bytes())
    (tmp_path / "cluster.json").write_bytes(msgspec.json.encode(identity | {"layout": 2, "new": True}))
    with pytest.raises(UnsupportedFormatError, match="layout 2"):
        open_folder(tmp_path)


@pytest.mark.parametrize("lost", ["cluster.json", "queue.sqlite", "topics.sqlite"])
def test_a_folder_with_objects_that_lost_a_part_is_not_started_empty(tmp_path: Path, lost: str) -> None:
    """An empty queue names no object, so the sweep would take them all."""
    folder = open_folder(tmp_path)
    for path in (folder.queue, folder.topics):
        path.write_bytes(b"something")
    (folder.objects / "cluster").mkdir()
    folder.close()
    open_folder(tmp_path).close()
    (tmp_path / lost).unlink()
    with pytest.raises(CorruptDataError, match=f"its '{lost}' is missing"):
        open_folder(tmp_path)
    (tmp_path / lost).touch()
    with pytest.raises(CorruptDataError):
        open_folder(tmp_path)


@pytest.mark.parametrize("where", ["", "objects", "lock"])
def test_a_file_in_the_way_or_a_folder_is_refused(tmp_path: Path, where: str) -> None:
    path = tmp_path / "data"
    if where == "lock":
        (path / "lock").mkdir(parents=True)
    elif where:
        path.mkdir()
        (path / where).touch()
    else:
        path.touch()
    with pytest.raises(InvalidRequestError, match="can't be made"):
        open_folder(path)


@pytest.mark.parametrize("file", ["objects/of another program", "cluster.json", "objects"])
def test_nothing_is_put_into_a_folder_that_is_refused(tmp_path: Path, file: str) -> None:
    """The folder of another program got a `lock` and a `tmp`."""
    path = tmp_path / "data"
    (path / file).parent.mkdir(parents=True)
    (path / file).write_bytes(b"something")
    for _ in range(2):
        with pytest.raises(MemqError):
            open_folder(path)
        assert os.listdir(path) == [file.partition("/")[0]]


@pytest.mark.parametrize("inner", ["objects", "objects/new", "spool/new"])
def test_a_new_folder_in_another_data_folder_is_refused(tmp_path: Path, inner: str) -> None:
    """The files of the inner folder would be damaged objects of the outer one."""
    outer = tmp_path / "data"
    open_folder(outer).close()
    before = sorted(outer.rglob("*"))
    with pytest.raises(InvalidRequestError, match="lies in the data folder") as refused:
        open_folder(outer / inner)
    assert "--data" in refused.value.hint
    assert sorted(outer.rglob("*")) == before


@pytest.mark.parametrize("content", [b"notes of the user\n", b"1" * 100, b"12\nand more", b"\xff"])
def test_a_lock_file_of_somebody_else_is_refused_and_kept(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "lock").write_bytes(content)
    for _ in range(2):  # the first refusal lets the lock go
        with pytest.raises(InvalidRequestError, match="has a file 'lock' that memq did not write") as caught:
            open_folder(tmp_path)
        assert "move the file away" in caught.value.hint
        assert (tmp_path / "lock").read_bytes() == content
    assert os.listdir(tmp_path) == ["lock"], "nothing was put next to the files of the user"


@pytest.mark.parametrize("content", [b"", b"12345\n", b"12345", bytes(6), b"7\n" + bytes(4)])
def test_a_lock_file_of_an_earlier_process_is_taken(tmp_path: Path, content: bytes) -> None:
    """A loss of power may leave zeros of it."""
    (tmp_path / "lock").write_bytes(content)
    open_folder(tmp_path).close()
    assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


def open_without_rights(path: Path, pipe: Connection) -> None:
    if os.getuid() == 0:
        os.setuid(NOBODY)
    with pytest.raises(MemqError) as caught:
        open_folder(path)
    pipe.send([type(caught.value), str(caught.value), caught.value.hint])


@pytest.mark.parametrize("there", [True, False])
def test_a_folder_without_rights_is_denied_with_a_hint(there: bool) -> None:
    outside = Path(tempfile.mkdtemp())
    path = outside / "data"
    if there:
        open_folder(path).close()
    outside.chmod(0o555)
    parent, child = SPAWN.Pipe()
    process = SPAWN.Process(target=open_without_rights, args=(path, child))
    process.start()
    child.close()  # a process that dies ends the pipe
    kind, message, hint = parent.recv()
    process.join()
    outside.chmod(0o755)
    shutil.rmtree(outside)
    assert kind is DeniedError
    assert f"data folder '{path}' can't be written" in message
    assert "--data" in hint
