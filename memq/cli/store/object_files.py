"""Finds and reads objects by path or URI: files, and objects in buckets."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

from memq.errors import InvalidRequestError, NotFoundError
from memq.format.key import STORE_MARK
from memq.runtime.runtime import Runtime
from memq.settings import Section
from memq.storage_handlers import check_size


@dataclass(frozen=True, slots=True)
class FoundObject:
    """One object: its name in messages, and the function that reads its bytes.

    Retention or a sweep may remove an object after it was `listed`.
    """

    name: str
    read: Callable[[], memoryview]
    listed: bool = False


@dataclass(frozen=True, slots=True)
class ObjectTarget:
    """The objects that a path or a URI names: one, or all below it."""

    name: str
    is_folder: bool
    objects: tuple[FoundObject, ...]


def find_objects(target: str, section: Section) -> ObjectTarget:
    """Return the objects that a path, `file:///…` or `s3://BUCKET/KEY` names; for a data folder, all.

    `section` has the settings of S3.
    Raises: NotFoundError; InvalidRequestError for other URIs; OSError for a folder that can't be read.
    """
    scheme, separator, _ = target.partition("://")
    if separator and scheme == "s3":
        return asyncio.run(_find_in_bucket(target, section))
    path = _path_of(target, scheme if separator else "")
    listed = path.is_dir()
    files = sorted(_files_below(path)) if listed else [path]
    return ObjectTarget(str(path), listed, tuple(FoundObject(str(file), _reader(file), listed) for file in files))


def is_data_folder(target: str | Path) -> bool:
    """Whether a path is the data folder of a memq dev, according to its `cluster.json`."""
    return (Path(target) / "cluster.json").is_file()


def _path_of(target: str, scheme: str) -> Path:
    if scheme and scheme != "file":
        raise InvalidRequestError(
            f"can't open '{target[:120]}': no store for '{scheme}'",
            hint="give a path, file:///path or s3://bucket/key?endpoint=…",
        )
    path = Path(unquote(urlsplit(target).path)) if scheme else Path(target)
    if not target or not path.exists():
        raise NotFoundError(f"no file or folder '{target[:120]}'", hint="check the path")
    if is_data_folder(path) and (path / "objects").is_dir():
        return path / "objects"
    return path


def _files_below(folder: Path) -> Iterator[Path]:
    """Yield the files that may be objects. Raises: OSError for a folder that can't be read."""

    def fail(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # retention removes empty folders meanwhile
            raise error

    for parent, _, names in os.walk(folder, onerror=fail):
        paths = (Path(parent, name) for name in names if name != STORE_MARK)
        yield from (path for path in paths if path.is_file())


def _reader(path: Path) -> Callable[[], memoryview]:
    def read() -> memoryview:
        """Return a file's bytes. Raises: OSError, TooLargeError; InvalidRequestError for a pipe or a device."""
        if path.exists() and not path.is_file():
            raise InvalidRequestError(f"'{path}' is no regular file", hint="name a file, a folder or s3://BUCKET/KEY")
        check_size(str(path), path.stat().st_size)
        return memoryview(path.read_bytes())

    return read


async def _find_in_bucket(target: str, section: Section) -> ObjectTarget:
    """Find the object of this key, else the objects below it."""
    from memq.storage_handlers.s3 import open_store

    parts = urlsplit(target)
    key = unquote(parts.path).strip("/")
    bucket = urlunsplit((parts.scheme, parts.netloc, "", parts.query, ""))
    store = open_store(bucket, Runtime(), section)

    def found(name: str, *, listed: bool) -> FoundObject:
        def read() -> memoryview:
            return memoryview(asyncio.run(_read(bucket, section, name)))

        return FoundObject(f"s3://{parts.netloc}/{name}", read, listed)

    try:
        if key:
            try:
                await store.size(key)
            except NotFoundError:
                pass
            else:
                return ObjectTarget(target, False, (found(key, listed=False),))
        below = [entry.key async for entry in store.list(f"{key}/" if key else "")]
        below = [each for each in below if each.rpartition("/")[2] != STORE_MARK]
    finally:
        await store.close()
    if key and not below:
        raise NotFoundError(f"no object '{key}' in bucket '{parts.netloc}', and none below it", hint="check the key")
    return ObjectTarget(target, True, tuple(found(each, listed=True) for each in below))


async def _read(bucket: str, section: Section, key: str) -> bytes:
    from memq.storage_handlers.s3 import open_store

    store = open_store(bucket, Runtime(), section)
    try:
        return await store.get(key, checked=False)
    finally:
        await store.close()
