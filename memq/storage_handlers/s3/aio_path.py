"""The second data path: aiobotocore, for features obstore lacks (CRC32C, conditional multipart)."""

from __future__ import annotations

import asyncio
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from importlib.util import find_spec
from typing import Any

from awscrt.checksums import crc32c

from memq.storage_handlers import ObjectEntry, check_size
from memq.storage_handlers.s3.answers import StoreAnswer
from memq.storage_handlers.s3.data_path import ObjectHead, PutAnswers, PutOrder, cut_parts, head_of
from memq.storage_handlers.s3.settings import (
    Bucket,
    authority_file,
    authority_of,
    check_keys,
    missing_extra,
    open_session,
    region_of,
)

_PAGE = 1_000
_CHUNK_BYTES = 1 << 20
_ABORT_S = 10.0


class AioPath:
    """See `DataPath`.

    Each body is joined once before it is sent, because aiohttp takes no list of buffers. The server checks its CRC32C.
    When a kept connection turns out to be closed, aiohttp itself sends the request again; no counter includes this.
    """

    def __init__(self, bucket: Bucket) -> None:
        if find_spec("aiobotocore") is None:
            raise missing_extra("aiobotocore")
        settings = bucket.settings
        self._bucket = bucket
        self._stack = AsyncExitStack()
        self._opening = asyncio.Lock()
        self._client: Any = None
        self._put_answers = PutAnswers(believes_etags=not bucket.settings.confirm_puts)
        self._options: dict[str, str] = {"ContentType": "application/octet-stream"}
        if settings.storage_class:
            self._options["StorageClass"] = settings.storage_class
        if settings.sse:
            self._options["ServerSideEncryption"] = settings.sse
        if settings.sse_kms_key_id:
            self._options["SSEKMSKeyId"] = settings.sse_kms_key_id

    async def open(self) -> None:
        """See `DataPath.open`. The first call takes 0.5 s, in which the library reads its model of S3."""
        async with self._opening:
            if self._client is None:
                self._client = await self._stack.enter_async_context(self._make_client())

    def _make_client(self) -> Any:
        """Return a client without the library's retries and checksums, which cost a pass per body."""
        from aiobotocore.config import AioConfig
        from aiobotocore.session import AioSession

        bucket, settings = self._bucket, self._bucket.settings
        found = open_session(bucket)
        check_keys(bucket, found)
        authority_of(bucket, found)  # else each request would report an unusable file
        session = AioSession(profile=settings.profile or None)
        if settings.access_key_id:
            keys = (settings.access_key_id, settings.secret_access_key, settings.session_token or None)
            session.set_credentials(*keys)
        config = AioConfig(
            connect_timeout=settings.connect_timeout_ms / 1000,
            read_timeout=10 * settings.deadline_ms / 1000,  # the handler's own deadline ends first
            max_pool_connections=settings.connections_max,
            retries={"total_max_attempts": 1},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"addressing_style": "path" if bucket.path_style else "virtual", "payload_signing_enabled": False},
        )
        return session.create_client(
            "s3",
            region_name=region_of(bucket, found),
            endpoint_url=settings.endpoint or None,
            verify=authority_file(bucket, found),
            config=config,
        )

    async def put(self, order: PutOrder) -> None:
        """See `DataPath.put`. Objects of at least `multipart_bytes_min` are sent in parts, in parallel."""
        with _answers():
            if order.size >= self._bucket.settings.multipart_bytes_min:
                await self._put_in_parts(order)
                return
            answer = await self._client.put_object(
                **self._name(order.key),
                **self._options,
                IfNoneMatch="*",
                Metadata=order.marks,
                Body=b"".join(order.views),
                ChecksumCRC32C=_base64(order.checksum),
            )
            await self._confirm(order, answer)

    async def _confirm(self, order: PutOrder, answer: dict[str, Any]) -> None:
        await self._put_answers.confirm(self, order, answer["ETag"], _checksum_of(answer.get("ChecksumCRC32C")))

    async def _put_in_parts(self, order: PutOrder) -> None:
        """Send parts, then complete the upload if the key is free.

        If that fails, the upload is aborted, which deletes the parts.
        """
        client, name, settings = self._client, self._name(order.key), self._bucket.settings
        kind = {"ChecksumAlgorithm": "CRC32C", "ChecksumType": "FULL_OBJECT"}
        made = await client.create_multipart_upload(**name, **self._options, **kind, Metadata=order.marks)
        upload = {**name, "UploadId": made["UploadId"]}
        turn = asyncio.Semaphore(settings.parts_in_flight_max)

        async def send(number: int, part: Sequence[memoryview]) -> dict[str, object]:
            async with turn:
                body = b"".join(part)
                checksum = _base64(crc32c(body))
                sent = await client.upload_part(**upload, PartNumber=number, Body=body, ChecksumCRC32C=checksum)
            return {"PartNumber": number, "ETag": sent["ETag"], "ChecksumCRC32C": checksum}

        tasks = [
            asyncio.create_task(send(number, part), name=f"s3 part {number}")
            for number, part in enumerate(cut_parts(order.views, settings.part_bytes), 1)
        ]
        try:
            try:
                parts = await asyncio.gather(*tasks)
            finally:  # a part that arrives after an abort may stay, and cost money
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
            answer = await client.complete_multipart_upload(
                **upload,
                IfNoneMatch="*",
                MultipartUpload={"Parts": parts},
                ChecksumCRC32C=_base64(order.checksum),
                ChecksumType="FULL_OBJECT",
            )
            await self._confirm(order, answer)
        except BaseException:
            await self._abort(upload)
            raise

    async def _abort(self, upload: dict[str, str]) -> None:
        """Delete the parts of an upload.

        If the abort fails, lifecycle rules of the bucket must delete them.
        """
        try:
            async with asyncio.timeout(_ABORT_S):
                with _answers():
                    await self._client.abort_multipart_upload(**upload)
        except (StoreAnswer, TimeoutError):
            return

    async def get(self, key: str) -> tuple[bytes, ObjectHead]:
        """See `DataPath.get`."""
        with _answers():
            answer = await self._client.get_object(**self._name(key))
            found = head_of(check_size(key, answer["ContentLength"]), answer["Metadata"], answer.get("ContentType", ""))
            return await _body_of(answer), found

    async def get_range(self, key: str, offset: int, length: int) -> bytes:
        """See `DataPath.get_range`."""
        with _answers():
            wanted = f"bytes={offset}-{offset + length - 1}"
            answer = await self._client.get_object(**self._name(key), Range=wanted)
            if not answer["ContentRange"].startswith(f"bytes {offset}-"):  # a proxy's page has none
                raise StoreAnswer(0, "", f"{answer['ContentRange'][:80]} in answer to {wanted}")
            return await _body_of(answer)

    async def head(self, key: str) -> ObjectHead:
        """See `DataPath.head`."""
        with _answers(has_body=False):
            answer = await self._client.head_object(**self._name(key))
            return head_of(answer["ContentLength"], answer["Metadata"], answer.get("ContentType", ""))

    async def pages(self, prefix: str, after: str) -> AsyncIterator[Sequence[ObjectEntry]]:
        """See `DataPath.pages`."""
        query: dict[str, Any] = {"Bucket": self._bucket.name, "Prefix": prefix, "MaxKeys": _PAGE}
        if after:
            query["StartAfter"] = after
        while True:
            with _answers():
                answer = await self._client.list_objects_v2(**query)
                page = [
                    ObjectEntry(found["Key"], found["Size"], int(found["LastModified"].timestamp() * 1000))
                    for found in answer.get("Contents", ())
                ]
                query["ContinuationToken"] = answer["NextContinuationToken"] if answer["IsTruncated"] else ""
            yield page
            if not query["ContinuationToken"]:
                return

    async def delete(self, key: str) -> None:
        """See `DataPath.delete`."""
        with _answers():
            await self._client.delete_object(**self._name(key))

    async def close(self) -> None:
        """See `DataPath.close`."""
        await self._stack.aclose()
        self._client = None

    def _name(self, key: str) -> dict[str, str]:
        return {"Bucket": self._bucket.name, "Key": key}


async def _body_of(answer: dict[str, Any]) -> bytes:
    async with answer["Body"] as body:
        return b"".join([chunk async for chunk in body.iter_chunks(_CHUNK_BYTES)])


def _base64(checksum: int) -> str:
    """Return a crc32c as S3 writes it: its four bytes, big-endian, in base64."""
    return b64encode(checksum.to_bytes(4, "big")).decode()


def _checksum_of(text: str | None) -> int | None:
    """Return the crc32c of a whole object in S3's answer; None if it has none."""
    try:
        found = b64decode(text or "", validate=True)
    except Base64Error:  # of a server that answers with a checksum of checksums
        return None
    return int.from_bytes(found, "big") if len(found) == 4 else None


@contextmanager
def _answers(*, has_body: bool = True) -> Iterator[None]:
    """Convert the exceptions of botocore and aiohttp, and a KeyError, to StoreAnswer."""
    import aiohttp
    from botocore.exceptions import (
        BotoCoreError,
        ClientError,
        CredentialRetrievalError,
        NoCredentialsError,
        NoRegionError,
        PartialCredentialsError,
        SSOError,
    )

    try:
        yield
    except ClientError as error:
        details = error.response.get("Error", {})
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        code = str(details.get("Code") or "")
        text = str(details.get("Message") or "")[:300]
        raise StoreAnswer(status, "" if code.isdigit() else code, text, has_body=has_body) from error
    except (NoCredentialsError, PartialCredentialsError) as error:
        raise StoreAnswer(401, "NoCredentials", str(error)) from error
    except (CredentialRetrievalError, NoRegionError, SSOError, RuntimeError, ValueError) as error:
        # The request that needs keys fetches them. The last two errors: the fetched keys have expired, or are no JSON.
        raise StoreAnswer(0, "NoCredentials", (str(error).strip() or type(error).__name__)[:300]) from error
    except KeyError as error:  # of an answer without a part that S3 always sends
        raise StoreAnswer(0, "", f"an answer without {str(error)[:200]}, which is not S3's") from error
    except (BotoCoreError, aiohttp.ClientError, OSError) as error:
        raise StoreAnswer(0, "", (str(error) or type(error).__name__)[:300]) from error
