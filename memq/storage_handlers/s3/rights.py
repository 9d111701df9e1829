"""Proves at the start that a bucket can be used: each right is tried, and named when it is missing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

from awscrt.checksums import crc32c

from memq.errors import DeniedError, InvalidRequestError, NotFoundError, StoreError
from memq.storage_handlers.s3.answers import OF_THE_KEYS, Meaning, StoreAnswer, error_for
from memq.storage_handlers.s3.attempts import Attempts
from memq.storage_handlers.s3.data_path import DataPath, PutOrder
from memq.storage_handlers.s3.settings import Bucket

_PROBE = b"memq was here"
_TIMES = 2  # the second put must find the first


async def check_rights(bucket: Bucket, path: DataPath, attempts: Attempts, key: str, *, deletes: bool) -> None:
    """Put, put again and get the object `key`, which only checks use.

    List and delete it, too, if `deletes`.

    Raises: DeniedError with one line per missing right; InvalidRequestError when the bucket is not there, or its server
    overwrites what should be put only where nothing lies; StoreError for what may pass.
    """
    order = PutOrder(key, [memoryview(_PROBE)], len(_PROBE), crc32c(_PROBE))
    folder = key.rpartition("/")[0] + "/"
    missing: list[str] = []

    async def tried(right: str, purpose: str, request: Callable[[], Awaitable[object]]) -> bool:
        try:
            refusal = await _refusal(bucket, attempts, key, request)
        except NotFoundError as error:  # not that a bucket is missing: S3 says so
            raise InvalidRequestError(
                f"{bucket.place} not checked: what answers there says {error.__cause__}, as no S3 does",
                hint="check endpoint in [s3]",
            ) from error
        if refusal is not None:
            missing.append(f"{right} is missing, {purpose}: {refusal}")
        return refusal is None

    async def list_one() -> None:
        await anext(path.pages(folder, ""), None)

    async def get_all() -> None:
        body, _ = await path.get(key)
        if body != _PROBE:
            raise StoreError(
                f"object '{key}' of {bucket.place} was read back with other bytes", hint="the store damages objects"
            )

    async def put_where_absent() -> None:
        await _put_where_absent(bucket, path, order)

    if deletes:
        await tried("s3:ListBucket", "a sweep lists objects", list_one)
    if await tried("s3:PutObject", "a broker writes objects", put_where_absent):
        try:
            await tried("s3:GetObject", "brokers and consumers read objects", get_all)
        finally:
            if deletes:
                await tried("s3:DeleteObject", "retention and sweep delete objects", lambda: path.delete(key))
    if missing:
        head = f"{bucket.place}: {len(missing)} of {4 if deletes else 2} rights are missing"
        raise DeniedError("\n  ".join([head, *missing]), hint="docs/operations.md has a policy for each role")


async def check_answers(bucket: Bucket, path: DataPath, attempts: Attempts, key: str) -> None:
    """Ask for the object `key`, which need not exist: any answer of the store proves it alive.

    Raises: as `check_rights`, but for rights.
    """
    with suppress(NotFoundError):
        await _refusal(bucket, attempts, key, lambda: path.get(key))


async def _refusal(
    bucket: Bucket, attempts: Attempts, key: str, request: Callable[[], Awaitable[object]]
) -> BaseException | None:
    """Return the answer by which the server denies a request to these keys; None when it does not.

    Raises: MemqError for all else, also when the keys themselves are wrong.
    """
    try:
        await attempts.run("check", 0, request, f"{bucket.place} not checked")
    except DeniedError as error:
        cause = error.__cause__
        if isinstance(cause, StoreAnswer) and cause.code in OF_THE_KEYS:
            raise
        return cause
    except StoreAnswer as answer:
        raise error_for(answer, "not checked", bucket.place, key) from answer
    return None


async def _put_where_absent(bucket: Bucket, path: DataPath, order: PutOrder) -> None:
    """Put twice: the second must be refused, also when the first was tried before and its answer lost."""
    for _ in range(_TIMES):
        try:
            await path.put(order)
        except StoreAnswer as answer:
            if answer.meaning is not Meaning.TAKEN:
                raise
            return
    with suppress(StoreAnswer):  # who may not delete leaves it
        await path.delete(order.key)
    raise InvalidRequestError(
        f"{bucket.place} overwrites objects in spite of If-None-Match",
        hint="use a server that knows put-if-absent: two owners of a partition could overwrite each other's batches",
    )
