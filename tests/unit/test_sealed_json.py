"""Manifests have a checksum: no changed bit gives another valid manifest."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from awscrt.checksums import crc32c

from memq.errors import CorruptDataError, MemqError, UnsupportedFormatError
from memq.format.key import manifest_key
from memq.format.sealed_json import is_sealed
from memq.format.staged_manifest import (
    Manifest,
    StagedObject,
    StagedPiece,
    decode_manifest,
    encode_manifest,
    manifest_under,
)
from memq.runtime.clock import SystemClock
from memq.spark.pipelines.topic_files import FilesManifest
from memq.spark.pipelines.topic_files import decode_manifest as decode_files
from memq.spark.pipelines.topic_files import encode_manifest as encode_files
from memq.storage_handlers.confirmed_reads import read_sealed
from memq.storage_handlers.memory import MemoryHandler

PIECE = StagedPiece(
    topic="clicks", topic_id="ab" * 16, partition=1, offset=64, length=900, records=12, raw_bytes=1_000, times=((5, 0),)
)
STAGED = StagedObject(key="memq/staged/1", bytes=1_200, index_offset=964, pieces=(PIECE,), digest="00ff" * 4)
MANIFEST = Manifest(cluster="c", writer="w", batch_id=3, store="main", created_ms=17, objects=(STAGED,), source="s")
KEY = manifest_key("c", "w", 3)
FILES = FilesManifest(number=4, topic="clicks", topic_id="ab" * 16, covered={"0": "0:3:0"})


def flipped(data: bytes, bit: int) -> bytes:
    """Return the bytes with one bit changed."""
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@pytest.mark.parametrize(
    ("data", "decode"),
    [
        (encode_manifest(MANIFEST), lambda data: manifest_under(data, KEY)),
        (encode_files(FILES), lambda data: decode_files(data, FILES.key)),
    ],
)
def test_each_changed_bit_and_each_cut_is_damage(data: bytes, decode: Callable[[bytes], Any]) -> None:
    assert decode(data) in (MANIFEST, FILES)
    for bit in range(8 * len(data)):
        with pytest.raises(CorruptDataError, match="manifest"):
            decode(flipped(data, bit))
    for length in range(len(data)):
        with pytest.raises(CorruptDataError, match="manifest"):
            decode(data[:length])


def test_a_manifest_of_an_earlier_writer_is_read() -> None:
    earlier = msgspec.json.encode(MANIFEST)
    assert not is_sealed(earlier)
    assert decode_manifest(earlier, KEY) == MANIFEST


def test_a_manifest_of_a_later_writer_has_more_fields() -> None:
    fields = msgspec.json.encode({**msgspec.to_builtins(MANIFEST), "later": 1})
    assert decode_manifest(fields[:-1] + b',"checksum":"%08x"}' % crc32c(fields), KEY) == MANIFEST
    with pytest.raises(CorruptDataError, match="has no checksum, but 'later'"):
        decode_manifest(fields, KEY)


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b"\xff", b'{"version":9}', b"[" * 100_000])
def test_other_bytes_are_no_manifest(body: bytes) -> None:
    with pytest.raises(MemqError, match=KEY):
        decode_manifest(body, KEY)


def test_an_unknown_version_is_refused() -> None:
    with pytest.raises(UnsupportedFormatError, match="has version 9"):
        decode_manifest(encode_manifest(msgspec.structs.replace(MANIFEST, version=9)), KEY)


@pytest.mark.parametrize("other", [{"cluster": "d"}, {"writer": "v"}, {"batch_id": 4}])
def test_the_manifest_of_another_batch_is_damage(other: dict[str, Any]) -> None:
    with pytest.raises(CorruptDataError, match=f"under '{KEY}' lies batch"):
        manifest_under(encode_manifest(msgspec.structs.replace(MANIFEST, **other)), KEY)


class LyingStore(MemoryHandler):
    """Changes one bit of the answers whose numbers are given."""

    def __init__(self, data: bytes, lies: dict[int, int]) -> None:
        super().__init__(SystemClock())
        self.objects[KEY] = data
        self.reads = 0
        self._lies = lies

    async def get(self, key: str, *, checked: bool = True) -> bytes:
        """Return the object, changed on the way or not."""
        self.reads += 1
        body, bit = await super().get(key), self._lies.get(self.reads)
        return body if bit is None else flipped(body, bit)


def test_a_manifest_that_changes_on_the_way_is_read_again() -> None:
    store = LyingStore(encode_manifest(MANIFEST), {1: 100, 2: 1_000})
    assert asyncio.run(read_sealed(store, KEY, manifest_under)) == (MANIFEST, store.objects[KEY])


def test_a_manifest_without_a_checksum_is_believed_when_two_reads_agree() -> None:
    earlier = msgspec.json.encode(MANIFEST)
    digit = 8 * (earlier.index(b'"created_ms":17') + len('"created_ms":1'))  # 17 becomes 16, which is valid
    assert decode_manifest(flipped(earlier, digit), KEY).created_ms == 16
    store = LyingStore(earlier, {1: digit})
    assert asyncio.run(read_sealed(store, KEY, manifest_under)) == (MANIFEST, earlier)
    assert store.reads == 3


def test_a_manifest_that_is_stored_damaged_is_named() -> None:
    store = LyingStore(flipped(encode_manifest(MANIFEST), 1_000), {})
    with pytest.raises(CorruptDataError, match=KEY):
        asyncio.run(read_sealed(store, KEY, manifest_under))
    assert store.reads == 2
