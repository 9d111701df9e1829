"""The manifest of a topic's files, and the names of its successors. Pure.

A store holds manifests 1, 2, 3 …, each put if absent: so of two that continue from one, one wins. The highest is what
holds; a file that it does not name is not there. It says for each read partition up to where the topic is covered.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from memq.errors import CorruptDataError
from memq.format.sealed_json import open_sealed, seal
from memq.topic import Position

PREFIX = "manifests/"
KEPT = 10  # readers of one that was the highest may still be at it


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

    `covered` has by read partition, as text, the position up to which they hold it.
    """

    number: int
    topic: str
    topic_id: str
    started: dict[str, str] = {}
    covered: dict[str, str] = {}
    files: tuple[File, ...] = ()

    @property
    def key(self) -> str:
        """Where it lies."""
        return key_of(self.number)

    @property
    def records(self) -> int:
        """How many records its files hold."""
        return sum(file.records for file in self.files)

    @property
    def positions(self) -> dict[int, Position]:
        """By read partition, up to where it is covered."""
        return {int(partition): Position.parse(text) for partition, text in self.covered.items()}

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
            files=self.files + files,
        )


DAMAGE_HINT = "restore it, or write to another place"
_DECODER = msgspec.json.Decoder(FilesManifest)
_FIELDS = frozenset(FilesManifest.__struct_fields__)


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
