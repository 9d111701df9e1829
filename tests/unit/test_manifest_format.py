"""Manifests and parts of compacted batches: they round-trip, and any change is damage."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memq.errors import CorruptDataError, InvalidRequestError, TooLargeError, UnsupportedFormatError
from memq.format.compaction_manifest import (
    CompactionManifest,
    LeftPart,
    ManifestEntry,
    ManifestPart,
    decode_compaction_manifest,
    decode_manifest_part,
    encode_compaction_manifest,
    encode_manifest_part,
)
from memq.format.key import (
    LargeObjectKey,
    compaction_manifest_key,
    compaction_manifest_number,
    compaction_manifest_prefix,
    has_many_batches,
    is_large_object,
    large_object_key,
    manifest_part_key,
    object_key,
    parse_object_key,
    shared_object_key,
    topic_prefix,
)
from memq.format.packed_file import HEAD
from memq.format.pointer import encode_pointer
from tests.unit.blocks import damaged
from tests.unit.compaction_world import ID, NOW_MS, manifest, ref
from tests.unit.pointer_examples import pointers

PARTS = (ref(3, 9), ref(9, 12), ref(14, 20))
MANIFEST = manifest(*PARTS, left=(LeftPart(part=ref(0, 3), since_ms=NOW_MS),))
BODIES = st.lists(st.one_of(pointers().map(encode_pointer), st.binary(max_size=60)), max_size=4)


def part_of(bodies: list[bytes]) -> ManifestPart:
    entries = tuple(ManifestEntry(3 * number, NOW_MS + number, body) for number, body in enumerate(bodies))
    return ManifestPart(entries, ("c/o1", "c/o2"))


def test_a_manifest_comes_back_and_says_where_it_begins() -> None:
    assert decode_compaction_manifest(encode_compaction_manifest(MANIFEST)) == MANIFEST
    assert (MANIFEST.begin, manifest(next=20).begin) == (3, 20)


@settings(max_examples=40)
@given(BODIES)
def test_a_part_keeps_pointers_byte_for_byte_damaged_ones_too(bodies: list[bytes]) -> None:
    assert decode_manifest_part(encode_manifest_part(part_of(bodies))) == part_of(bodies)


@given(st.binary(max_size=200))
def test_garbage_is_damage(data: bytes) -> None:
    for decode in (decode_compaction_manifest, decode_manifest_part):
        with pytest.raises(CorruptDataError):
            decode(data)


@settings(max_examples=40)
@given(BODIES, st.integers())
def test_any_change_is_damage(bodies: list[bytes], seed: int) -> None:
    for data in (encode_manifest_part(part_of(bodies)), encode_compaction_manifest(MANIFEST)):
        changed = damaged(data, random.Random(seed))
        if changed == data:
            continue
        for decode in (decode_compaction_manifest, decode_manifest_part):
            with pytest.raises((CorruptDataError, UnsupportedFormatError)):
                decode(changed)


@given(st.data())
def test_a_flipped_bit_and_a_cut_are_damage(draw: st.DataObject) -> None:
    data = bytearray(encode_compaction_manifest(MANIFEST))
    bit = draw.draw(st.integers(0, 8 * len(data) - 1))
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptDataError):
        decode_compaction_manifest(data)
    with pytest.raises(CorruptDataError):
        decode_compaction_manifest(encode_compaction_manifest(MANIFEST)[: draw.draw(st.integers(0, len(data) - 1))])


@pytest.mark.parametrize(
    "broken",
    [
        manifest(ref(3, 9), ref(8, 12)),
        manifest(ref(3, 3)),
        manifest(ref(9, 12), ref(3, 9)),
        manifest(ref(3, 9), next=8),
    ],
    ids=["overlap", "empty", "order", "end"],
)
def test_parts_that_do_not_follow_on_each_other_are_damage(broken: CompactionManifest) -> None:
    with pytest.raises(CorruptDataError, match="follow"):
        decode_compaction_manifest(encode_compaction_manifest(broken))


def test_entries_that_do_not_ascend_are_damage() -> None:
    with pytest.raises(CorruptDataError, match="follow"):
        decode_manifest_part(
            encode_manifest_part(ManifestPart((ManifestEntry(4, 0, b"x"), ManifestEntry(4, 0, b"y")), ()))
        )


def test_newer_manifest_is_unsupported_and_a_wrong_kind_is_damage() -> None:
    with pytest.raises(UnsupportedFormatError, match="requires"):
        decode_compaction_manifest(encode_compaction_manifest(msgspec.structs.replace(MANIFEST, requires=("folding",))))
    with pytest.raises(CorruptDataError, match="kind"):
        decode_manifest_part(encode_compaction_manifest(MANIFEST))
    with pytest.raises(CorruptDataError, match="head"):
        decode_manifest_part(bytes(HEAD.size - 1))


def test_a_manifest_that_no_reader_would_take_is_not_written() -> None:
    parts = tuple(ref(3 * number, 3 * number + 3, key="k" * 1_000) for number in range(16_000))
    with pytest.raises(TooLargeError, match="larger objects"):
        encode_compaction_manifest(manifest(*parts))


def test_keys_of_compacted_parts_are_distinguished() -> None:
    name = ("c", "clicks", ID)
    key = large_object_key(*name, 0xAB, NOW_MS)
    hour_ms = NOW_MS // 3_600_000 * 3_600_000
    assert parse_object_key(key) == LargeObjectKey("c", "clicks", ID[:8], 0xAB, hour_ms)
    part, third = manifest_part_key(*name, 0xAB, NOW_MS), compaction_manifest_key(*name, 7, 3)
    for other in (part, third):
        with pytest.raises(InvalidRequestError):
            parse_object_key(other)
    assert all(each.startswith(topic_prefix(*name)) for each in (key, part, third))
    assert third.startswith(compaction_manifest_prefix(*name, 7))
    assert not third.startswith(compaction_manifest_prefix(*name, 70))
    assert (compaction_manifest_number(third), compaction_manifest_number(part)) == ((7, 3), (0, 0))
    own, shared = object_key(*name, 1, 2, 3, NOW_MS), shared_object_key("c", "broker-1", 1, 2, NOW_MS)
    assert [has_many_batches(each) for each in (key, shared, own, part)] == [True, True, False, False]
    assert [is_large_object(each) for each in (key, shared, own, part)] == [True, False, False, False]
