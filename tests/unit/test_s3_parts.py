"""A multipart upload over aiobotocore: requests, and the effects of a failure; on a client in memory."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import obstore
import pytest
from awscrt.checksums import crc32c
from botocore.exceptions import ClientError
from obstore.exceptions import BaseError

from memq.errors import InvalidSettingError
from memq.storage_handlers.s3.aio_path import AioPath
from memq.storage_handlers.s3.answers import StoreAnswer
from memq.storage_handlers.s3.data_path import PutOrder
from memq.storage_handlers.s3.obstore_path import ObstorePath
from memq.storage_handlers.s3.settings import Bucket, read_bucket

pytest.importorskip("aiobotocore")
BODY = b"0123456789"
UPLOAD = {"Bucket": "memq", "Key": "f/k", "UploadId": "u1"}


class Client:
    """A bucket's uploads: parts that arrived, how many are on the way, and what ended them.

    `failing` is the number of a part that is refused while the others hang.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.parts: dict[int, bytes] = {}
        self.on_the_way = self.most = 0
        self.failing = 0
        self.refused: dict[str, int] = {}
        self.at_abort = -1

    def _note(self, name: str, said: dict[str, Any]) -> None:
        self.calls.append((name, said))
        if name in self.refused:
            status = {"HTTPStatusCode": self.refused[name]}
            raise ClientError({"Error": {"Code": "No"}, "ResponseMetadata": status}, name)

    async def create_multipart_upload(self, **said: Any) -> dict[str, str]:
        self._note("create", said)
        return {"UploadId": "u1"}

    async def upload_part(self, **said: Any) -> dict[str, str]:
        self.on_the_way += 1
        self.most = max(self.most, self.on_the_way)
        try:
            if self.failing == said["PartNumber"]:
                self.refused["part"] = 503
                self._note("part", said)
            await (asyncio.Event().wait() if self.failing else asyncio.sleep(0))
            self.calls.append(("part", said))
            self.parts[said["PartNumber"]] = said["Body"]
            return {"ETag": f"e{said['PartNumber']}"}
        finally:
            self.on_the_way -= 1

    async def complete_multipart_upload(self, **said: Any) -> dict[str, str]:
        self._note("complete", said)
        return {"ETag": "whole", "ChecksumCRC32C": said["ChecksumCRC32C"]}

    async def abort_multipart_upload(self, **said: Any) -> None:
        self.at_abort = self.on_the_way
        self._note("abort", said)

    async def put_object(self, **said: Any) -> dict[str, str]:
        self._note("put", said)
        return {"ETag": "whole", "ChecksumCRC32C": said["ChecksumCRC32C"]}

    async def delete_object(self, **said: Any) -> None:
        self._note("delete", said)


class PathOnClient(AioPath):
    """A data path whose library is a client in memory."""

    def __init__(self, bucket: Bucket, client: Client) -> None:
        super().__init__(bucket)
        self.client = client

    def _make_client(self) -> Any:
        @asynccontextmanager
        async def made() -> AsyncIterator[Client]:
            yield self.client

        return made()


def put(prepare: Callable[[Client], None] = lambda _: None, *, least: int = 1, body: bytes = BODY) -> Client:
    """Put a body in parts of 4 bytes, two at once."""
    client = Client()
    prepare(client)
    bucket = read_bucket("s3://memq/f?endpoint=http://h", {})
    settings = replace(bucket.settings, part_bytes=4, multipart_bytes_min=least, parts_in_flight_max=2)

    async def work() -> None:
        path = PathOnClient(replace(bucket, settings=settings), client)
        await path.open()
        await path.put(PutOrder("f/k", [memoryview(body[:3]), memoryview(body[3:])], len(body), crc32c(body)))

    try:
        asyncio.run(work())
    except StoreAnswer as answer:
        client.calls.append(("failed", {"status": answer.status}))
    return client


def base64(data: bytes) -> str:
    return b64encode(crc32c(data).to_bytes(4, "big")).decode()


def test_parts_are_sent_with_their_checksums_some_at_a_time_and_named_as_one_object_where_nothing_lies() -> None:
    client = put()
    assert client.parts == {1: b"0123", 2: b"4567", 3: b"89"}
    assert client.most == 2
    made, *sent, done = client.calls
    assert made[1]["ChecksumType"] == done[1]["ChecksumType"] == "FULL_OBJECT"
    assert made[1]["ChecksumAlgorithm"] == "CRC32C"
    assert list(made[1]["Metadata"].values()) == [f"{crc32c(BODY):08x}"]
    for _, said in sent:
        assert said["ChecksumCRC32C"] == base64(said["Body"])
        assert said.items() >= UPLOAD.items()
    parts = [
        {"PartNumber": number, "ETag": f"e{number}", "ChecksumCRC32C": base64(body)}
        for number, body in sorted(client.parts.items())
    ]
    assert done == (
        "complete",
        UPLOAD
        | {
            "IfNoneMatch": "*",
            "MultipartUpload": {"Parts": parts},
            "ChecksumCRC32C": base64(BODY),
            "ChecksumType": "FULL_OBJECT",
        },
    )


def test_an_object_below_the_least_size_goes_in_one_request() -> None:
    ((name, said),) = put(least=len(BODY) + 1).calls
    assert (name, said["Body"], said["IfNoneMatch"], said["ChecksumCRC32C"]) == ("put", BODY, "*", base64(BODY))
    assert next(name for name, _ in put(least=len(BODY)).calls) == "create"


def failing_part(client: Client) -> None:
    client.failing = 2


def test_no_part_is_on_the_way_when_an_upload_is_thrown_away() -> None:
    """One that arrives later may stay, and be paid for."""
    client = put(failing_part)
    assert [name for name, _ in client.calls] == ["create", "part", "abort", "failed"]
    assert client.calls[2][1] == UPLOAD
    assert (client.at_abort, client.on_the_way) == (0, 0)


@pytest.mark.parametrize("abort", [0, 500])
def test_refused_multipart_upload_is_aborted_and_its_refusal_counts(abort: int) -> None:
    def refusing(client: Client) -> None:
        client.refused = {"complete": 412} | ({"abort": abort} if abort else {})

    client = put(refusing)
    assert [name for name, _ in client.calls][-3:] == ["complete", "abort", "failed"]
    assert client.calls[-1][1] == {"status": 412}


def test_nothing_is_thrown_away_when_an_upload_can_not_begin() -> None:
    def refusing(client: Client) -> None:
        client.refused = {"create": 403}

    assert [name for name, _ in put(refusing).calls] == ["create", "failed"]


@pytest.mark.parametrize("status", [0, 403])
def test_a_deletion_is_one_request_and_its_refusal_is_an_answer(status: int) -> None:
    client = Client()
    client.refused = {"delete": status} if status else {}

    async def work() -> int:
        path = PathOnClient(read_bucket("s3://memq/f?endpoint=http://h", {}), client)
        await path.open()
        try:
            await path.delete("f/k")
        except StoreAnswer as answer:
            return answer.status
        return 0

    assert asyncio.run(work()) == status
    assert client.calls == [("delete", {"Bucket": "memq", "Key": "f/k"})]


def test_an_authority_that_can_not_be_read_is_reported_at_the_opening(tmp_path: Path) -> None:
    section: dict[str, tuple[object, str]] = {
        "ca_file": (str(tmp_path / "none.pem"), "the test"),
        "access_key_id": ("id", "the test"),
        "secret_access_key": ("key", "the test"),
    }

    async def work() -> None:
        path = AioPath(read_bucket("s3://memq/f?endpoint=https://h", section))
        try:
            await path.open()
        finally:
            await path.close()

    with pytest.raises(InvalidSettingError, match=r"can't read ca_file '.*none\.pem': No such file"):
        asyncio.run(work())


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

    async def put_async(store: Any, key: str, file: Sequence[memoryview], **options: Any) -> dict[str, str]:
        said.append((key, b"".join(file), options))
        return {"e_tag": f'"{crc32c(body):032x}"'}

    monkeypatch.setattr(obstore, "put_async", put_async)
    views = [memoryview(body)] if body else []
    asyncio.run(path(storage_class="ONEZONE_IA").put(PutOrder("f/k", views, len(body), crc32c(body))))
    ((key, sent, options),) = said
    marks = options["attributes"]
    assert (key, sent, options["mode"], options["use_multipart"]) == ("f/k", body, "create", False)
    assert marks.pop("Content-Type") == "application/octet-stream"
    assert marks.pop("Storage-Class") == "ONEZONE_IA"
    assert list(marks.values()) == [f"{crc32c(body):08x}"]


@pytest.mark.parametrize("kind", [FileNotFoundError, PermissionError, ValueError, BaseError])
def test_each_error_of_obstore_is_an_answer(kind: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(store: Any, key: str) -> None:
        raise kind("status: 403 Forbidden")

    monkeypatch.setattr(obstore, "delete_async", refused)
    with pytest.raises(StoreAnswer) as caught:
        asyncio.run(path().delete("f/k"))
    assert caught.value.status == 403


def test_a_part_of_an_object_is_read_from_its_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    async def get_range_async(store: Any, key: str, *, start: int = 0, length: int) -> bytes:
        return BODY[start : start + length] if key == "f/k" else b""

    monkeypatch.setattr(obstore, "get_range_async", get_range_async)
    assert asyncio.run(path().get_range("f/k", 3, 4)) == b"3456"


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
        return pages() if len(said) == 1 else nothing()

    async def nothing() -> AsyncIterator[list[dict[str, Any]]]:
        no_pages: list[list[dict[str, Any]]] = []
        for page in no_pages:
            yield page

    async def absent(store: Any, key: str) -> None:
        raise FileNotFoundError("status: 404 Not Found <Code>NoSuchKey</Code>")

    monkeypatch.setattr(obstore, "list", listed)
    monkeypatch.setattr(obstore, "get_async", absent)

    async def work() -> list[Any]:
        return [entry async for page in path().pages(prefix, after) for entry in page]

    found = asyncio.run(work())
    assert said == [asked, (asked[0], max(names[1:]))]
    assert [entry.key for entry in found] == [name for name in names if name.startswith(prefix)]
    assert {(entry.size, entry.modified_ms) for entry in found} == {(5, 7_000)}
