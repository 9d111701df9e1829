"""A topic as Parquet files in a folder or bucket: location, manifest, and reading them back.

A store holds manifests 1, 2, 3 …, each put if absent: so of two that continue from one, one wins. The highest manifest
applies: a file that it does not name does not exist for readers. For each read partition, it has the position up to
which the files cover the topic.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit
from urllib.request import url2pathname

import msgspec
import pyarrow
import pyarrow.parquet
from awscrt.checksums import crc32c
from msgspec.structs import replace

from memq.client.io_thread import io_thread
from memq.errors import (
    CorruptDataError,
    DeniedError,
    InvalidRequestError,
    InvalidSettingError,
    NotFoundError,
    ObjectExistsError,
    StoreError,
)
from memq.format.sealed_json import open_sealed, seal
from memq.limits import MIB
from memq.runtime.private_files import FOLDER_MODE
from memq.runtime.runtime import Runtime
from memq.spark.pipelines.spread import Batches, spread
from memq.spark.stores import ANY, StoreUrls, TaskStores
from memq.storage_handlers import Buffer, StorageHandler
from memq.storage_handlers.confirmed_reads import read_sealed
from memq.storage_handlers.filesystem import FilesystemHandler
from memq.topic import Position

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FILE_BYTES_MAX = 128 * MIB
PREFIX = "manifests/"
LISTINGS_MAX = 20  # 4 s of pauses of `read_sealed`
KEPT = 10  # readers of one that was the highest may still be at it
Answer = TypeVar("Answer")
_TMP = ".tmp"  # no key starts so: files that are being written are never listed as others


class File(msgspec.Struct, frozen=True, kw_only=True):
    """One Parquet file: records of one hour (UTC), with least and greatest time in ms."""

    key: str
    date: str
    hour: int
    records: int
    bytes: int
    least_ms: int
    greatest_ms: int


class FilesManifest(msgspec.Struct, frozen=True, kw_only=True):
    """All files of a topic.

    The files have the records of each read partition from its position in `started` up to its position in `covered`.
    Positions are text. `marks` has the marks of the latter (`Position`), as far as they are known.
    """

    number: int
    topic: str
    topic_id: str
    started: dict[str, str] = {}
    covered: dict[str, str] = {}
    marks: dict[str, int] = {}
    files: tuple[File, ...] = ()

    @property
    def key(self) -> str:
        """The key of the manifest."""
        return key_of(self.number)

    @property
    def records(self) -> int:
        """Number of records in its files."""
        return sum(file.records for file in self.files)

    @property
    def positions(self) -> dict[int, Position]:
        """The positions in `covered` by read partition, with their marks."""
        return {
            int(partition): dataclasses.replace(Position.parse(text), mark=self.marks.get(partition, 0))
            for partition, text in self.covered.items()
        }

    @property
    def starts(self) -> dict[int, Position]:
        """The positions in `started` by read partition."""
        return {int(partition): Position.parse(text) for partition, text in self.started.items()}

    def next(
        self, starts: Mapping[int, Position], ends: Mapping[int, Position], files: tuple[File, ...]
    ) -> FilesManifest:
        """Return the successor, with more files, which cover from `starts` up to `ends`."""
        began = {str(partition): str(position) for partition, position in starts.items()}
        reached = {str(partition): str(position) for partition, position in ends.items()}
        return replace(
            self,
            number=self.number + 1,
            started={**began, **self.started},
            covered={**self.covered, **reached},
            marks={**self.marks, **{str(partition): position.mark for partition, position in ends.items()}},
            files=self.files + files,
        )


DAMAGE_HINT = "restore it, or write to another location"
_DECODER = msgspec.json.Decoder(FilesManifest)
_FIELDS = frozenset(FilesManifest.__struct_fields__) - {"marks"}  # younger than checksums


def key_of(number: int) -> str:
    """Return the key of a manifest: keys ascend with numbers."""
    return f"{PREFIX}{number:020}.json"


def encode_manifest(manifest: FilesManifest) -> bytes:
    """Return the manifest as sealed JSON."""
    return seal(msgspec.json.encode(manifest))


def decode_manifest(data: bytes, key: str) -> FilesManifest:
    """Return the manifest under a key. Raises: CorruptDataError."""
    manifest = open_sealed(data, _DECODER, _FIELDS, f"manifest '{key}'", DAMAGE_HINT)
    if manifest.key != key:
        raise CorruptDataError(f"'{key}' holds manifest {manifest.number}", hint=DAMAGE_HINT)
    return manifest


@dataclass(frozen=True, slots=True)
class FilesLocation:
    """The URL of the files, `file:FOLDER` or `s3://BUCKET/PREFIX`; credentials are client settings."""

    url: str
    config: str | None = None
    profile: str | None = None


def location_of_text(text: str, config: str | None = None, profile: str | None = None) -> FilesLocation:
    """Return the location that a path or a URL names.

    Raises: InvalidSettingError for a URL of another scheme.
    """
    known = urlsplit(text).scheme in ("file", "s3")
    if "://" in text and not known:  # hdfs://, gs://: it is no folder of that name here
        raise InvalidSettingError(
            f"no files can be written to '{text[:200]}'", hint="use a folder or s3://BUCKET/PREFIX"
        )
    url = text if known else Path(text).absolute().as_uri()
    return FilesLocation(url, config, profile)


@asynccontextmanager
async def open_location(location: FilesLocation) -> AsyncIterator[StorageHandler]:
    """Open the location. Raises: DeniedError, InvalidSettingError."""
    parts = urlsplit(location.url)
    if parts.scheme == "file":
        root = Path(url2pathname(parts.path))
        try:
            for part in (root, root / _TMP):
                part.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
        except OSError as error:
            raise DeniedError(f"no folder can be made at '{root}': {error.strerror}", hint="choose another") from error
        folder = FilesystemHandler(root, root / _TMP, shared=True)
        try:
            yield folder
        finally:
            await folder.close()
        return
    async with TaskStores(StoreUrls({ANY: location.url}, location.config, location.profile), Runtime()) as stores:
        yield stores.open(ANY)


def at_location(location: FilesLocation, work: Callable[[StorageHandler], Awaitable[Answer]]) -> Answer:
    """Do `work` with the open location, on the I/O thread. Raises: as `open_location`, and as `work`."""

    async def run() -> Answer:
        async with open_location(location) as store:
            return await work(store)

    return io_thread().run(run())


async def put_file(store: StorageHandler, key: str, data: Buffer) -> None:
    """Store a file under the key of its content; repeating it is safe. Raises: as `ObjectWriter.put`."""
    await store.put(key, [data], crc32c(bytes(data)))


async def latest(store: StorageHandler) -> FilesManifest | None:
    """Return the highest manifest; None when there is none yet.

    Raises: CorruptDataError; StoreError if listings keep showing a manifest that does not exist; as `ObjectReader`.
    """
    key = ""
    for _ in range(LISTINGS_MAX):
        key = await _highest_key(store)
        if not key:
            return None
        try:
            return (await read_sealed(store, key, decode_manifest))[0]
        except NotFoundError:
            continue  # it was deleted after many others were stored: list again
    raise StoreError(
        f"{LISTINGS_MAX} listings showed manifests that do not exist, the last one '{key}'", hint="try again"
    )


async def _highest_key(store: StorageHandler) -> str:
    """Return the key of the highest manifest, "" when there is none. Raises: as `ObjectReader`."""
    return max([entry.key async for entry in store.list(PREFIX)], default="")


async def first_of(store: StorageHandler, topic: str, topic_id: str) -> FilesManifest:
    """Return the highest manifest of a topic, or an empty one with the number 0.

    Raises: InvalidRequestError when the location holds another topic; as `latest`.
    """
    found = await latest(store) or FilesManifest(number=0, topic=topic, topic_id=topic_id)
    if found.topic_id != topic_id:
        raise InvalidRequestError(
            f"the location holds topic '{found.topic}' with id {found.topic_id}, not '{topic}' with id {topic_id}",
            hint="use a separate folder for each topic, also for one that was created again under an old name",
        )
    return found


async def publish(store: StorageHandler, manifest: FilesManifest) -> bool:
    """Store a manifest, and return whether it is the highest.

    Another one may have its number. Old manifests are deleted, so a writer that paused, or got an empty listing, may
    find its number free again. Therefore the manifests are listed after the put. Raises: as `StorageHandler`.
    """
    data = encode_manifest(manifest)
    try:
        await store.put(manifest.key, [data], crc32c(data))
    except ObjectExistsError:
        return False
    if manifest.number > KEPT:
        await store.delete(key_of(manifest.number - KEPT))
    return await _highest_key(store) == manifest.key


def read_files(
    spark: SparkSession, location: FilesLocation, *, least_ms: int | None = None, greatest_ms: int | None = None
) -> DataFrame:
    """Return the records of the highest manifest in files between `least_ms` and `greatest_ms`.

    Raises: NotFoundError when there is no manifest, or no file in it.
    """
    manifest = manifest_of(location)
    files = [file for file in manifest.files if _has(file, least_ms, greatest_ms)]
    if not manifest.files:
        raise NotFoundError(f"manifest {manifest.number} of topic '{manifest.topic}' has no files yet")
    schema = pyarrow.parquet.read_schema(_get(location, manifest.files[0].key)).remove_metadata()
    return spread(spark, _tasks(files), partial(_read, location), schema)


def manifest_of(location: FilesLocation) -> FilesManifest:
    """Return the highest manifest of a location. Raises: NotFoundError."""
    manifest = at_location(location, latest)
    if manifest is None:
        raise NotFoundError(f"no manifest at '{location.url}'", hint="run the pipeline that writes it")
    return manifest


def _has(file: File, least_ms: int | None, greatest_ms: int | None) -> bool:
    return (least_ms is None or file.greatest_ms >= least_ms) and (greatest_ms is None or file.least_ms <= greatest_ms)


def _tasks(files: Sequence[File]) -> list[list[str]]:
    """Group the files, in order, into the files of one task each."""
    tasks: list[list[str]] = []
    left = 0
    for file in files:
        if left < file.bytes:
            tasks.append([])
            left = FILE_BYTES_MAX
        tasks[-1].append(file.key)
        left -= file.bytes
    return tasks


def _read(location: FilesLocation, keys: Sequence[str]) -> Batches:
    for key in keys:
        yield from pyarrow.parquet.ParquetFile(_get(location, key)).iter_batches()


def _get(location: FilesLocation, key: str) -> pyarrow.BufferReader:
    return pyarrow.BufferReader(at_location(location, lambda store: store.get(key)))
