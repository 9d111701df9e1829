"""The default data path: obstore sends buffers in place, without a join, outside of Python."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from memq.runtime.threads import expect_native_threads
from memq.storage_handlers import CHECK_PREFIX, ObjectEntry, check_size
from memq.storage_handlers.s3.answers import StoreAnswer
from memq.storage_handlers.s3.data_path import ObjectHead, PutAnswers, PutOrder, head_of
from memq.storage_handlers.s3.settings import (
    Bucket,
    authority_of,
    check_keys,
    missing_extra,
    obstore_keys,
    open_session,
    region_of,
)

if TYPE_CHECKING:
    from obstore import GetResult
    from obstore.store import ClientConfig, S3Config, S3Store

_PAGE = 1_000
_ENDS = 2  # listings that end at one place
_ABSENT = f"{CHECK_PREFIX}absent"  # the key of no object
_STATUS = re.compile(r"\bstatus: (\d{3})\b")
_CODE = re.compile(r"<Code>([A-Za-z0-9.]{1,80})</Code>")
_MESSAGE = re.compile(r"<Message>([^<]{0,300})")
_CAUSE = re.compile(
    r'^\s+(?:error: |message: |source: )?"?([A-Za-z][A-Za-z .()-]{2,200}?)"?,$', re.MULTILINE
)  # leaves of the error's tree
_REDIRECTED = "redirect without LOCATION"  # obstore's text for a bucket in another region
_KEYLESS = "External AWS credential provider: "
_TLS = re.compile(r"InvalidCertificate|NotValidForName|UnknownIssuer|BadSignature|CertExpired|InvalidDnsName")


class ObstorePath:
    """See `DataPath`.

    The server checks CRC64NVME; the only other checksum that obstore sends is SHA256. It is computed from the bytes
    whose crc32c the handler has just checked. The metadata has that crc32c, for readers of whole objects.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._store = _open_store(bucket)
        self._absent = f"{bucket.prefix}{_ABSENT}"
        self._put_answers = PutAnswers(believes_etags=not bucket.settings.confirm_puts)
        expect_native_threads()
        self._attributes = {"Content-Type": "application/octet-stream"}
        if bucket.settings.storage_class:
            self._attributes["Storage-Class"] = bucket.settings.storage_class

    async def open(self) -> None:
        """See `DataPath.open`: does nothing, because requests open the connections."""

    async def put(self, order: PutOrder) -> None:
        """See `DataPath.put`."""
        import obstore

        with _answers():
            result = await obstore.put_async(
                self._store,
                order.key,
                order.views or [memoryview(b"")],
                mode="create",
                use_multipart=False,
                attributes={**self._attributes, **order.marks},
            )
        await self._put_answers.confirm(self, order, result["e_tag"] or "")

    async def get(self, key: str) -> tuple[bytes, ObjectHead]:
        """See `DataPath.get`."""
        import obstore

        with _answers():
            result = await obstore.get_async(self._store, key)
            found = _head_in(result, check_size(key, result.meta["size"]))
            return bytes(await result.bytes_async()), found

    async def get_range(self, key: str, offset: int, length: int) -> bytes:
        """See `DataPath.get_range`."""
        import obstore

        with _answers():
            return bytes(await obstore.get_range_async(self._store, key, start=offset, length=length))

    async def head(self, key: str) -> ObjectHead:
        """See `DataPath.head`."""
        import obstore

        with _answers(has_body=False):
            result = await obstore.get_async(self._store, key, options={"head": True})
            return _head_in(result, result.meta["size"])

    async def pages(self, prefix: str, after: str) -> AsyncIterator[Sequence[ObjectEntry]]:
        """See `DataPath.pages`. obstore lists whole folders, so names are compared with `prefix` here.

        obstore ends a listing at a proxy's page with status 200, and at a page of S3 without its last part, which names
        the next page. So a listing is at its end if another one from there is empty, and if S3 answers.
        """
        folder, ends = prefix.rpartition("/")[0], 0
        while ends < _ENDS:
            ends, stream = ends + 1, self._listing(folder, after)
            while page := await _next_page(stream):
                if page[-1]["path"] > after:  # else the server ignores where the listing begins
                    ends, after = 1, page[-1]["path"]
                yield [_entry(meta) for meta in page if meta["path"].startswith(prefix)]
        await self._check_server()

    def _listing(self, folder: str, after: str) -> AsyncIterator[Sequence[Mapping[str, Any]]]:
        import obstore

        return obstore.list(self._store, folder or None, offset=after or None, chunk_size=_PAGE)

    async def _check_server(self) -> None:
        """Prove that S3 answers, by a GET of an absent object.

        Raises: StoreAnswer.
        """
        import obstore

        try:
            with _answers():
                await obstore.get_async(self._store, self._absent)
        except StoreAnswer as answer:
            if answer.code in ("NoSuchKey", "AccessDenied"):
                return
            raise
        raise StoreAnswer(0, "", f"an answer with an object '{self._absent}', which is not S3's")

    async def delete(self, key: str) -> None:
        """See `DataPath.delete`."""
        import obstore

        with _answers():
            await obstore.delete_async(self._store, key)

    async def close(self) -> None:
        """See `DataPath.close`: connections end with the store."""


async def _next_page(stream: AsyncIterator[Sequence[Mapping[str, Any]]]) -> Sequence[Mapping[str, Any]]:
    """Return the next page of a listing, empty at its end. Raises: StoreAnswer."""
    with _answers(), suppress(StopAsyncIteration):
        return await stream.__anext__()  # the stream does not bear `anext` with a default
    return ()


def _open_store(bucket: Bucket) -> S3Store:
    try:
        from obstore.store import S3Store
    except ImportError as error:
        raise missing_extra(error.name) from error
    session = open_session(bucket)
    check_keys(bucket, session)
    settings = bucket.settings
    client: ClientConfig = {
        "allow_http": settings.endpoint.startswith("http://"),
        "connect_timeout": timedelta(milliseconds=settings.connect_timeout_ms),
        "timeout": timedelta(milliseconds=10 * settings.deadline_ms),  # the handler's own deadline ends first
        "pool_max_idle_per_host": str(settings.connections_max),
    }
    authority = authority_of(bucket, session)
    if authority is not None:
        client["root_certificate"] = authority
    return S3Store(
        bucket.name,
        config=_config(bucket, region_of(bucket, session)),
        client_options=client,
        retry_config={"max_retries": 0},
        credential_provider=obstore_keys(session),
    )


def _config(bucket: Bucket, region: str) -> S3Config:
    settings = bucket.settings
    config: S3Config = {
        "region": region,
        "virtual_hosted_style_request": not bucket.path_style,
        "unsigned_payload": True,  # the signed headers include the checksum; SHA256 costs more than the rest
        "checksum_algorithm": "CRC64NVME",
        "disable_bulk_delete": True,  # bulk delete is also one request, but not every server has it
        "disable_tagging": True,
    }
    if settings.endpoint:
        scheme, _, host = settings.endpoint.rstrip("/").partition("://")
        config["endpoint"] = f"{scheme}://{host}" if bucket.path_style else f"{scheme}://{bucket.name}.{host}"
    if settings.sse:
        config["server_side_encryption"] = settings.sse
    if settings.sse_kms_key_id:
        config["sse_kms_key_id"] = settings.sse_kms_key_id
    return config


def _head_in(result: GetResult, size: int) -> ObjectHead:
    return head_of(size, result.attributes, result.attributes.get("Content-Type", ""))


def _entry(meta: Mapping[str, Any]) -> ObjectEntry:
    return ObjectEntry(meta["path"], meta["size"], int(meta["last_modified"].timestamp() * 1000))


@contextmanager
def _answers(*, has_body: bool = True) -> Iterator[None]:
    """Convert the exceptions of obstore to StoreAnswer."""
    from obstore.exceptions import BaseError

    try:
        yield
    except (BaseError, FileNotFoundError, PermissionError, ValueError) as error:
        raise read_answer(str(error), has_body=has_body) from error


def read_answer(text: str, *, has_body: bool = True) -> StoreAnswer:
    """Return the answer from obstore's text: the server's status and body, or a network error."""
    status, code = _STATUS.search(text), _CODE.search(text)
    if status is not None:
        message = _MESSAGE.search(text)
        details = (code[1] if code else "", message[1] if message else "")
        return StoreAnswer(int(status[1]), *details, has_body=has_body)
    if _REDIRECTED in text:
        return StoreAnswer(301, "PermanentRedirect", "the bucket is elsewhere")
    if _KEYLESS in text:
        return StoreAnswer(0, "NoCredentials", text.partition("\n")[0].rpartition(_KEYLESS)[2][:300])
    first = text.partition("\n")[0].rpartition("HTTP error: ")[2]
    causes = _TLS.findall(text)[:2] or _CAUSE.findall(text)[-2:]
    return StoreAnswer(0, "", ": ".join([first, *causes])[:300])
