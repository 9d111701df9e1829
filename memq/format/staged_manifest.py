"""The manifest of a staged batch: one sealed JSON document in the store that lists its pieces.

The first put decides: a later attempt to commit the batch publishes the pieces of this manifest. It never changes.

An *atomic* batch becomes visible by a transaction: its manifest decides the content only. Each part of the transaction
names the manifest. Before the first piece of a committed transaction is published, a mark is put (`decided_key`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Annotated, cast
from zlib import crc32

import msgspec
from msgspec import UNSET, Meta, UnsetType

from memq.errors import CorruptDataError, TooLargeError, UnsupportedFormatError
from memq.format.blocks.header import Buffer
from memq.format.key import manifest_key
from memq.format.pointer import Hex, Number, Text, Time, TopicId
from memq.format.sealed_json import open_sealed, seal
from memq.limits import FORMAT_VERSION, FORMAT_VERSIONS, MANIFEST_BYTES_MAX

Partition = Annotated[int, Meta(ge=0, lt=1 << 32)]
StagedPartition = tuple[str, str, int]  # topic, topic id, write partition
DIGEST_END = 1 << 64
MARK = b"committed\n"  # the whole content of a mark
TRANSACTIONS_WRITER = "_memq_transactions"  # stages the large parts of producers' transactions


class StagedPiece(msgspec.Struct, frozen=True, kw_only=True):
    """The blocks of one partition in a staged object: a batch at byte `offset`, with pointer facts.

    `times` has a pair for each run of blocks whose least timestamps are in one minute. A pair is the least of these
    (ms), and the sequence after the run. The first run begins at 0. The audit needs them; earlier writers had none.
    """

    topic: Text
    topic_id: TopicId
    partition: Partition
    offset: Number
    length: Number
    records: Number
    raw_bytes: Number
    times: tuple[tuple[Time, Number], ...] = ()


class StagedObject(msgspec.Struct, frozen=True, kw_only=True):
    """One staged object: `bytes` long, index at `index_offset`, and the producer id of its blocks.

    `digest` is a sum over the values and keys of its records, which does not depend on their order (`digest_of`).
    `created_ms` (Unix ms) is when it was put; earlier writers left it out.
    """

    key: Text
    bytes: Number
    index_offset: Number
    pieces: tuple[StagedPiece, ...]
    producer: Hex = "0" * 16  # earlier writers left out producer and digest
    digest: Hex | None = None
    created_ms: Number | UnsetType = UNSET


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """One batch of a writer: its objects in `store` in order of records, and its time (Unix ms).

    `source` is the stream of the batch, if there is one. It distinguishes two streams with the same writer name.
    `atomic`: a transaction decides whether it becomes visible.
    """

    version: int = FORMAT_VERSION
    cluster: Text
    writer: Text
    batch_id: Number
    store: Text
    created_ms: Number
    objects: tuple[StagedObject, ...]
    source: str = ""
    atomic: bool | UnsetType = UNSET

    @property
    def is_atomic(self) -> bool:
        """Whether a transaction decides about the batch."""
        return self.atomic is True

    @property
    def is_remembered(self) -> bool:
        """Whether partitions remember the writer: a producer's transaction is known by its unit alone (H4)."""
        return self.writer != TRANSACTIONS_WRITER

    def by_partition(self) -> dict[StagedPartition, list[tuple[StagedObject, StagedPiece]]]:
        """Return the pieces of each partition in order; the number of a piece is its index."""
        found: dict[StagedPartition, list[tuple[StagedObject, StagedPiece]]] = {}
        for staged in self.objects:
            for piece in staged.pieces:
                found.setdefault((piece.topic, piece.topic_id, piece.partition), []).append((staged, piece))
        return found


def digest_of(values: Iterable[Buffer | None], keys: Iterable[Buffer | None] = ()) -> int:
    """Return a sum of checksums that depends neither on the order of values and keys nor on the parts."""
    held, named = cast(Iterable[bytes], filter(None, values)), cast(Iterable[bytes], filter(None, keys))
    return sum(map(crc32, held)) + (sum(map(crc32, named)) << 16)


def same_rows(one: Sequence[StagedObject], other: Sequence[StagedObject]) -> bool:
    """Whether two sets of objects have equal record counts by topic, and equal digests where both exist."""
    return _counts(one) == _counts(other) and (
        any(each.digest is None for each in (*one, *other)) or _digest(one) == _digest(other)
    )


def _counts(objects: Sequence[StagedObject]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for staged in objects:
        for piece in staged.pieces:
            counts[piece.topic_id] += piece.records
    return counts


def _digest(objects: Sequence[StagedObject]) -> int:
    return sum(int(each.digest or "0", 16) for each in objects) % DIGEST_END


_encode = msgspec.json.Encoder().encode
_DECODER = msgspec.json.Decoder(Manifest)
_FIELDS = frozenset(Manifest.__struct_fields__)


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the manifest's sealed JSON. Raises: TooLargeError over MANIFEST_BYTES_MAX."""
    body = seal(_encode(manifest))
    if len(body) > MANIFEST_BYTES_MAX:
        raise TooLargeError(
            f"manifest of batch {manifest.batch_id} has {len(body)} bytes, {MANIFEST_BYTES_MAX} are allowed",
            hint="commit smaller batches",
        )
    return body


def decode_manifest(body: Buffer, name: str) -> Manifest:
    """Read a manifest; `name` is for errors. Raises: CorruptDataError, UnsupportedFormatError."""
    manifest = open_sealed(body, _DECODER, _FIELDS, f"manifest '{name}'")
    if manifest.version not in FORMAT_VERSIONS:
        raise UnsupportedFormatError(f"manifest '{name}' has version {manifest.version}, known: {FORMAT_VERSIONS}")
    return manifest


def check_mark(body: Buffer) -> None:
    """Check the content of a mark. Raises: CorruptDataError."""
    if bytes(body) != MARK:
        raise CorruptDataError(f"mark of a committed staged batch has {len(body)} other bytes than {MARK!r}")


def manifest_under(body: Buffer, key: str) -> Manifest:
    """Read the manifest of a key.

    Raises: as `decode_manifest`; CorruptDataError also for the manifest of another batch.
    """
    found = decode_manifest(body, key)
    if manifest_key(found.cluster, found.writer, found.batch_id) != key:
        raise CorruptDataError(f"under '{key}' lies batch {found.batch_id} of writer '{found.writer}'")
    return found
