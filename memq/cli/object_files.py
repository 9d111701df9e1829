"""Finds and reads objects by path or URI."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from memq.errors import InvalidRequestError, NotFoundError, TooLargeError

OBJECT_BYTES_MAX = 1 << 30  # over any object that a broker writes: batch_bytes_max is at most 256 MiB


def path_of(target: str) -> Path:
    """Return the path of a file, a folder, or a `file:///…` URI; of a data folder the one with its objects.

    Raises: NotFoundError, InvalidRequestError for other URIs.
    """
    scheme, separator, _ = target.partition("://")
    if separator and scheme != "file":
        raise InvalidRequestError(
            f"can't open '{target[:120]}': no store for '{scheme}'", hint="give a path or file:///path"
        )
    path = Path(unquote(urlsplit(target).path)) if separator else Path(target)
    if not path.exists():
        raise NotFoundError(f"no file or folder '{target[:120]}'", hint="check the path")
    if (path / "cluster.json").is_file() and (path / "objects").is_dir():
        return path / "objects"
    return path


def files_of(path: Path) -> list[Path]:
    """Return the file itself, or every file below a folder, sorted."""
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.is_file())
    return [path]


def read_object(path: Path) -> memoryview:
    """Return an object's bytes. Raises: OSError; InvalidRequestError for a folder, TooLargeError over 1 GiB."""
    if path.is_dir():
        raise InvalidRequestError(f"'{path}' is a folder", hint="name one object")
    size = path.stat().st_size
    if size > OBJECT_BYTES_MAX:
        raise TooLargeError(
            f"'{path}' has {size} bytes, an object has at most {OBJECT_BYTES_MAX}", hint="not an object"
        )
    return memoryview(path.read_bytes())
