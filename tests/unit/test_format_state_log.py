"""Entries and snapshots of a state log: they round-trip, and any change is damage or newer."""

from __future__ import annotations

import random
import struct

import pytest
from awscrt.checksums import crc32c
from hypothesis import given
from hypothesis import strategies as st

from memq.errors import CorruptDataError, TooLargeError, UnsupportedFormatError
from memq.format.key import kind_without_batches, state_part_key, state_prefix, state_snapshot_key
from memq.format.packed_file import KIND_STATE_PART, pack_file
from memq.format.state_log import entry as entries
from memq.format.state_log import snapshot
from memq.format.state_log.entry import (
    OpenedState,
    StateDecision,
    StateDecisions,
    StateEntry,
    StateSnapshot,
    decision_bytes,
    decode_state_entry,
    encode_state_entry,
)
from memq.format.state_log.snapshot import SavedState, decode_part, decode_snapshot, encode_snapshot
from memq.limits import POINTER_BYTES_MAX, STATE_PART_BYTES_MAX

U32 = st.integers(0, (1 << 32) - 1)
U64 = st.integers(0, (1 << 64) - 1)
EPOCH = st.integers(1, (1 << 32) - 1)
NAME = st.text(min_size=1, max_size=20)
DECISIONS = st.lists(st.builds(StateDecision, NAME, st.binary(max_size=50)), max_size=5).map(tuple)
CONTENT = st.one_of(
    st.builds(StateDecisions, DECISIONS), st.builds(StateSnapshot, U64, U64, EPOCH, U64, U32, EPOCH, NAME)
)
ENTRIES = st.one_of(
    st.builds(StateEntry, EPOCH, st.just(0), st.builds(OpenedState, U64, st.text(max_size=20))),
    st.builds(StateEntry, EPOCH, U64, CONTENT),
)
NAMED = StateSnapshot(17, 4, 2, 60, 5, 2, "key")


def sealed(body: bytes, kind: int, *, version: int = 1, flags: int = 0, epoch: int = 1, number: int = 0) -> bytes:
    """Return an entry with a valid checksum."""
    rest = struct.pack("<BBHIQ", version, kind, flags, epoch, number) + body
    return b"mqL1" + struct.pack("<I", crc32c(rest)) + rest


@given(ENTRIES)
def test_an_entry_reads_as_it_was_written(entry: StateEntry) -> None:
    assert decode_state_entry(encode_state_entry(entry)) == entry


@given(ENTRIES, st.randoms(use_true_random=False))
def test_an_entry_with_a_changed_bit_or_a_cut_end_is_damaged(entry: StateEntry, draw: random.Random) -> None:
    body = bytearray(encode_state_entry(entry))
    with pytest.raises(CorruptDataError):
        decode_state_entry(bytes(body[: draw.randrange(len(body))]))
    with pytest.raises(CorruptDataError):
        decode_state_entry(bytes(body) + b"\0")
    body[draw.randrange(len(body))] ^= 1 << draw.randrange(8)
    with pytest.raises(CorruptDataError):
        decode_state_entry(bytes(body))


@given(st.binary(max_size=80), st.integers(1, 3), EPOCH)
def test_any_body_with_a_valid_checksum_reads_or_is_damaged(body: bytes, kind: int, epoch: int) -> None:
    data = sealed(body, kind, epoch=epoch)
    try:
        entry = decode_state_entry(data)
    except CorruptDataError:
        return
    assert encode_state_entry(entry) == data


@pytest.mark.parametrize(
    "data",
    [
        sealed(b"", 4),
        sealed(b"", 0),
        sealed(b"", 2, flags=1),
        sealed(b"", 2, flags=1 << 15),
        sealed(b"", 2, version=2),
        sealed(b"not even a snapshot", 4, epoch=0),
    ],
)
def test_a_newer_entry_is_no_damage(data: bytes) -> None:
    with pytest.raises(UnsupportedFormatError):
        decode_state_entry(data)


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (sealed(b"", 2, epoch=0), "epoch 0"),
        (sealed(struct.pack("<QH", 1, 0), 1, number=1), "number 1"),
        (sealed(struct.pack("<QH", 1, 1) + b"\xff", 1), "no UTF-8"),
        (sealed(struct.pack("<QH", 1, 0) + b"x", 1), "1 bytes too many"),
        (sealed(struct.pack("<QH", 1, 1_025) + b"x" * 1_025, 1), "name of 1025 bytes"),
        (sealed(struct.pack("<HI", 0, 0), 2), "name of 0 bytes"),
        (sealed(struct.pack("<HI", 1, 9) + b"mx", 2), "lacks 8 bytes"),
        (sealed(struct.pack("<QQIQIIH", 1, 1, 0, 1, 1, 1, 1) + b"k", 3), "epoch 0 and 1 parts"),
        (sealed(struct.pack("<QQIQIIH", 1, 1, 1, 1, 1, 0, 1) + b"k", 3), "epoch 1 and 0 parts"),
        (sealed(struct.pack("<QQIQIIH", 1, 1, 1, 1, 1, 1, 0), 3), "name of 0 bytes"),
        (b"", "0 bytes"),
        (b"x" * 30, "starts with"),
        (sealed(b"\0" * POINTER_BYTES_MAX, 2), "are allowed"),
    ],
)
def test_an_entry_that_breaks_a_rule_is_damaged(data: bytes, cause: str) -> None:
    with pytest.raises(CorruptDataError, match=cause):
        decode_state_entry(data)


def test_an_entry_has_at_most_the_bytes_of_a_pointer() -> None:
    room = POINTER_BYTES_MAX - entries.HEAD.size
    body = b"x" * (room - entries.DECISION.size - 1)
    assert decision_bytes("m", body) == room
    assert len(encode_state_entry(StateEntry(1, 0, StateDecisions((StateDecision("m", body),))))) == POINTER_BYTES_MAX
    with pytest.raises(TooLargeError):
        encode_state_entry(StateEntry(1, 0, StateDecisions((StateDecision("m", body + b"x"),))))
    for name, too_much in (("m", body + b"x"), ("", b""), ("é" * 513, b"")):
        with pytest.raises(TooLargeError):
            decision_bytes(name, too_much)


# ---- snapshots -------------------------------------------------------------------------------


@given(U64, EPOCH, U64, st.dictionaries(NAME, st.binary(max_size=50), max_size=4))
def test_a_snapshot_reads_as_it_was_written(offset: int, epoch: int, number: int, machines: dict[str, bytes]) -> None:
    saved = SavedState(offset, epoch, number, machines)
    named, parts = encode_snapshot(saved, "key")
    assert (named.offset, named.epoch, named.number, named.parts, named.key) == (offset, epoch, number, 1, "key")
    assert decode_snapshot(named, [decode_part(part) for part in parts]) == saved


def test_a_large_snapshot_has_parts() -> None:
    saved = SavedState(1, 2, 3, {"a": random.Random(1).randbytes(STATE_PART_BYTES_MAX), "b": b"end"})
    named, parts = encode_snapshot(saved, "key")
    pieces = [decode_part(part) for part in parts]
    assert (named.parts, len(pieces[0])) == (2, STATE_PART_BYTES_MAX)
    assert decode_snapshot(named, pieces) == saved
    for wrong in (pieces[:1], pieces[::-1], [*pieces, b"x"], []):
        with pytest.raises(CorruptDataError, match="has not the"):
            decode_snapshot(named, wrong)


def test_a_part_of_another_kind_is_damaged() -> None:
    with pytest.raises(CorruptDataError):
        decode_part(pack_file(KIND_STATE_PART - 1, b"raw", "file", ""))


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (b"", CorruptDataError),
        (snapshot.HEAD.pack(b"mqN2", 1, 0, 2, 17, 4), CorruptDataError),
        (snapshot.HEAD.pack(b"mqN1", 2, 0, 2, 17, 4), UnsupportedFormatError),
        (snapshot.HEAD.pack(b"mqN1", 1, 0, 3, 17, 4), CorruptDataError),
        (snapshot.HEAD.pack(b"mqN1", 1, 0, 2, 18, 4), CorruptDataError),
        (snapshot.HEAD.pack(b"mqN1", 1, 0, 2, 17, 5), CorruptDataError),
        (snapshot.HEAD.pack(b"mqN1", 1, 1, 2, 17, 4), CorruptDataError),
        (snapshot.HEAD.pack(b"mqN1", 1, 1, 2, 17, 4) + struct.pack("<HQ", 1, 1) + b"m", CorruptDataError),
        (snapshot.HEAD.pack(b"mqN1", 1, 1, 2, 17, 4) + struct.pack("<HQ", 0, 0), CorruptDataError),
        (snapshot.HEAD.pack(b"mqN1", 1, 1, 2, 17, 4) + struct.pack("<HQ", 1, 0) + b"\xff", CorruptDataError),
        (snapshot.HEAD.pack(b"mqN1", 1, 2, 2, 17, 4) + (struct.pack("<HQ", 1, 0) + b"m") * 2, CorruptDataError),
        (snapshot.HEAD.pack(b"mqN1", 1, 0, 2, 17, 4) + b"x", CorruptDataError),
    ],
)
def test_a_snapshot_that_breaks_a_rule_is_refused(raw: bytes, error: type[Exception]) -> None:
    named = StateSnapshot(17, 4, 2, len(raw), crc32c(raw), 1, "key")
    with pytest.raises(error):
        decode_snapshot(named, [raw])


def test_keys_of_snapshots_name_their_log_and_hold_no_batches() -> None:
    key = state_snapshot_key("memq", "_memq_state", "ab" * 16, 7, 12, 345)
    assert key == "memq/state/_memq_state/abababab/00007/0000000012-0000000000000345"
    assert key.startswith(state_prefix("memq", "_memq_state", "ab" * 16, 7))
    assert state_part_key(key, 3) == f"{key}/0003"
    assert kind_without_batches(state_part_key(key, 3)) == "snapshot of a state log"
