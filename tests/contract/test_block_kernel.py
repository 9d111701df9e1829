"""Scan, layout, latencies and gathering of blocks: one behaviour, in Python and compiled."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, pairwise
from operator import or_

import pytest
from awscrt.checksums import crc32c
from hypothesis import given
from hypothesis import strategies as st

from memq.format.blocks.header import CHECKED_FROM, DELTA_SATURATED, HEADER, parse_header
from memq.format.blocks.latency import latency_of
from memq.format.object import BLOCK_ENTRY, BlockEntry
from memq.kernel.blocks import BlockKernel, Extents
from memq.kernel.header_table import HeaderTable
from memq.limits import (
    BLOCK_HEADER_BYTES,
    BLOCK_RAW_BYTES_MAX,
    BLOCK_RECORDS_MAX,
    FORMAT_VERSION,
    KIB,
    SEQUENCE_END,
    TIME_MS_END,
)
from memq.protocol.frames import Api
from tests.brokers import PRODUCER, block_of, write_frame
from tests.contract.kernels import KINDS, block_kernel
from tests.unit.peers import TOPIC

KIND = Api.WRITE | 1 << 16
VALUE = b"v" * 100


@pytest.fixture(params=KINDS)
def kernel(request: pytest.FixtureRequest) -> BlockKernel:
    return block_kernel(request.param)


@dataclass(frozen=True)
class Memory:
    """A slab, as the kernel sees it."""

    view: memoryview


def frames(*blocks: bytes, sent_ms: int = 0) -> memoryview:
    """Return WRITE frames one after another."""
    return memoryview(bytearray(b"".join(write_frame(block, first_sent_ms=sent_ms) for block in blocks)))


def scan(
    kernel: BlockKernel,
    view: memoryview,
    *,
    at: int = 0,
    end: int | None = None,
    first: int = 0,
    oldest_ms: int = 0,
    blocks_max: int = 9,
    bytes_max: int = 64 * KIB,
) -> tuple[list[tuple[int, int]], int]:
    """Return start and end of the sound blocks, and the sequence after them."""
    scope = parse_header(block_of(TOPIC, 0, [VALUE])).scope
    extents, next_ = kernel.scan_blocks(
        *("slab", view, at, len(view) if end is None else end),
        *(KIND, PRODUCER, 0, scope, first, oldest_ms, blocks_max, bytes_max),
    )
    assert all(slab == "slab" for slab, _, _ in extents)
    return [(start, end) for _, start, end in extents], next_


def test_a_scan_takes_the_blocks_that_follow_on_each_other(kernel: BlockKernel) -> None:
    blocks = [block_of(TOPIC, first, [b"a", b"b"]) for first in (0, 2, 6)]
    view, size = frames(*blocks), len(blocks[0])
    places = [(number * (16 + size) + 16, (number + 1) * (16 + size)) for number in range(3)]
    assert scan(kernel, view) == (places[:2], 4), "sequences are missing before the third"
    assert scan(kernel, view, at=16 + size, first=2) == (places[1:2], 4)
    assert scan(kernel, view, at=2 * (16 + size), first=6) == (places[2:], 8)
    assert scan(kernel, view, at=1) == ([], 0)
    for at in (len(view) - 1, len(view), len(view) + 9):
        assert scan(kernel, view, at=at) == ([], 0)


def test_a_scan_takes_complete_blocks_only(kernel: BlockKernel) -> None:
    blocks = [block_of(TOPIC, first, [b"a"]) for first in range(2)]
    view, frame = frames(*blocks), 16 + len(blocks[0])
    for end in range(2 * frame + 1):
        assert scan(kernel, view, end=end)[1] == end // frame
        assert scan(kernel, view[:end])[1] == end // frame
    with pytest.raises(ValueError, match="outside"):
        scan(kernel, view, end=2 * frame + 1)


def test_a_scan_ends_at_its_bounds(kernel: BlockKernel) -> None:
    view = frames(*(block_of(TOPIC, first, [b"a"]) for first in range(4)))
    frame = len(view) // 4
    assert [scan(kernel, view, blocks_max=count)[1] for count in (-1, 0, 1, 3, 4, 5, 1 << 62)] == [0, 0, 1, 3, 4, 4, 4]
    sizes = (-(1 << 62), -1, 0, 1, frame, frame + 1, 2 * frame, 2 * frame + 1, 1 << 62)
    assert [scan(kernel, view, bytes_max=size)[1] for size in sizes] == [0, 0, 0, 1, 1, 2, 2, 3, 4]
    assert scan(kernel, view, at=frame, first=1, bytes_max=frame + 1)[1] == 3


def test_a_scan_takes_nothing_that_was_sent_too_long_ago(kernel: BlockKernel) -> None:
    for sent_ms, oldest_ms, taken in ((50, 50, 1), (50, 51, 0), (-5, -5, 1), (-5, -4, 0), ((1 << 62) + 1, 1 << 62, 1)):
        assert scan(kernel, frames(block_of(TOPIC, 0, [b"a"]), sent_ms=sent_ms), oldest_ms=oldest_ms)[1] == taken


# A frame's prefix is 16 bytes; the places of the header's fields behind it, and how they are packed.
FIELDS = {
    "length": (-16, "<I"),
    "api": (-12, "<B"),
    "api flags": (-11, "<B"),
    "stream": (-10, "<H"),
    "magic": (0, "<I"),
    "version": (8, "<B"),
    "codec": (9, "<B"),
    "flags": (10, "<H"),
    "payload": (12, "<I"),
    "raw": (16, "<I"),
    "count": (20, "<I"),
    "epoch": (24, "<I"),
    "scope": (28, "<I"),
    "producer": (32, "<Q"),
    "first": (40, "<Q"),
    "base": (48, "<q"),
    "delta": (56, "<I"),
    "slot_first": (60, "<H"),
    "slot_last": (62, "<H"),
    "tag bits": (64, "<Q"),
}
PAYLOAD = len(block_of(TOPIC, 0, [VALUE])) - BLOCK_HEADER_BYTES


@pytest.mark.parametrize(
    ("changes", "taken"),
    [
        ({}, True),
        ({"length": PAYLOAD + BLOCK_HEADER_BYTES - 1}, False),
        ({"length": (1 << 32) - 1}, False),
        ({"api": Api.ACK}, False),
        ({"api flags": 1}, False),
        ({"stream": 2}, False),
        ({"magic": 0x11111111}, False),
        ({"version": FORMAT_VERSION + 1}, False),
        ({"version": 0}, False),
        ({"flags": 0}, True),
        ({"flags": 1}, True),
        ({"flags": 16}, False),  # null keys without keys
        ({"flags": 17}, True),
        ({"flags": 127}, True),
        ({"flags": 128}, False),
        ({"epoch": 1}, False),
        ({"scope": 77}, False),
        ({"producer": PRODUCER + 1}, False),
        ({"first": 1}, False),
        ({"payload": PAYLOAD - 1}, False),
        ({"payload": (1 << 32) - 1}, False),
        ({"raw": PAYLOAD + 1}, False),  # nothing was compressed
        ({"raw": PAYLOAD + 1, "codec": 1}, True),
        ({"raw": PAYLOAD - 1, "codec": 1}, False),
        ({"raw": PAYLOAD, "codec": 2}, True),
        ({"raw": PAYLOAD, "codec": 3}, False),
        ({"raw": BLOCK_RAW_BYTES_MAX, "codec": 1}, True),
        ({"raw": BLOCK_RAW_BYTES_MAX + 1, "codec": 1}, False),
        ({"count": 0}, False),
        ({"count": 1_000, "raw": 4_000, "codec": 1}, True),
        ({"count": 1_000, "raw": 3_999, "codec": 1}, False),
        ({"count": BLOCK_RECORDS_MAX, "raw": BLOCK_RAW_BYTES_MAX, "codec": 1}, True),
        ({"count": BLOCK_RECORDS_MAX + 1, "raw": BLOCK_RAW_BYTES_MAX, "codec": 1}, False),
        ({"count": (1 << 32) - 1, "raw": BLOCK_RAW_BYTES_MAX, "codec": 1}, False),
        ({"count": 1 << 30}, False),  # times four has no 32 bits
        ({"base": TIME_MS_END - 1}, True),
        ({"base": TIME_MS_END}, False),
        ({"base": -TIME_MS_END + 1}, True),
        ({"base": -TIME_MS_END}, False),
        ({"delta": DELTA_SATURATED}, True),
        ({"slot_first": 5, "slot_last": 5}, True),
        ({"slot_first": 6, "slot_last": 5}, False),
        ({"tag bits": (1 << 64) - 1}, True),
    ],
    ids=str,
)
def test_a_scan_ends_before_a_block_that_is_not_plainly_right(
    kernel: BlockKernel, changes: dict[str, int], taken: bool
) -> None:
    """The checksum is right each time: so the field alone decides."""
    view = frames(block_of(TOPIC, 0, [VALUE]))
    for name, value in changes.items():
        at, kind = FIELDS[name]
        struct.pack_into(kind, view, 16 + at, value)
    stop = min(16 + changes.get("length", len(view) - 16), len(view))
    struct.pack_into("<I", view, 16 + 4, crc32c(view[16 + CHECKED_FROM : stop]))
    assert scan(kernel, view)[0] == [(16, len(view))] * taken


def test_a_scan_ends_before_a_damaged_block(kernel: BlockKernel) -> None:
    view = frames(block_of(TOPIC, 0, [b"a"]))
    for at in range(16, len(view)):
        view[at] ^= 1
        assert scan(kernel, view) == ([], 0)
        view[at] ^= 1
    assert scan(kernel, view)[1] == 1


def test_a_scan_of_sequences_near_their_end_takes_what_it_is_asked_for(kernel: BlockKernel) -> None:
    first = SEQUENCE_END - 2
    view = frames(*(block_of(TOPIC, first + number, [b"a"]) for number in range(2)))
    assert scan(kernel, view, first=first)[1] == SEQUENCE_END


# ---- layout --------------------------------------------------------------------------------------


def block_bytes(*fields: int, payload: bytes = b"") -> bytes:
    """Return a block of these fields, from codec to tag bits, with a right checksum."""
    tail = struct.Struct("<BBH III II QQ qI HH Q").pack(FORMAT_VERSION, *fields) + payload
    checksum: int = crc32c(tail)
    return b"mqB1" + checksum.to_bytes(4, "little") + tail


any_blocks = st.lists(
    st.builds(
        lambda payload, count, producer, first, base, delta, slots, tags: block_bytes(
            *(0, 0, payload, payload + 3, count, 0, 9, producer, first, base, delta, min(slots), max(slots), tags),
            payload=b"p" * payload,
        ),
        payload=st.sampled_from([0, 4, 5, 700, 16 * KIB - BLOCK_HEADER_BYTES - 1, 16 * KIB, 16 * KIB + 1]),
        count=st.integers(1, BLOCK_RECORDS_MAX),
        producer=st.integers(1, (1 << 63) - 1),
        first=st.integers(0, (1 << 63) - BLOCK_RECORDS_MAX),
        base=st.integers(1 - TIME_MS_END, TIME_MS_END - 1),
        delta=st.sampled_from([0, 7, DELTA_SATURATED - 1, DELTA_SATURATED]),
        slots=st.tuples(st.integers(0, 65_535), st.integers(0, 65_535)),
        tags=st.integers(0, (1 << 64) - 1),
    ),
    min_size=1,
    max_size=12,
)


def in_slabs(blocks: list[bytes], per_slab: int, gap: int = 16) -> list[tuple[Memory, int, int]]:
    """Lay blocks into slabs, with a gap before each."""
    extents = []
    for number in range(0, len(blocks), per_slab):
        data, places = bytearray(), []
        for block in blocks[number : number + per_slab]:
            data += bytes(gap)
            places.append((len(data), len(data) + len(block)))
            data += block
        slab = Memory(memoryview(data))
        extents += [(slab, start, end) for start, end in places]
    return extents


def table(kernel: BlockKernel, extents: Extents) -> tuple[list[memoryview], HeaderTable]:
    views, fields = kernel.lay_out(extents)
    return views, HeaderTable(*fields)


@pytest.mark.parametrize("kind", KINDS)
@given(blocks=any_blocks, per_slab=st.integers(1, 5), gap=st.integers(0, 17))
def test_a_layout_says_what_the_blocks_say(kind: str, blocks: list[bytes], per_slab: int, gap: int) -> None:
    headers = [HEADER.unpack_from(block) for block in blocks]
    extents = in_slabs(blocks, per_slab, gap)
    views, found = table(block_kernel(kind), extents)
    assert list(map(bytes, views)) == blocks
    assert found.headers == b"".join(block[:BLOCK_HEADER_BYTES] for block in blocks)
    assert found.checksum == crc32c(b"".join(blocks))
    assert found.raw_bytes == sum(header[6] for header in headers)
    assert found.records == sum(header[7] for header in headers)
    assert found.least_ms == min(header[12] for header in headers)
    greatest = [
        TIME_MS_END - 1 if header[13] == DELTA_SATURATED else min(header[12] + header[13], TIME_MS_END - 1)
        for header in headers
    ]
    assert found.greatest_ms == max(greatest)
    assert found.slots == (min(header[14] for header in headers), max(header[15] for header in headers))
    assert found.tag_bits == reduce(or_, (header[16] for header in headers))
    offsets = accumulate(map(len, blocks), initial=0)
    entries = [
        BlockEntry(offset, header[10], header[11], header[12], last, len(block), header[7], header[1], *header[14:])
        for block, header, offset, last in zip(blocks, headers, offsets, greatest, strict=False)
    ]
    assert [BlockEntry(*each) for each in BLOCK_ENTRY.iter_unpack(found.entries(0))] == entries
    moved = [each._replace(offset=each.offset + 1_000) for each in entries]
    assert [BlockEntry(*each) for each in BLOCK_ENTRY.iter_unpack(found.entries(1_000))] == moved


def test_a_view_of_a_block_is_no_copy(kernel: BlockKernel) -> None:
    extents = in_slabs([block_of(TOPIC, 0, [VALUE])], 1)
    (view,), found = table(kernel, extents)
    slab, start, end = extents[0]
    slab.view[end - 1] ^= 1
    assert view == slab.view[start:end]
    slab.view[start] ^= 1
    assert found[0] == parse_header(block_of(TOPIC, 0, [VALUE])), "the headers are a copy"


def test_bytes_that_changed_after_they_were_checked_do_not_change_the_checksum_of_large_blocks(
    kernel: BlockKernel,
) -> None:
    blocks = [block_of(TOPIC, 0, [VALUE]), block_of(TOPIC, 1, [bytes(16 * KIB)]), block_of(TOPIC, 2, [VALUE])]
    extents = in_slabs(blocks, 3)
    slab, _, end = extents[1]
    slab.view[end - 1] ^= 1
    _, found = table(kernel, extents)
    assert found.checksum == crc32c(b"".join(blocks))


def test_a_layout_without_blocks_or_with_a_cut_header_is_refused(kernel: BlockKernel) -> None:
    block = block_of(TOPIC, 0, [VALUE])
    slab = Memory(memoryview(bytearray(block)))
    for extents in (
        [],
        [(slab, 0, 0)],
        [(slab, 0, BLOCK_HEADER_BYTES - 1)],
        [(slab, 0, len(block)), (slab, len(block) - BLOCK_HEADER_BYTES + 1, len(block))],
        [(slab, 5, 4)],
        [(slab, len(block) - 71, len(block) + 5)],
        [(slab, len(block) + 5, len(block) + 500)],
    ):
        with pytest.raises(ValueError, match="header"):
            kernel.lay_out(extents)


def test_an_extent_is_cut_at_the_end_of_its_slab(kernel: BlockKernel) -> None:
    block = block_of(TOPIC, 0, [VALUE])
    slab = Memory(memoryview(bytearray(5) + block))
    views, fields = kernel.lay_out([(slab, 5, len(slab.view) + 1), (slab, 5, 1 << 40)])
    assert views == [block, block]
    assert fields == kernel.lay_out([(slab, 5, len(slab.view))] * 2)[1]


# ---- latencies -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@given(
    blocks=st.lists(st.tuples(st.integers(-5, 2_000), st.integers(1, BLOCK_RECORDS_MAX)), max_size=9),
    now_ms=st.integers(0, 1_100),
    data=st.data(),
)
def test_latencies_are_those_of_the_blocks_without_the_skipped_ones(
    kind: str, blocks: list[tuple[int, int]], now_ms: int, data: st.DataObject
) -> None:
    skip = sorted(data.draw(st.sets(st.integers(0, len(blocks) - 1)))) if blocks else []
    headers = b"".join(
        block_bytes(0, 0, 0, 0, count, 0, 9, 1, 0, base, 0, 0, 0, 0)[:BLOCK_HEADER_BYTES] for base, count in blocks
    )
    rest = [block for number, block in enumerate(blocks) if number not in skip]
    found = block_kernel(kind).latencies(headers, now_ms, tuple(skip))
    assert found == latency_of([base for base, _ in rest], [count for _, count in rest], now_ms)


def test_latencies_reach_from_end_to_end_of_time(kernel: BlockKernel) -> None:
    headers = b"".join(
        block_bytes(0, 0, 0, 0, 1, 0, 9, 1, 0, base, 0, 0, 0, 0) for base in (1 - TIME_MS_END, 0, TIME_MS_END - 1)
    )
    assert kernel.latencies(headers, TIME_MS_END - 1, ()) == ((0, 1), (53, 1), (54, 1))
    assert kernel.latencies(headers, -TIME_MS_END, ()) == ((0, 3),)
    for wrong in ((3,), (0, 3)):
        with pytest.raises(IndexError):
            kernel.latencies(headers, 0, wrong)
    with pytest.raises((ValueError, TypeError)):
        kernel.latencies(headers[:-1], 0, ())


# ---- gathering -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@given(sizes=st.lists(st.integers(0, 40), max_size=9), room=st.integers(1, 60))
def test_memory_is_filled_with_the_joined_buffers(kind: str, sizes: list[int], room: int) -> None:
    kernel = block_kernel(kind)
    whole = bytes(n % 251 for n in range(sum(sizes)))
    ends = list(accumulate(sizes, initial=0))
    kinds = (bytes, bytearray, memoryview)
    buffers = [kinds[number % 3](whole[start:end]) for number, (start, end) in enumerate(pairwise(ends))]
    memory, pieces, number, at = memoryview(bytearray(room)), list[bytes](), 0, 0
    while number < len(buffers):
        filled, number, at = kernel.fill(memory, buffers, number, at)
        pieces.append(bytes(memory[:filled]))
    assert b"".join(pieces) == whole
    assert all(len(piece) == room for piece in pieces[:-1]), "each write but the last one is full"


def test_memory_is_filled_from_any_place_of_the_buffers(kernel: BlockKernel) -> None:
    buffers, memory = [b"abc", b"", b"defgh"], memoryview(bytearray(4))
    assert kernel.fill(memory, buffers, 0, 1) == (4, 2, 2)
    assert bytes(memory) == b"bcde"
    assert kernel.fill(memory, buffers, 2, 2) == (3, 3, 0)
    assert bytes(memory) == b"fghe"
    assert kernel.fill(memory, buffers, 2, 5) == (0, 3, 0)
    assert kernel.fill(memory, buffers, 3, 0) == (0, 3, 0)
    assert kernel.fill(memory[:0], buffers, 0, 0) == (0, 0, 0)
    assert kernel.fill(memory, tuple(buffers), 0, 0) == (4, 2, 1)
    with pytest.raises(ValueError, match="byte 6"):
        kernel.fill(memory, buffers, 2, 6)
    with pytest.raises((BufferError, TypeError)):
        kernel.fill(memory.toreadonly(), buffers, 0, 0)


def test_the_compiled_kernel_refuses_to_fill_memory_from_itself() -> None:
    memory = memoryview(bytearray(8))
    with pytest.raises(ValueError, match="lies in the memory"):
        block_kernel("compiled").fill(memory[:5], [memory[4:]], 0, 0)
    assert block_kernel("compiled").fill(memory[:4], [memory[4:]], 0, 0) == (4, 1, 0)
