"""Objects in a bucket of S3 or of a compatible server: the port, over either data path.

Put-if-absent is `If-None-Match: *`. Each put marks its object with the crc32c of its bytes. When a put finds the key
taken, the mark shows whether the object has the same bytes. Then an earlier try stored it, and its answer was lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from typing import TypeVar

from awscrt.checksums import crc32c

from memq.errors import CorruptDataError, DeniedError, InvalidRequestError, NotFoundError, ObjectExistsError, StoreError
from memq.runtime.runtime import Runtime
from memq.storage_handlers import (
    CHECK_PREFIX,
    KEPT_CHECK,
    Buffer,
    Count,
    ListedKeys,
    ObjectEntry,
    check_key,
    check_prefix,
)
from memq.storage_handlers.files import joined_crc
from memq.storage_handlers.s3.answers import CREDENTIAL_CODES, Meaning, StoreAnswer, error_for
from memq.storage_handlers.s3.attempts import Attempts, Request, S3Counters
from memq.storage_handlers.s3.data_path import DataPath, PutOrder, release_views
from memq.storage_handlers.s3.settings import Bucket

T = TypeVar("T")

CHECK_S = 60.0  # proven rights are not proven again for this time; a probe then costs one GET
_PROBE = b"memq was here"
_TIMES = 2  # the second put must find the first


@dataclass(frozen=True, slots=True)
class _Taken:
    """The object found under a key that a put found taken."""

    size: int
    checksum: int | None
    is_ours: bool


class S3Handler:
    """See `StorageHandler`. `counters` and `breaker` are for a registry of metrics.

    Requests whose failure may pass are retried within `deadline_ms`; then the caller gets StoreError.
    """

    def __init__(self, bucket: Bucket, path: DataPath, parts: DataPath, runtime: Runtime) -> None:
        """`parts` writes objects of at least `multipart_bytes_min`; it may be `path` itself."""
        self.counters = S3Counters()
        self.bucket = bucket
        self._path = path
        self._parts = parts
        self._runtime = runtime
        self._attempts = Attempts(bucket, runtime, self.counters)
        self.breaker = self._attempts.breaker
        self._checked_s: float | None = None

    @property
    def url(self) -> str:
        """See `StorageHandler.url`. There are no keys in it."""
        return self.bucket.url

    @property
    def data_path(self) -> str:
        """Name of the library that sends the requests, for operators."""
        return self.bucket.settings.data_path

    async def put(self, key: str, buffers: Sequence[Buffer], checksum: int) -> None:
        """See `ObjectWriter.put`. Nothing is copied on obstore's path."""
        check_key(key)
        found = joined_crc(buffers)
        if found != checksum:
            raise CorruptDataError(f"object '{key}' not stored: its bytes have crc32c {found:08x}, not {checksum:08x}")
        views = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
        size = sum(map(len, views))
        try:
            await self._put_absent(key, PutOrder(self._whole(key), views, size, checksum))
        finally:
            await release_views(views)

    async def _put_absent(self, key: str, order: PutOrder) -> None:
        """Put if the key is free; if it is taken, compare its object with this one.

        A taken key without an object means that S3 has not decided yet between two puts (409), or that the object was
        just deleted. Then the put is retried.
        """
        until_s, tries = self._attempts.until_s(), 0
        others: list[_Taken] = []
        while True:
            try:
                await self._send(key, order, until_s)
                return
            except StoreAnswer as answer:
                if answer.meaning is not Meaning.TAKEN:
                    raise error_for(answer, f"object '{key}' not stored", self.bucket.location, key) from answer
            found = await self._found_under(key, order, until_s)
            if found is not None and found.is_ours:
                self.counters.lost_answers += 1
                self._attempts.events.info("s3-answer-lost", f"object '{key}' had been stored")
                return
            if found is not None and found in others:  # one answer is no proof: a fence depends on it
                raise ObjectExistsError(f"another object of {found.size} bytes has the key '{key}'")
            others += [found] if found is not None else []
            tries += 1
            await self._attempts.pause(tries, until_s, f"object '{key}' not stored: its key is neither free nor taken")

    async def _found_under(self, key: str, order: PutOrder, until_s: float) -> _Taken | None:
        """Return the object under a key that is taken; None when there is none."""
        try:
            found = await self._asked("head", key, partial(self._path.head, order.key), until_s)
            checksum = found.checksum
            if found.size == order.size and checksum is None:  # another program wrote it, or dropped the mark
                body, _ = await self._asked("get", key, partial(self._path.get, order.key), until_s, size=order.size)
                checksum = crc32c(body)
        except NotFoundError:
            return None
        return _Taken(found.size, checksum, is_ours=(found.size, checksum) == (order.size, order.checksum))

    async def _send(self, key: str, order: PutOrder, until_s: float) -> None:
        in_parts = order.size >= self.bucket.settings.multipart_bytes_min
        path = self._parts if in_parts else self._path
        await path.open()

        async def send() -> None:
            await path.put(order)

        failure = f"object '{key}' not stored"
        await self._attempts.run("put", order.size, send, failure, hedge=not in_parts, until_s=until_s)

    async def delete(self, key: str) -> None:
        """See `ObjectWriter.delete`."""
        check_key(key)
        try:
            await self._asked("delete", key, partial(self._path.delete, self._whole(key)), failure="not deleted")
        except NotFoundError:
            return

    async def get(self, key: str, *, checked: bool = True) -> bytes:
        """See `ObjectReader.get`. The checksum is that of the put, from the object's metadata."""
        check_key(key)

        async def request() -> bytes:
            body, found = await self._path.get(self._whole(key))
            if len(body) != found.size:
                raise StoreAnswer(0, "", f"{len(body)} bytes of {found.size}")
            if checked and found.checksum is not None and crc32c(body) != found.checksum:
                raise StoreAnswer(
                    200, "BadDigest", f"its bytes have crc32c {crc32c(body):08x}, not {found.checksum:08x}"
                )
            return body

        return await self._asked("get", key, request, hedge=True)

    async def get_range(self, key: str, offset: int, length: int) -> bytes:
        """See `ObjectReader.get_range`. Ranges over `part_bytes` are read in parts, in parallel."""
        check_key(key)
        part, most = self.bucket.settings.part_bytes, self.bucket.settings.parts_in_flight_max
        if length <= part:
            return await self._get_part(key, offset, length)
        turn = asyncio.Semaphore(most)

        async def get_in_turn(start: int) -> bytes:
            async with turn:
                return await self._get_part(key, start, min(part, offset + length - start))

        starts = range(offset, offset + length, part)
        tasks = [asyncio.create_task(get_in_turn(start), name=f"s3 part at {start}") for start in starts]
        try:
            return b"".join(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _get_part(self, key: str, offset: int, length: int) -> bytes:
        """Read a range in one request.

        After a short answer, the object's size shows whether the object ends there, or the server erred.
        """
        until_s, tries = self._attempts.until_s(), 0
        while True:
            body = await self._get_at_most(key, offset, length, until_s) if length else b""
            if length and len(body) == length:
                return body
            size = await self.size(key)
            if size < offset + length:
                raise CorruptDataError(f"object '{key}' has {size} bytes, asked for {length} from {offset}")
            if not length:
                return b""
            tries += 1
            text = f"object '{key}' not read: {len(body)} bytes came of {length} from {offset}"
            await self._attempts.pause(tries, until_s, text)

    async def _get_at_most(self, key: str, offset: int, length: int, until_s: float) -> bytes:
        async def request() -> bytes:
            return await self._path.get_range(self._whole(key), offset, length)

        try:
            return await self._asked("get", key, request, until_s, size=length, hedge=True)
        except StoreAnswer as answer:
            if answer.meaning is Meaning.NO_RANGE:
                return b""
            raise

    async def size(self, key: str) -> int:
        """See `ObjectReader.size`."""
        check_key(key)
        return (await self._asked("head", key, partial(self._path.head, self._whole(key)))).size

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectEntry]:
        """See `ObjectReader.list`. Reads a page of 1,000 entries at a time, and drops repeated pages."""
        whole, skip, after = self.bucket.prefix + check_prefix(prefix), len(self.bucket.prefix), ""
        pages: AsyncIterator[Sequence[ObjectEntry]] | None = None

        async def next_page() -> Sequence[ObjectEntry] | None:
            nonlocal pages
            pages = pages or self._path.pages(whole, after)
            try:
                return await anext(pages, None)
            except BaseException:  # the retry continues after the last yielded key
                pages = None
                raise

        listed = ListedKeys()
        while (page := await self._asked("list", prefix, next_page, failure="not listed")) is not None:
            for entry in listed.new(page):
                yield ObjectEntry(entry.key[skip:], entry.size, entry.modified_ms)
                after = entry.key

    async def check(self, *, deletes: bool = True) -> None:
        """See `StorageHandler.check`. The error names every missing right; a success holds for CHECK_S."""
        now_s = self._runtime.clock.monotonic()
        if self._checked_s is not None and now_s - self._checked_s < CHECK_S:
            await check_answers(self.bucket, self._path, self._attempts, self._whole(KEPT_CHECK))
            return
        name = f"{CHECK_PREFIX}{self._runtime.random.getrandbits(64):016x}" if deletes else KEPT_CHECK
        await self._path.open()
        await check_rights(self.bucket, self._path, self._attempts, self._whole(name), deletes=deletes)
        self._checked_s = now_s

    def counts(self) -> Iterable[Count]:
        """See `CountingStore.counts`."""
        for part in fields(S3Counters):
            yield Count(part.name, getattr(self.counters, part.name))
        yield Count("breaker_open", not self.breaker.is_closed)

    async def close(self) -> None:
        """See `StorageHandler.close`."""
        await self._path.close()
        await self._parts.close()

    async def _asked(
        self,
        kind: str,
        key: str,
        request: Request[T],
        until_s: float | None = None,
        *,
        failure: str = "not read",
        size: int = 0,
        hedge: bool = False,
    ) -> T:
        """Send a request about `key`.

        Raises: MemqError; StoreAnswer for a range that begins after the end of the object.
        """
        await self._path.open()
        what = f"objects under '{key}'" if kind == "list" else f"object '{key}'"
        try:
            return await self._attempts.run(kind, size, request, f"{what} {failure}", hedge=hedge, until_s=until_s)
        except StoreAnswer as answer:
            if answer.meaning is Meaning.NO_RANGE:
                raise
            raise error_for(answer, f"{what} {failure}", self.bucket.location, key) from answer

    def _whole(self, key: str) -> str:
        return self.bucket.prefix + key


async def check_rights(bucket: Bucket, path: DataPath, attempts: Attempts, key: str, *, deletes: bool) -> None:
    """Put, put again and get the object `key`, which only checks use.

    If `deletes`, also list its folder and delete it.

    Raises: DeniedError with one line per missing right; InvalidRequestError when the bucket does not exist, or its
    server overwrites objects in spite of put-if-absent; StoreError for failures that may pass.
    """
    order = PutOrder(key, [memoryview(_PROBE)], len(_PROBE), crc32c(_PROBE))
    folder = key.rpartition("/")[0] + "/"
    missing: list[str] = []

    async def tried(right: str, purpose: str, request: Callable[[], Awaitable[object]]) -> bool:
        try:
            refusal = await _refusal(bucket, attempts, key, request)
        except NotFoundError as error:  # S3 has another answer for a missing bucket
            raise InvalidRequestError(
                f"{bucket.location} not checked: what answers there says {error.__cause__}, as no S3 does",
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
                f"object '{key}' of {bucket.location} was read back with other bytes", hint="the store damages objects"
            )

    if deletes:
        await tried("s3:ListBucket", "a sweep lists objects", list_one)
    if await tried("s3:PutObject", "a broker writes objects", partial(_put_where_absent, bucket, path, order)):
        try:
            await tried("s3:GetObject", "brokers and consumers read objects", get_all)
        finally:
            if deletes:
                await tried("s3:DeleteObject", "retention and sweep delete objects", lambda: path.delete(key))
    if missing:
        head = f"{bucket.location}: {len(missing)} of {4 if deletes else 2} rights are missing"
        raise DeniedError("\n  ".join([head, *missing]), hint="docs/storage.md has a policy for each role")


async def check_answers(bucket: Bucket, path: DataPath, attempts: Attempts, key: str) -> None:
    """Get the object `key`, which need not exist: any answer of the store proves that it is alive.

    Raises: as `check_rights`, but no error for missing rights.
    """
    with suppress(NotFoundError):
        await _refusal(bucket, attempts, key, lambda: path.get(key))


async def _refusal(
    bucket: Bucket, attempts: Attempts, key: str, request: Callable[[], Awaitable[object]]
) -> BaseException | None:
    """Return the answer by which the server denies a request to these keys; None when it does not.

    Raises: MemqError for all other failures, also when the keys themselves are wrong.
    """
    try:
        await attempts.run("check", 0, request, f"{bucket.location} not checked")
    except DeniedError as error:
        cause = error.__cause__
        if isinstance(cause, StoreAnswer) and cause.code in CREDENTIAL_CODES:
            raise
        return cause
    except StoreAnswer as answer:
        raise error_for(answer, "not checked", bucket.location, key) from answer
    return None


async def _put_where_absent(bucket: Bucket, path: DataPath, order: PutOrder) -> None:
    """Put twice; the second must be refused, also after an earlier try whose answer was lost."""
    for _ in range(_TIMES):
        try:
            await path.put(order)
        except StoreAnswer as answer:
            if answer.meaning is not Meaning.TAKEN:
                raise
            return
    with suppress(StoreAnswer):  # without the right to delete, the object stays
        await path.delete(order.key)
    raise InvalidRequestError(
        f"{bucket.location} overwrites objects in spite of If-None-Match",
        hint="use a server that knows put-if-absent: two owners of a partition could overwrite each other's batches",
    )
