"""An object in parts over aiobotocore: what is sent, and what a failure leaves; on a client in memory."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from awscrt.checksums import crc32c
from botocore.exceptions import ClientError

from memq.storage_handlers.s3.aio_path import AioPath
from memq.storage_handlers.s3.answers import StoreAnswer
from memq.storage_handlers.s3.data_path import PutOrder
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

    async def complete_multipart_upload(self, **said: Any) -> None:
        self._note("complete", said)

    async def abort_multipart_upload(self, **said: Any) -> None:
        self.at_abort = self.on_the_way
        self._note("abort", said)

    async def put_object(self, **said: Any) -> None:
        self._note("put", said)


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
def test_what_can_not_be_named_is_thrown_away_and_the_refusal_is_what_counts(abort: int) -> None:
    def refusing(client: Client) -> None:
        client.refused = {"complete": 412} | ({"abort": abort} if abort else {})

    client = put(refusing)
    assert [name for name, _ in client.calls][-3:] == ["complete", "abort", "failed"]
    assert client.calls[-1][1] == {"status": 412}


def test_nothing_is_thrown_away_when_an_upload_can_not_begin() -> None:
    def refusing(client: Client) -> None:
        client.refused = {"create": 403}

    assert [name for name, _ in put(refusing).calls] == ["create", "failed"]
