"""Print the records of an object file of memq as JSON lines, without memq.

This file shows that the format is published: it was written from docs/formats.md, and uses the standard
library and the package zstandard alone (blocks packed with lz4 need the package lz4).

    python examples/read_object.py OBJECT_FILE

Exit codes: 0 all records printed, 1 the file is damaged or newer than this program, 2 usage.
"""

from __future__ import annotations

import base64
import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zstandard

KEY, TIMESTAMP, HEADERS, TAG, NULL_KEYS, NULL_VALUES, EXTENSIONS = 1, 2, 4, 8, 16, 32, 64
VERSIONS = (1,)
RAW_BYTES_MAX = 1 << 24


class RefusedError(Exception):
    """The file is damaged, or newer than this program."""


def make_crc32c_table() -> list[int]:
    """Return the table of CRC-32C (Castagnoli, reflected polynomial 0x82F63B78)."""
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


CRC32C = make_crc32c_table()


def crc32c(data: bytes) -> int:
    """Return the CRC-32C of `data`."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = CRC32C[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def check(good: bool, what: str) -> None:
    """Refuse the file with `what` unless `good`."""
    if not good:
        raise RefusedError(what)


class Reader:
    """Bytes that are read from front to back, and never past their end."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, size: int) -> bytes:
        """Return the next `size` bytes."""
        check(size <= len(self.data) - self.at, f"{size} bytes are missing at {self.at}")
        self.at += size
        return self.data[self.at - size : self.at]

    def numbers(self, code: str, count: int) -> tuple[int, ...]:
        """Return the next `count` little-endian numbers."""
        size = struct.calcsize(f"<{code}") * count
        return struct.unpack(f"<{count}{code}", self.take(size))

    def number(self, code: str) -> int:
        """Return the next number."""
        return self.numbers(code, 1)[0]


def read_index(data: bytes) -> tuple[dict[str, Any], list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Return meta, batch entries and block entries of an object."""
    check(len(data) >= 56, "the file is too short for an object")
    index_at, length, index_length, version, crc, magic = struct.unpack("<QQIB3xI4s", data[-32:])
    check(magic == b"mqT1", "the file does not end as an object of memq does")
    check(version in VERSIONS, f"version {version} is newer than this program")
    check(length == len(data) == index_at + index_length + 32, f"the file has {len(data)} bytes, {length} are needed")
    check(crc32c(data[index_at:-8]) == crc, "the index is damaged")
    index = Reader(data[index_at:-32])
    magic, version, codec, _ = struct.unpack("<4sBBH", index.take(8))
    check(magic == b"mqI1" and version in VERSIONS and codec == 0, "the index is of an unknown kind")
    meta_length, batches, blocks = index.numbers("I", 3)
    batch_size, block_size = index.numbers("H", 2)
    meta = json.loads(index.take(meta_length))
    check(not meta.get("requires"), f"the object requires {meta.get('requires')}")
    batch_entries = [struct.unpack_from("<QQqQQIIIIH", index.take(batch_size)) for _ in range(batches)]
    block_entries = [struct.unpack_from("<QQQqqIIIHHQ", index.take(block_size)) for _ in range(blocks)]
    return meta, batch_entries, block_entries


def unpack(payload: bytes, codec: int, raw_length: int) -> bytes:
    """Return the raw columns; their length is checked before they are unpacked."""
    check(raw_length <= RAW_BYTES_MAX, f"raw length {raw_length} is over the bound")
    if codec == 1:
        check(zstandard.frame_content_size(payload) == raw_length, "the zstd frame states another length")
        payload = zstandard.ZstdDecompressor().decompress(payload, allow_extra_data=False)
    elif codec == 2:
        try:
            import lz4.block
        except ImportError:
            raise RefusedError("it is packed with lz4, and the package lz4 is not installed: pip install lz4") from None
        try:
            payload = lz4.block.decompress(payload, uncompressed_size=raw_length)
        except lz4.block.LZ4BlockError as error:
            raise RefusedError(f"the payload does not unpack: {error}") from error
    else:
        check(codec == 0, f"codec {codec} is unknown")
    check(len(payload) == raw_length, f"the payload unpacks to {len(payload)} bytes, not {raw_length}")
    return payload


def present(columns: Reader, flagged: int, count: int) -> list[bool]:
    """Return for each cell whether it is there, from a bitmap when the flag is set."""
    if not flagged:
        return [True] * count
    bits = columns.take((count + 7) // 8)
    return [bool(bits[n // 8] >> n % 8 & 1) for n in range(count)]


def read_block(data: bytes) -> Iterator[dict[str, Any]]:
    """Yield the records of one block."""
    magic, crc, version, codec, flags, payload_length, raw_length, count = struct.unpack_from("<4sIBBHIII", data)
    producer_id, sequence, base_ms = struct.unpack_from("<QQq", data, 32)
    check(magic == b"mqB1" and len(data) == 72 + payload_length, "the block is not where the index says")
    check(crc32c(data[8:]) == crc, "the checksum is wrong")
    check(version in VERSIONS and flags < 128, f"version {version} or flags {flags} are newer than this program")
    columns = Reader(unpack(data[72:], codec, raw_length))

    value_lengths = columns.numbers("I", count)
    key_lengths = columns.numbers("I", count) if flags & KEY else ()
    times = columns.numbers("q", count) if flags & TIMESTAMP else (base_ms,) * count
    headers = columns.number("I") if flags & HEADERS else 0
    header_lengths = columns.numbers("I", headers)
    header_names = columns.numbers("H", headers)
    header_counts = columns.numbers("H", count) if flags & HEADERS else (0,) * count
    tags = columns.numbers("H", count) if flags & TAG else (0xFFFF,) * count
    values_present = present(columns, flags & NULL_VALUES, count)
    keys_present = present(columns, flags & NULL_KEYS, count)
    names = []
    if flags & (HEADERS | TAG):
        names = [str(columns.take(columns.number("H")), "utf-8") for _ in range(columns.number("H"))]
    if flags & EXTENSIONS:
        extensions = Reader(columns.take(columns.number("I")))
        while extensions.at < len(extensions.data):
            extension = extensions.number("H")
            extensions.take(extensions.number("I"))
            check(extension < 0x8000, f"extension {extension:#x} is newer than this program")

    keys = [columns.take(length) for length in key_lengths] or [b""] * count
    header_values = [None if length == 0xFFFFFFFF else columns.take(length) for length in header_lengths]
    values = [columns.take(length) for length in value_lengths]
    check(columns.at == raw_length and sum(header_counts) == headers, "the columns do not fill the block")

    pairs = iter(zip((names[name] for name in header_names), header_values, strict=True))
    for n in range(count):
        record: dict[str, Any] = {"timestamp_ms": times[n]}
        if flags & KEY and keys_present[n]:
            add(record, "key", keys[n])
        own = [next(pairs) for _ in range(header_counts[n])]
        if own:
            record["headers"] = [[name, in_json(value)] for name, value in own]
        if tags[n] != 0xFFFF:
            record["tag"] = names[tags[n]]
        add(record, "value", values[n] if values_present[n] else None)
        yield {**record, "producer_id": f"{producer_id:016x}", "sequence": sequence + n}


def add(record: dict[str, Any], name: str, content: bytes | None) -> None:
    """Add bytes to a record: as text when they are UTF-8, else in base64."""
    text = in_json(content)
    if isinstance(text, dict):
        record[f"{name}_base64"] = text["base64"]
    else:
        record[name] = text


def in_json(content: bytes | None) -> str | dict[str, str] | None:
    """Return bytes as JSON can hold them."""
    if content is None:
        return None
    try:
        return content.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(content).decode()}


def read_object(data: bytes) -> Iterator[dict[str, Any]]:
    """Yield the records of an object, in order."""
    meta, batches, blocks = read_index(data)
    for _, _, _, _, _, first_block, count, partition, _, topic in batches:
        for offset, _, _, _, _, length, *_ in blocks[first_block : first_block + count]:
            place = {"topic": meta["topics"][topic]["name"], "partition": partition}
            try:
                for record in read_block(data[offset : offset + length]):
                    yield {**place, **record}
            except RefusedError as error:
                raise RefusedError(f"block at {offset}: {error}") from error


def main(arguments: list[str]) -> int:
    """Print the records of the file that is named."""
    if len(arguments) != 1:
        print("usage: read_object.py OBJECT_FILE", file=sys.stderr)
        return 2
    try:
        for record in read_object(Path(arguments[0]).read_bytes()):
            print(json.dumps(record, ensure_ascii=False))
    except (RefusedError, OSError, struct.error, IndexError, KeyError, ValueError, zstandard.ZstdError) as error:
        print(f"{arguments[0]}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
