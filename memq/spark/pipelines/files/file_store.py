"""A place for files next to memq's objects: a folder or a bucket, with its highest manifest."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit
from urllib.request import url2pathname

from awscrt.checksums import crc32c

from memq.client.io_thread import io_thread
from memq.errors import DeniedError, InvalidRequestError, InvalidSettingError, NotFoundError, ObjectExistsError
from memq.runtime.network import Runtime
from memq.spark.pipelines.files.manifest import KEPT, PREFIX, FilesManifest, decode_manifest, encode_manifest, key_of
from memq.spark.stores import ANY, StoreUrls, TaskStores
from memq.storage_handlers import Buffer, StorageHandler
from memq.storage_handlers.confirmed_reads import read_sealed
from memq.storage_handlers.filesystem import FilesystemHandler

Answer = TypeVar("Answer")
_TMP = ".tmp"  # no key starts so: files that are being written are never listed as others


@dataclass(frozen=True, slots=True)
class FilePlace:
    """Where the files are: `file:FOLDER` or `s3://BUCKET/PREFIX`; keys come from where clients find them."""

    url: str
    config: str | None = None
    profile: str | None = None


def place_of_text(text: str, config: str | None = None, profile: str | None = None) -> FilePlace:
    """Return the place that a path or an address means.

    Raises: InvalidSettingError for an address of another kind.
    """
    known = urlsplit(text).scheme in ("file", "s3")
    if "://" in text and not known:  # hdfs://, gs://: it is no folder of that name here
        raise InvalidSettingError(
            f"no files can be written to '{text[:200]}'", hint="use a folder or s3://BUCKET/PREFIX"
        )
    url = text if known else Path(text).absolute().as_uri()
    return FilePlace(url, config, profile)


@asynccontextmanager
async def open_place(place: FilePlace) -> AsyncIterator[StorageHandler]:
    """Open the place. Raises: DeniedError, InvalidSettingError."""
    parts = urlsplit(place.url)
    if parts.scheme == "file":
        root = Path(url2pathname(parts.path))
        try:
            (root / _TMP).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DeniedError(f"no folder can be made at '{root}': {error.strerror}", hint="choose another") from error
        folder = FilesystemHandler(root, root / _TMP)
        try:
            yield folder
        finally:
            await folder.close()
        return
    async with TaskStores(StoreUrls({ANY: place.url}, place.config, place.profile), Runtime()) as stores:
        yield stores.open(ANY)


def at_place(place: FilePlace, work: Callable[[StorageHandler], Awaitable[Answer]]) -> Answer:
    """Do one piece of work at an open place, on the I/O thread. Raises: as `open_place`, and as `work`."""

    async def run() -> Answer:
        async with open_place(place) as store:
            return await work(store)

    return io_thread().run(run())


async def put_file(store: StorageHandler, key: str, data: Buffer) -> None:
    """Store a file under the key of its content; repeating it is safe. Raises: as `ObjectWriter.put`."""
    await store.put(key, [data], crc32c(bytes(data)))


async def latest(store: StorageHandler) -> FilesManifest | None:
    """Return the highest manifest; None when there is none yet. Raises: CorruptDataError.

    As `ObjectReader`.
    """
    while True:
        keys = [entry.key async for entry in store.list(PREFIX)]
        if not keys:
            return None
        try:
            return (await read_sealed(store, max(keys), decode_manifest))[0]
        except NotFoundError:
            continue  # it was taken after many others came: look again


async def first_of(store: StorageHandler, topic: str, topic_id: str) -> FilesManifest:
    """Return the highest manifest of a topic, or what comes before the first one.

    Raises: InvalidRequestError when the place holds another topic; as `latest`.
    """
    found = await latest(store) or FilesManifest(number=0, topic=topic, topic_id=topic_id)
    if found.topic_id != topic_id:
        raise InvalidRequestError(
            f"the place holds topic '{found.topic}' with id {found.topic_id}, not '{topic}' with id {topic_id}",
            hint="use a separate folder for each topic, also for one that was created again under an old name",
        )
    return found


async def publish(store: StorageHandler, manifest: FilesManifest) -> bool:
    """Make a manifest the highest; say whether it is, or another one took its number.

    Raises: as `ObjectWriter`.
    """
    data = encode_manifest(manifest)
    try:
        await store.put(manifest.key, [data], crc32c(data))
    except ObjectExistsError:
        return False
    if manifest.number > KEPT:
        await store.delete(key_of(manifest.number - KEPT))
    return True
