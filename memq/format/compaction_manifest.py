"""The compacted part of a read partition: moved pointers, stored next to their large objects.

A *part* has pointers with their offsets and queue times in the queue; only the locations of their batches are new. A
*manifest* names the parts in the order of their offsets. Manifests are numbered and never change: the highest is valid.
Both are packed files. In their keys, `cold` means *compacted*.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Annotated, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from memq.errors import CorruptDataError, UnsupportedFormatError
from memq.format.blocks.header import Buffer
from memq.format.packed_file import KIND_MANIFEST, KIND_PART, pack_file, unpack_file
from memq.format.pointer import Number, Pointer, Text, Time, TopicId, read_pointer

FILE = "file of a compacted partition"
LARGER = "make larger objects: raise --object-bytes of the compaction"
Partition = Annotated[int, Meta(ge=0, lt=1 << 32)]
Content = TypeVar("Content")


class PartRef(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a manifest: the entries from offset `first` up to, not with, `next`.

    `bytes` is the stored size of their batches in bytes, `greatest_ms` their greatest queue time, and `created_ms` the
    time of the copy. `objects` has the keys of all objects that the entries name. The part itself has the keys of the
    original objects (`ManifestPart.originals`), which readers may still need.
    """

    key: Text
    first: Number
    next: Number
    entries: Number
    bytes: Number
    greatest_ms: Time
    created_ms: Time
    objects: tuple[Text, ...]


class LeftPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part that retention, or a restore, removed at `since_ms`; readers may still read it."""

    part: PartRef
    since_ms: Time


class CompactionManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The compacted part of one read partition: its entries below offset `next`.

    Retention has removed the entries before the first part.
    """

    number: int
    cluster: Text
    topic: Text
    topic_id: TopicId
    partition: Partition
    next: Number = 0
    parts: tuple[PartRef, ...] = ()
    left: tuple[LeftPart, ...] = ()
    requires: tuple[Text, ...] = ()

    @property
    def begin(self) -> int:
        """The first offset that is left."""
        return self.parts[0].first if self.parts else self.next


class ManifestEntry(NamedTuple):
    """One pointer that left the queue: its offset, its queue time in Unix ms, its bytes."""

    offset: int
    time_ms: int
    body: bytes


class ManifestPart(NamedTuple):
    """The content of a part, and the keys of the objects that its pointers named in the queue."""

    entries: tuple[ManifestEntry, ...]
    originals: tuple[str, ...]


class _WireManifestPart(msgspec.Struct, frozen=True, kw_only=True):
    entries: tuple[tuple[Number, Time, msgspec.Raw], ...]
    originals: tuple[Text, ...] = ()


_encode = msgspec.json.Encoder().encode
_decode_manifest = msgspec.json.Decoder(CompactionManifest).decode
_decode_part = msgspec.json.Decoder(_WireManifestPart).decode


def encode_compaction_manifest(manifest: CompactionManifest) -> bytes:
    """Return the manifest's bytes. Raises: TooLargeError."""
    return pack_file(KIND_MANIFEST, _encode(manifest), f"manifest {manifest.number} of a compacted partition", LARGER)


def decode_compaction_manifest(data: Buffer) -> CompactionManifest:
    """Read a manifest. Raises: CorruptDataError, UnsupportedFormatError."""
    try:
        manifest = _decode_manifest(unpack_file(KIND_MANIFEST, data, FILE))
    except (ValueError, RecursionError) as error:
        raise CorruptDataError(f"manifest of a compacted partition can't be read: {error}") from error
    if manifest.requires:
        raise UnsupportedFormatError(f"manifest of a compacted partition requires {list(manifest.requires)[:8]}")
    at = 0
    for part in manifest.parts:
        if not at <= part.first < part.next <= manifest.next:
            raise CorruptDataError(f"part {part.first} to {part.next} of a manifest does not follow on {at}")
        at = part.next
    return manifest


def encode_manifest_part(part: ManifestPart) -> bytes:
    """Return the part's bytes. Raises: TooLargeError."""
    entries = tuple((offset, time_ms, _wire_body(body)) for offset, time_ms, body in part.entries)
    wire = _WireManifestPart(entries=entries, originals=part.originals)
    return pack_file(KIND_PART, _encode(wire), "part of a manifest", LARGER)


def decode_manifest_part(data: Buffer) -> ManifestPart:
    """Read a part. Raises: CorruptDataError, UnsupportedFormatError."""
    try:
        wire = _decode_part(unpack_file(KIND_PART, data, FILE))
        entries = tuple(ManifestEntry(offset, time_ms, _body(raw)) for offset, time_ms, raw in wire.entries)
    except (ValueError, RecursionError) as error:
        raise CorruptDataError(f"part of a manifest can't be read: {error}") from error
    _check_order(entries)
    return ManifestPart(entries, wire.originals)


def _check_order(entries: Sequence[ManifestEntry]) -> None:
    at = -1
    for entry in entries:
        if entry.offset <= at:
            raise CorruptDataError(f"offset {entry.offset} of a part does not follow on {at}")
        at = entry.offset


def _wire_body(body: bytes) -> msgspec.Raw:
    """Return a readable pointer unchanged, another as base64 text: it may be no JSON."""
    if isinstance(read_pointer(body, newer="return"), Pointer):
        return msgspec.Raw(body)
    return msgspec.Raw(_encode(base64.b64encode(body).decode()))


def _body(raw: msgspec.Raw) -> bytes:
    body = bytes(raw)
    if not body.startswith(b'"'):
        return body
    try:
        return base64.b64decode(msgspec.json.decode(body, type=str), validate=True)
    except binascii.Error as error:
        raise CorruptDataError(f"pointer of a part is no base64: {error}") from error
