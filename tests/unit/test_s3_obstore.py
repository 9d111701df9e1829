"""What is asked of obstore: whole puts where nothing lies, folders that are listed; the library's calls are noted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from typing import Any

import obstore
import pytest
from awscrt.checksums import crc32c

from memq.storage_handlers.s3.data_path import PutOrder
from memq.storage_handlers.s3.obstore_path import ObstorePath
from memq.storage_handlers.s3.settings import read_bucket


def path(**settings: str) -> ObstorePath:
    section: dict[str, tuple[object, str]] = {name: (value, "the test") for name, value in settings.items()}
    keys: dict[str, tuple[object, str]] = {
        "access_key_id": ("id", "the test"),
        "secret_access_key": ("key", "the test"),
    }
    return ObstorePath(read_bucket("s3://memq/f?endpoint=http://127.0.0.1:1", section | keys))


@pytest.mark.parametrize("body", [b"", b"0123"])
def test_a_put_is_one_request_that_fails_where_something_lies(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    """A put in parts by obstore has no condition: it would replace an object."""
    said: list[Any] = []

    async def put_async(store: Any, key: str, file: Sequence[memoryview], **options: Any) -> None:
        said.append((key, b"".join(file), options))

    monkeypatch.setattr(obstore, "put_async", put_async)
    views = [memoryview(body)] if body else []
    asyncio.run(path(storage_class="ONEZONE_IA").put(PutOrder("f/k", views, len(body), crc32c(body))))
    ((key, sent, options),) = said
    marks = options["attributes"]
    assert (key, sent, options["mode"], options["use_multipart"]) == ("f/k", body, "create", False)
    assert marks.pop("Content-Type") == "application/octet-stream"
    assert marks.pop("Storage-Class") == "ONEZONE_IA"
    assert list(marks.values()) == [f"{crc32c(body):08x}"]


@pytest.mark.parametrize(
    ("prefix", "after", "asked"),
    [("f/a/b", "", ("f/a", None)), ("f/", "f/c", ("f", "f/c")), ("", "", (None, None)), ("f", "", (None, None))],
)
def test_a_listing_is_that_of_the_folder_without_names_that_begin_otherwise(
    monkeypatch: pytest.MonkeyPatch, prefix: str, after: str, asked: tuple[str | None, str | None]
) -> None:
    said: list[Any] = []
    names = [f"{prefix}x", "other/y", f"{prefix}z"]

    async def pages() -> AsyncIterator[list[dict[str, Any]]]:
        for part in (names[:2], names[2:]):
            yield [{"path": name, "size": 5, "last_modified": datetime.fromtimestamp(7, UTC)} for name in part]

    def listed(store: Any, folder: str | None, *, offset: str | None, chunk_size: int) -> Any:
        said.append((folder, offset))
        return pages()

    monkeypatch.setattr(obstore, "list", listed)

    async def work() -> list[Any]:
        return [entry async for page in path().pages(prefix, after) for entry in page]

    found = asyncio.run(work())
    assert said == [asked]
    assert [entry.key for entry in found] == [name for name in names if name.startswith(prefix)]
    assert {(entry.size, entry.modified_ms) for entry in found} == {(5, 7_000)}
