"""Where `path` points to: the store, and what the keys below begin with; and a path that has no objects."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from memq.errors import DeniedError, NotFoundError
from memq.runtime.network import Runtime
from memq.spark.options import read_options
from memq.spark.read.pruning import ReadFilter
from memq.spark.read.raw import plan_raw, split_path


@pytest.mark.parametrize(
    ("path", "root", "prefix"),
    [
        ("/srv/objects", "file:///srv/objects", ""),
        ("/srv/objects/c-1/topics/clicks/", "file:///srv/objects", "c-1/topics/clicks/"),
        ("file:/srv/objects/c-1/topics/clicks", "file:///srv/objects", "c-1/topics/clicks/"),
        ("s3://bucket/c-1/topics/clicks", "s3://bucket/", "c-1/topics/clicks/"),
        ("s3://bucket/prefix/c-1/shared?endpoint=http://h:1", "s3://bucket/prefix?endpoint=http://h:1", "c-1/shared/"),
    ],
)
def test_a_path_is_a_store_and_a_prefix(path: str, root: str, prefix: str) -> None:
    assert split_path(path) == (root, prefix)


@pytest.mark.parametrize("scheme", ["", "file:"])
def test_a_path_counts_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert split_path(f"{scheme}objects/c-1/topics/clicks") == (f"file://{tmp_path}/objects", "c-1/topics/clicks/")
    assert split_path(f"{scheme}../objects") == (f"file://{tmp_path.parent}/objects", "")


def test_a_path_without_objects_is_named(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not memq's")
    for name, error in (("", NotFoundError), ("c-1/topics/clicks", NotFoundError)):
        with pytest.raises(error, match=f"no objects of memq exist below '{tmp_path}"):
            asyncio.run(plan_raw(read_options({"path": str(tmp_path / name)}), ReadFilter(), Runtime()))
    with pytest.raises(DeniedError, match=r"folder '.*/nowhere' is not on this machine"):
        asyncio.run(plan_raw(read_options({"path": str(tmp_path / "nowhere")}), ReadFilter(), Runtime()))
