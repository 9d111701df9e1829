"""Pointers: they round-trip with fields of a newer writer, and any other text is an error."""

from __future__ import annotations

import json
import random
import tracemalloc
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memq.errors import CorruptDataError, InvalidRequestError, TooLargeError, UnsupportedFormatError
from memq.format.pointer import (
    Location,
    Pointer,
    ProducerRanges,
    bounded_ranges,
    decode_pointer,
    encode_pointer,
)
from memq.limits import KIB, POINTER_BYTES_MAX, POINTER_RANGES_MAX
from memq.topic import Totals
from tests.unit.blocks import damaged
from tests.unit.pointer_examples import (
    pointers,
)

DAMAGE = (CorruptDataError, UnsupportedFormatError)
SEEDS = st.integers(0, 1 << 32).map(random.Random)


def data_pointer(**fields: Any) -> Pointer:
    where = (Location(store="main", key="c/topics/t/x", offset=0, length=500),)
    base = {"kind": "data", "cluster": "c", "topic": "t", "topic_id": "ab" * 16, "partition": 3, "epoch": 2}
    return Pointer(**{**base, "locations": where, "records": 5, **fields})


def wire(**fields: Any) -> bytes:
    """A pointer's JSON with fields changed; None takes one away."""
    body = json.loads(encode_pointer(data_pointer(producers=(ProducerRanges(7, ((0, 5), (9, 10))),), tag_bits=1)))
    body.update(fields)
    return json.dumps({name: value for name, value in body.items() if value is not None}).encode()


# ---- what goes in comes out ------------------------------------------------------------------


@given(pointers())
def test_any_pointer_reads_back(pointer: Pointer) -> None:
    body = encode_pointer(pointer)
    assert decode_pointer(body) == decode_pointer(memoryview(body)) == pointer
    assert encode_pointer(decode_pointer(body)) == body


unknown = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 53), 1 << 53) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(pointers(), st.dictionaries(st.text(max_size=9).map("new_{}".format), unknown, max_size=3))
def test_fields_that_a_newer_writer_added_are_kept(pointer: Pointer, extra: dict[str, Any]) -> None:
    body = msgspec.json.encode({**json.loads(encode_pointer(pointer)), **extra})
    read = decode_pointer(body)
    assert read == msgspec.structs.replace(pointer, extra=extra)
    assert json.loads(encode_pointer(read)) == json.loads(body)


@given(pointers())
def test_the_wire_has_no_integer_that_json_readers_round(pointer: Pointer) -> None:
    def check(value: Any) -> None:
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, list):
            for item in value:
                check(item)
        assert not isinstance(value, int) or abs(value) < 1 << 53

    check(json.loads(encode_pointer(pointer)))


def test_a_pointer_of_many_producers_is_cut() -> None:
    producers = [ProducerRanges(number + 1, ((0, 5), (7, 8), (10, 11))) for number in range(500)]
    with pytest.raises(TooLargeError, match=f"{POINTER_BYTES_MAX} are allowed"):
        encode_pointer(data_pointer(producers=tuple(producers)))
    kept, complete = bounded_ranges(producers)
    assert not complete
    assert sum(len(producer.ranges) for producer in kept) == POINTER_RANGES_MAX
    assert kept[-1] == ProducerRanges(171, ((0, 5), (7, 8)))
    assert decode_pointer(encode_pointer(data_pointer(producers=kept, producers_complete=False))).producers == kept
    assert bounded_ranges(producers[:2], 6) == (tuple(producers[:2]), True)
    assert bounded_ranges(producers[:3], 6) == (tuple(producers[:2]), False)
    assert bounded_ranges([], 0) == ((), True)


def test_the_most_that_a_batch_of_default_size_needs_fits() -> None:
    producers, _ = bounded_ranges([ProducerRanges(1 << 62 | number, ((1 << 62, 1 << 63),)) for number in range(600)])
    pointer = data_pointer(producers=producers, skip=tuple(range(100_000, 102_048)), producers_complete=False)
    assert len(encode_pointer(pointer)) < POINTER_BYTES_MAX


# ---- damage ----------------------------------------------------------------------------------


@given(pointers(), SEEDS, st.integers(1, 4))
def test_any_damage_is_named_or_read(pointer: Pointer, dice: random.Random, times: int) -> None:
    try:
        read = decode_pointer(damaged(encode_pointer(pointer), dice, times))
    except DAMAGE:
        return
    encode_pointer(read)  # what was read can be written


@given(st.binary(max_size=100) | st.text(max_size=100).map(str.encode))
def test_any_bytes_are_no_pointer(garbage: bytes) -> None:
    with pytest.raises(CorruptDataError):
        decode_pointer(garbage)


@given(st.sampled_from(sorted(json.loads(wire()))), unknown)
def test_any_value_in_any_field_is_named_or_read(field: str, value: Any) -> None:
    with suppress(*DAMAGE):
        decode_pointer(wire(**{field: value}))


@pytest.mark.parametrize(
    "fields",
    [
        {"version": 2},
        {"kind": "compacted"},
        {"requires": ["colours"]},
        {"version": 2, "cluster": 5, "locations": "elsewhere"},
    ],
)
def test_newer_format_is_never_damage(fields: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedFormatError):
        decode_pointer(wire(**fields))


PLACE = {"store": "main", "key": "a/b", "offset": 0, "length": 1}


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": None},
        {"version": None},
        {"version": "0"},
        {"cluster": ""},
        {"cluster": "a/b"},
        {"topic": ".."},
        {"topic": "x" * 250},
        {"topic": "сlicks"},
        {"broker": "a\0b"},
        {"topic_id": "AB" * 16},
        {"topic_id": "ab" * 16 + "\n"},
        {"topic_id": "ab" * 15},
        {"partition": -1},
        {"epoch": 1 << 32},
        {"epoch": 1.5},
        {"batch_sequence": 1 << 53},
        {"records": 0},
        {"records": 10**30},
        {"locations": []},
        {"locations": [{**PLACE, "store": "file:///data"}]},
        {"locations": [{**PLACE, "key": "/etc/passwd"}]},
        {"locations": [{**PLACE, "key": "a/../b"}]},
        {"locations": [{**PLACE, "key": "a\0b"}]},
        {"locations": [{**PLACE, "key": "a" * 1025}]},
        {"locations": [{**PLACE, "offset": -1}]},
        {"totals": {"records": -1, "bytes": 0}},
        {"totals": {"records": 0, "bytes": 1 << 53}},
        {"least_ms": 2, "greatest_ms": 1},
        {"greatest_ms": 1 << 53},
        {"slots": [2, 1]},
        {"slots": [0, 65_536]},
        {"skip": [1, 1]},
        {"latency": [[65, 1]]},
        {"skip": [2, 1]},
        {"skip": [1 << 20]},
        {"tag_bits": 5},
        {"tag_bits": "0x00000000000001"},
        {"producers": [{"producer": "0" * 16, "ranges": []}]},
        {"producers": [{"producer": "8" + "0" * 15, "ranges": []}]},
        {"producers": [{"producer": "0" * 15 + "1", "ranges": [["0" * 16, "0" * 16]]}]},
        {"producers": [{"producer": "0" * 15 + "1", "ranges": [["0" * 16, "f" * 16]]}]},
        {"producers": [{"producer": "0" * 15 + "1", "ranges": [["0" * 16, "0" * 15 + "2"], ["0" * 15 + "1"] * 2]}]},
        {"producers": {"producer": 1}},
        {"requires": "colours"},
        {"extra_number": "\ud800"},
    ],
    ids=lambda fields: json.dumps(fields)[:50],
)
def test_a_field_beyond_its_bounds_is_damage(fields: dict[str, Any]) -> None:
    decode_pointer(wire())
    with pytest.raises(CorruptDataError):
        decode_pointer(wire(**fields))


@pytest.mark.parametrize(
    "body", [b"", b"null", b"[]", b"{", b"[" * 60_000, b'{"a":' * 9_000, b"1" * 9_000, b" " * (POINTER_BYTES_MAX + 1)]
)
def test_hostile_json_is_damage(body: bytes) -> None:
    deep = b'{"deep":' + b"[" * 20_000 + b"]" * 20_000 + b"," + wire()[1:]
    for hostile in (body, deep, wire()[:-1] + b',"big":' + b"9" * 5_000 + b"}"):
        with pytest.raises(CorruptDataError):
            decode_pointer(hostile)


@pytest.mark.parametrize(
    "wrong",
    [{"topic": ".."}, {"cluster": ""}, {"records": 0}, {"skip": (2, 1)}, {"slots": (2, 1)}, {"totals": Totals(-1, 0)}],
    ids=str,
)
def test_a_pointer_that_nobody_could_read_does_not_leave(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        encode_pointer(data_pointer(**wrong))


@given(pointers(), SEEDS)
def test_damage_costs_little_memory(pointer: Pointer, dice: random.Random) -> None:
    body = damaged(encode_pointer(pointer), dice)
    tracemalloc.start()
    try:
        decode_pointer(body)
    except DAMAGE:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 16 * len(body) + 64 * KIB
