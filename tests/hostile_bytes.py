"""Structured mutation of everything that memq parses: changed bytes, then a right checksum, then three bounds.

A target parses bytes of a stranger. It may return, or raise a `MemqError`. It takes at most CPU_S_MAX of CPU, and
allocates at most ALLOCATED_MAX times the larger of its input and the raw length that a block states, which is bounded.
"""

from __future__ import annotations

import gc
import json
import struct
import time
import tracemalloc
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from awscrt.checksums import crc32c
from hypothesis import strategies as st

from memq.encryption.encryption import Encryption
from memq.encryption.keys import environment_keys
from memq.encryption.records import decode_content, encode_content
from memq.errors import MemqError
from memq.format.batch import BlockPiece
from memq.format.blocks.columns import open_block, verify_block
from memq.format.compaction_manifest import decode_compaction_manifest, decode_manifest_part
from memq.format.object import INDEX_MAGIC, open_object
from memq.format.pointer import decode_pointer
from memq.format.ranges import RangeSet
from memq.format.report import decode_report
from memq.format.sealed_json import seal
from memq.format.spool import decode_segment
from memq.format.state_log.entry import decode_state_entry
from memq.format.state_log.held_run import HELD_ROWS
from memq.format.state_log.queue_run import QUEUE_ROWS
from memq.format.state_log.run import open_run
from memq.format.subject_keys import SLOTS_AT, decode_head, decode_slots
from memq.limits import KIB, TRAILER_BYTES
from memq.protocol.admin_messages import AdminRequest
from memq.protocol.frames import FrameReader
from memq.protocol.group_messages import CommitRequest, HeartbeatRequest, JoinRequest
from memq.protocol.messages import Close, Hello, Open, PollRequest, ReadRequest, decode_message
from memq.settings import parse_value
from tests.golden.make import MASTER_KEY, TOPIC_ID

CPU_S_MAX = 0.1
ALLOCATED_MAX = 4
FREE_BYTES = 96 * KIB  # what does not grow with the input: the buffer of a connection, errors, decoders
GOLDEN = Path(__file__).parent / "golden"
CORPUS = GOLDEN / "hostile_bytes.json"
_CHECKED_FROM = 8
Edit = tuple[str, int, bytes]


@dataclass(frozen=True)
class Target:
    """A parser, sound inputs for it, and the function that gives changed ones right checksums."""

    parse: Callable[[bytes], object]
    seeds: tuple[bytes, ...]
    sealed: Callable[[bytes], bytes] = bytes


def _golden(*names: str) -> tuple[bytes, ...]:
    return tuple((GOLDEN / name).read_bytes() for name in names)


def _behind_magic(data: bytes) -> bytes:
    """Put the CRC-32C of the rest behind the magic, as blocks and entries have it."""
    rest = data[_CHECKED_FROM:]
    checksum: int = crc32c(rest)
    return data[:4] + checksum.to_bytes(4, "little") + rest


def _object_sealed(data: bytes) -> bytes:
    """Give an object a trailer that fits its length and the place of its index, with the right checksum."""
    at = data.rfind(INDEX_MAGIC)
    if at < 0 or len(data) - at < TRAILER_BYTES:
        return data
    index = data[at:-TRAILER_BYTES]
    start = struct.pack("<QQI", at, len(data), len(index)) + data[-TRAILER_BYTES + 20 : -8]
    checksum: int = crc32c(start, crc32c(index))
    return data[:-TRAILER_BYTES] + start + checksum.to_bytes(4, "little") + data[-4:]


def _json_sealed(data: bytes) -> bytes:
    """Seal a document again; the seal is its last member."""
    at = data.rfind(b',"checksum":"')
    return seal(data[:at] + b"}") if at > 0 else data


def _parse_frames(data: bytes) -> None:
    reader = FrameReader()
    for at in range(0, len(data), 4 * KIB):
        piece = data[at : at + 4 * KIB]
        while piece:
            room = reader.get_buffer()
            taken = min(len(room), len(piece))
            room[:taken] = piece[:taken]
            reader.received(taken)
            piece = piece[taken:]


def _parse_body(kinds: tuple[type[Any], ...]) -> Callable[[bytes], None]:
    def parse(data: bytes) -> None:
        for kind in kinds:
            try:
                decode_message(data, kind)
            except MemqError:
                continue

    return parse


def _parse_setting(data: bytes) -> None:
    name, _, value = data.decode("utf-8", "replace").partition("=")
    parse_value(name if name in ("port", "memory_bytes_max", "audit", "frame_timeout_ms") else "port", value)


def _parse_ranges(data: bytes) -> None:
    numbers = [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]
    try:
        RangeSet.from_flat(numbers)
    except ValueError:  # of the caller's own list; its doors turn it into an answer
        return


def _open_encrypted(data: bytes) -> None:
    keys = "golden:" + b64encode(MASTER_KEY).decode()
    encryption = Encryption(environment_keys("KEYS", {"KEYS": keys}), subjects=GOLDEN / "subject-keys.bin")
    reader = open_block(data)
    piece = BlockPiece(0, 0, reader.count, reader.header, memoryview(data))
    (opened,) = encryption.open_pieces([piece], TOPIC_ID, 3)
    if opened.header is not None:
        verify_block(opened.reader())


def _parse_subject_keys(data: bytes) -> None:
    decode_head(data[:SLOTS_AT])
    decode_slots(data[SLOTS_AT:], 0)


_BODIES = (
    b'{"least_version":1,"greatest_version":1,"client":"a","client_id":"b","frame_checksums":true,"token":"x.y.z"}',
    b'{"topic":"t","topic_id":"00","partition":0,"producer":"0000000000000001","acks":2,"sequence":0,"secret":"s"}',
    b'{"next_sequence":9,"burned":[[1,2],[4,8]]}',
    b'{"ask":{"op":"create-topic","name":"t","partitions":3,"settings":{}}}',
    b'{"ask":{"op":"change-permissions","add":[],"remove":[]}}',
    b'{"group":"g","member":"m","generation":1,"positions":[]}',
    b'{"group":"g","member":"m","partitions":[],"session_timeout_ms":1000}',
    b'{"store":"main","key":"k","offset":0,"length":9}',
)
_KINDS = (Hello, Open, Close, AdminRequest, PollRequest, ReadRequest, CommitRequest, JoinRequest, HeartbeatRequest)
TARGETS: dict[str, Target] = {
    "block": Target(
        lambda data: verify_block(open_block(data)),
        _golden("block-none.bin", "block-plain.bin", "block-zstd.bin", "block-lz4.bin"),
        _behind_magic,
    ),
    "encrypted-block": Target(_open_encrypted, _golden("block-encrypted.bin"), _behind_magic),
    "record-content": Target(decode_content, (encode_content(b"value", [("a", b"1"), ("b", None)]),)),
    "subject-keys": Target(_parse_subject_keys, _golden("subject-keys.bin")),
    "object": Target(open_object, _golden("object.bin"), _object_sealed),
    "pointer": Target(
        decode_pointer, _golden("pointer-data.json", "pointer-ended.json", "pointer-opened.json"), _json_sealed
    ),
    "report": Target(decode_report, _golden("report-consumer.json", "report-producer.json"), _json_sealed),
    "state-entry": Target(
        decode_state_entry, _golden("state-decisions.bin", "state-opened.bin", "state-snapshot.bin"), _behind_magic
    ),
    "held-run": Target(partial(open_run, HELD_ROWS), _golden("held-run.bin"), _behind_magic),
    "queue-run": Target(partial(open_run, QUEUE_ROWS), _golden("queue-run.bin"), _behind_magic),
    "spool": Target(decode_segment, _golden("segment.spool"), _behind_magic),
    "manifest": Target(decode_compaction_manifest, _golden("compaction-manifest.bin"), _json_sealed),
    "manifest-part": Target(decode_manifest_part, _golden("manifest-part.bin"), _behind_magic),
    "frame": Target(_parse_frames, (b"\x10\0\0\0\x0a\0\0\0" + bytes(24), b"\0\0\0\0\x05\0\0\0" + bytes(8))),
    "body": Target(_parse_body(_KINDS), (*_BODIES, *map(seal, _BODIES)), _json_sealed),
    "setting": Target(_parse_setting, (b"port=9876", b"memory_bytes_max=1GiB", b"audit=true", b"frame_timeout_ms=5s")),
    "ranges": Target(_parse_ranges, (bytes(8) + b"\x09" + bytes(7), b"")),
}
_NUMBERS = (b"\xff\xff\xff\xff", b"\0\0\0\x80", b"\xff\xff\xff\x7f", b"\0\0\0\0", b"\1\0\0\0", b"\xff" * 8, b"9" * 30)
_pieces = st.one_of(st.binary(min_size=1, max_size=16), st.sampled_from(_NUMBERS))
edits = st.lists(
    st.tuples(st.sampled_from(("set", "put", "cut", "twice")), st.integers(0, 1 << 16), _pieces), max_size=6
)


def changed(data: bytes, edits_: list[Edit]) -> bytes:
    """Return the data with some bytes overwritten, put in, cut out, or repeated."""
    for kind, place, piece in edits_:
        at = place % (len(data) + 1)
        if kind == "set":
            data = data[:at] + piece + data[at + len(piece) :]
        elif kind == "put":
            data = data[:at] + piece + data[at:]
        elif kind == "cut":
            data = data[:at] + data[at + piece[0] :]
        else:
            data = data[:at] + data[at : at + 64] * (1 + piece[0]) + data[at:]
    return data


def allowance(data: bytes) -> int:
    """Return how many bytes a parser may allocate at once for an input."""
    raw = int.from_bytes(data[16:20], "little") if data[:4] == b"mqB1" and data[9:10] != b"\0" else 0
    return FREE_BYTES + ALLOCATED_MAX * max(len(data), min(raw, 16 * KIB * KIB))


def check(name: str, data: bytes, *, measured: bool = True) -> None:
    """Parse once for the outcome and the CPU, and once for the memory."""
    target = TARGETS[name]
    began = time.thread_time()
    _parse(target, data)
    taken = time.thread_time() - began
    if taken > CPU_S_MAX:  # a collection of garbage may have been in it
        gc.collect()
        began = time.thread_time()
        _parse(target, data)
        taken = time.thread_time() - began
    assert taken <= CPU_S_MAX, f"{name}: {taken:.3f} s of CPU for {len(data)} bytes"
    if not measured:
        return
    tracemalloc.start()
    try:
        _parse(target, data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= allowance(data), f"{name}: {peak} bytes allocated for {len(data)}"


def corpus() -> Iterator[tuple[str, bytes]]:
    """Return the kept inputs, each with its target."""
    for name, inputs in json.loads(CORPUS.read_text()).items():
        for text in inputs:
            yield name, bytes.fromhex(text)


def _parse(target: Target, data: bytes) -> None:
    try:
        target.parse(data)
    except MemqError:
        return
