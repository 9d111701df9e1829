"""Random frames, mutated: the compiled kernel takes, describes and refuses exactly what Python does."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from awscrt.checksums import crc32c

from memq.format.blocks.header import CHECKED_FROM
from memq.kernel.blocks import BlockKernel
from memq.limits import BLOCK_HEADER_BYTES, FRAME_PREFIX_BYTES, KIB, SEQUENCE_END, TIME_MS_END
from memq.protocol.frames import WRITE_PREFIX, Api
from tests.contract.kernels import block_kernel
from tests.soak import repetitions, report

LAYOUT_SHARE = 16  # one of so many cases compares layouts, too
CASES_OF_STREAM = 64  # cases of one stream, each with a mutation of its own
HEADER_FIELDS = struct.Struct("<BBH III II QQ qI HH Q")
# offset in the frame and format of each field, and values at its bounds
FIELDS: tuple[tuple[int, str, tuple[int, ...]], ...] = (
    (0, "<I", (0, 71, 72, 73, 1 << 31, (1 << 32) - 1)),
    (4, "<I", (0, Api.WRITE, Api.WRITE | 2 << 16, Api.WRITE | 1 << 8)),
    (8, "<q", (-(1 << 63), -1, 0, 99, 100, 101, (1 << 63) - 1)),
    (16, "<I", (0, 0x3142_716E)),
    (20, "<I", (0, (1 << 32) - 1)),
    (24, "<B", (0, 1, 2, 255)),
    (25, "<B", (0, 1, 2, 3, 255)),
    (26, "<H", (0, 1, 15, 16, 17, 127, 128, 65_535)),
    (28, "<I", (0, 1, 4, 1 << 24, (1 << 32) - 72, (1 << 32) - 1)),
    (32, "<I", (0, 3, 4, (16 << 20) - 1, 16 << 20, (16 << 20) + 1, (1 << 32) - 1)),
    (36, "<I", (0, 1, 2, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 1 << 30, (1 << 32) - 1)),
    (40, "<I", (0, 1, 2, (1 << 32) - 1)),
    (44, "<I", (0, 8, 9, 10, (1 << 32) - 1)),
    (48, "<Q", (0, 6, 7, 8, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)),
    (56, "<Q", (0, 1, SEQUENCE_END - 1, SEQUENCE_END, (1 << 64) - 1)),
    (64, "<q", (-TIME_MS_END, 1 - TIME_MS_END, 0, TIME_MS_END - 1, TIME_MS_END, -(1 << 63), (1 << 63) - 1)),
    (72, "<I", (0, 1, (1 << 32) - 2, (1 << 32) - 1)),
    (76, "<H", (0, 5, 65_535)),
    (78, "<H", (0, 5, 65_535)),
    (80, "<Q", (0, 1, (1 << 64) - 1)),
)


@dataclass(frozen=True)
class Memory:
    """A slab, as the kernel sees it."""

    view: memoryview


@dataclass(frozen=True)
class Scan:
    """The arguments of a scan, without its memory."""

    at: int
    end: int
    kind: int
    producer_id: int
    producer_epoch: int
    scope: int
    first: int
    oldest_ms: int
    blocks_max: int = 65_536
    bytes_max: int = 1 << 40

    def run(self, kernel: BlockKernel, slab: Memory) -> tuple[list[tuple[Memory, int, int]], int]:
        """Scan a slab."""
        return kernel.scan_blocks(
            *(slab, slab.view, self.at, self.end, self.kind, self.producer_id, self.producer_epoch, self.scope),
            *(self.first, self.oldest_ms, self.blocks_max, self.bytes_max),
        )


class Frames:
    """Frames of one stream in a slab, whose blocks follow on each other."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.starts: list[int] = []
        first = sequence = dice.choice((0, 5, dice.randrange(1 << 62), SEQUENCE_END - 40))
        data, self.scan = bytearray(dice.choice((0, 0, 7))), Scan(0, 0, Api.WRITE | 1 << 16, 7, 1, 9, first, 100)
        at = len(data)
        for _ in range(dice.randrange(1, 6)):
            self.starts.append(len(data))
            count = dice.randrange(1, 9)
            data += self._frame(count, sequence)
            sequence += count
        data += bytes(dice.choice((0, 0, 3, 16, 87, 88, 200)))
        self.data, self.slab = data, Memory(memoryview(data))
        self.scan = replace(self.scan, at=at, end=len(data))

    def _frame(self, count: int, sequence: int) -> bytes:
        dice = self.dice
        payload, codec = dice.randbytes(4 * count + dice.choice((0, 1, 30, 300))), dice.randrange(3)
        raw = len(payload) + (dice.choice((0, 1, 5_000)) if codec else 0)
        low = dice.randrange(65_536)
        tail = HEADER_FIELDS.pack(
            *(1, codec, dice.choice((0, 3, 17, 127)), len(payload), raw, count, 1, 9, 7, sequence),
            *(dice.randrange(1 << 41), dice.choice((0, 5, (1 << 32) - 1)), low, dice.randrange(low, 65_536)),
            dice.getrandbits(64),
        )
        checksum: int = crc32c(tail + payload)
        block = b"mqB1" + checksum.to_bytes(4, "little") + tail + payload
        return WRITE_PREFIX.pack(len(block), Api.WRITE, 0, 1, dice.choice((100, 101, 1 << 40))) + block

    def stamp(self, start: int) -> None:
        """Give the block of a frame a right checksum, so that the other fields decide."""
        (length,) = struct.unpack_from("<I", self.data, start)
        stop = min(start + FRAME_PREFIX_BYTES + length, len(self.data))
        checksum = crc32c(self.slab.view[start + FRAME_PREFIX_BYTES + CHECKED_FROM : stop])
        struct.pack_into("<I", self.data, start + FRAME_PREFIX_BYTES + 4, checksum)

    def mutated(self) -> Scan:
        """Change the bytes in one of many ways, or only the arguments of the scan; return these."""
        return self.dice.choice(MUTATIONS)(self)


def any_bit(frames: Frames) -> Scan:
    bit = frames.dice.randrange(8 * len(frames.data)) if frames.data else 0
    frames.data[bit // 8] ^= 1 << bit % 8
    return frames.scan


def header_bit(frames: Frames) -> Scan:
    start = frames.dice.choice(frames.starts)
    bit = frames.dice.randrange(8 * (FRAME_PREFIX_BYTES + BLOCK_HEADER_BYTES))
    frames.data[start + bit // 8] ^= 1 << bit % 8
    frames.stamp(start)
    return frames.scan


def field_at_a_bound(frames: Frames) -> Scan:
    start = frames.dice.choice(frames.starts)
    for _ in range(frames.dice.randrange(1, 3)):
        at, kind, values = frames.dice.choice(FIELDS)
        struct.pack_into(kind, frames.data, start + at, frames.dice.choice(values))
    if frames.dice.random() < 0.8:
        frames.stamp(start)
    return frames.scan


def compressed_to_the_bound(frames: Frames) -> Scan:
    """Raw length and count of a compressed block, near what a block may have."""
    start, dice = frames.dice.choice(frames.starts), frames.dice
    count = dice.choice((1, 2, 1 << 20, (1 << 20) + 1))
    raw = max(0, 4 * count + dice.choice((-1, 0, 1, 1_000)))
    frames.data[start + 25] = dice.choice((1, 2))
    struct.pack_into("<II", frames.data, start + 32, raw, count)
    frames.stamp(start)
    return frames.scan


def cut(frames: Frames) -> Scan:
    edges = (*frames.starts, *(start + 88 for start in frames.starts), len(frames.data))
    end = frames.dice.choice(edges) + frames.dice.randrange(-2, 3)
    return replace(frames.scan, end=max(0, min(end, len(frames.data))))


def other_place(frames: Frames) -> Scan:
    at = frames.dice.choice((*frames.starts, len(frames.data))) + frames.dice.choice((0, 0, 1, 16, 1_000))
    return replace(frames.scan, at=at)


def other_bounds(frames: Frames) -> Scan:
    dice = frames.dice
    sizes = [start - frames.scan.at + shift for start in frames.starts for shift in (-1, 0, 1)]
    blocks_max = dice.choice((-1, 0, 1, 2, 3, 65_536, 1 << 62))
    return replace(frames.scan, blocks_max=blocks_max, bytes_max=dice.choice((*sizes, -5, 1 << 62)))


def other_stream(frames: Frames) -> Scan:
    dice, scan = frames.dice, frames.scan
    name = dice.choice(("kind", "producer_id", "producer_epoch", "scope", "first", "oldest_ms"))
    shifted = max(0, getattr(scan, name) + dice.choice((-1, 1, 1 << 16, 1 << 32)))
    return replace(scan, **{name: min(shifted, (1 << 63) - 1)})


def other_order(frames: Frames) -> Scan:
    """Two frames change places, or one is repeated."""
    ends = [*frames.starts[1:], None]
    pieces = [bytes(frames.data[start:end]) for start, end in zip(frames.starts, ends, strict=True)]
    number, other = (frames.dice.randrange(len(pieces)) for _ in range(2))
    pieces[number], pieces[other] = pieces[other], pieces[frames.dice.choice((number, other))]
    joined = b"".join(pieces)[: len(frames.data) - frames.starts[0]]
    frames.data[frames.starts[0] : frames.starts[0] + len(joined)] = joined
    return frames.scan


def noise(frames: Frames) -> Scan:
    start = frames.dice.randrange(len(frames.data))
    piece = frames.dice.randbytes(frames.dice.randrange(1, 40))[: len(frames.data) - start]
    frames.data[start : start + len(piece)] = piece
    return frames.scan


MUTATIONS: tuple[Callable[[Frames], Scan], ...] = (
    lambda frames: frames.scan,
    any_bit,
    header_bit,
    field_at_a_bound,
    field_at_a_bound,
    compressed_to_the_bound,
    cut,
    other_place,
    other_bounds,
    other_stream,
    other_order,
    noise,
)


def compare(seed: int, cases: int) -> tuple[int, int]:
    """Compare both kernels in so many cases; return how many blocks were taken, and how many scans took all."""
    python, native = block_kernel("Python"), block_kernel("compiled")
    dice = random.Random(seed)
    taken = whole = 0
    for number in range(0, cases, CASES_OF_STREAM):
        frames = Frames(dice)
        original = bytes(frames.data)
        for case in range(number, min(number + CASES_OF_STREAM, cases)):
            scan = frames.mutated()
            found = scan.run(python, frames.slab)
            assert scan.run(native, frames.slab) == found, f"seed {seed}, case {case}: {scan}"
            taken += len(found[0])
            whole += len(found[0]) == len(frames.starts)
            if found[0] and case % LAYOUT_SHARE == 0:
                compare_layouts(python, native, found[0], dice)
            if frames.data != original:
                frames.data[:] = original
    return taken, whole


def compare_layouts(
    python: BlockKernel, native: BlockKernel, extents: list[tuple[Memory, int, int]], dice: random.Random
) -> None:
    """Compare what the kernels say of blocks that a scan took, and how they gather them."""
    views, fields = python.lay_out(extents)
    found_views, found = native.lay_out(extents)
    assert (found_views, found) == (views, fields), extents
    now_ms = dice.choice((0, dice.randrange(1 << 41), 1 << 53))
    skip = [number for number in range(len(extents)) if dice.random() < 0.3]
    assert native.latencies(found[0], now_ms, skip) == python.latencies(found[0], now_ms, skip)
    number = dice.randrange(len(views))
    at, memory = dice.randrange(len(views[number]) + 1), bytearray(dice.choice((0, 1, 100, 4 * KIB)))
    other = bytearray(memory)
    place = native.fill(memoryview(memory), views, number, at)
    assert (place, memory) == (python.fill(memoryview(other), views, number, at), other)


@pytest.mark.soak
def test_both_kernels_take_the_same_blocks_of_mutated_frames() -> None:
    seed, cases = repetitions(18, random.Random().getrandbits(32)), repetitions(40_000, 1_000_000)
    for part in range(repetitions(1, 10)):
        taken, whole = compare(seed + part, cases)
        report(f"seed {seed + part}: {cases:,} cases, {taken:,} blocks taken, {whole:,} scans whole")
        assert whole > cases // 10, "most mutations leave something to take"
        assert taken < 3 * cases, "and most of them something to refuse"
