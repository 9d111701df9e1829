"""The broker's hot loops over blocks: compiled where memq-native is installed, else in Python.

The compiled functions hold the interpreter's lock while they read or copy memory, because Python writes slabs. A batch
of 4 KiB blocks has thousands of blocks. In compiled code, none of them costs a bytecode of the interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

from memq.format.blocks.header import Buffer
from memq.format.blocks.latency import Latency
from memq.kernel import blocks_pure_python, compiled_module

Extents = list[tuple[Any, int, int]]  # of each block: slab, whose `view` is its memory; first byte and end in it


class BlockKernel(Protocol):
    """Functions over received blocks, from their arrival to the object; a module implements it.

    Sequences and producer ids are below 2^63. Times are in Unix ms, offsets and sizes in bytes.
    """

    def scan_blocks(
        self,
        slab: Any,
        view: memoryview,
        at: int,
        end: int,
        kind: int,
        producer_id: int,
        producer_epoch: int,
        scope: int,
        first: int,
        oldest_ms: int,
        blocks_max: int,
        bytes_max: int,
    ) -> tuple[list[tuple[Any, int, int]], int]:
        """Return the extents of the sound blocks in `view` from `at` on, and the sequence after the last one.

        A frame is a prefix and a block. Each block is of this producer and scope, is complete before `end`, and has a
        right checksum. The first one begins at sequence `first`, each further one where the block before it ends.
        The scan ends before any other block. `kind` is the second word of each prefix: api, flags and stream.
        `oldest_ms` is the least first-sent time. There are at most `blocks_max` blocks, and the one that reaches
        `bytes_max`, with prefixes, is the last.

        Raises: ValueError when `end` is outside of the view.
        """
        ...

    def lay_out(self, extents: Extents) -> tuple[list[memoryview], tuple[Any, ...]]:
        """Return a view of each checked block, and the fields of `memq.kernel.header_table.HeaderTable`.

        The checksum of all blocks is combined from those in their headers. In Python, small blocks are read again,
        which costs less there.

        Raises: ValueError without blocks, or for a block that is shorter than a header.
        """
        ...

    def latencies(self, headers: bytes, now_ms: int, skip: Sequence[int]) -> Latency:
        """Return the number of records by bucket of age at `now_ms`, without those of the blocks `skip`.

        `skip` has the ascending numbers of blocks. `memq.format.blocks.latency` defines the buckets.

        Raises: IndexError for a number without a block.
        """
        ...

    def fill(self, memory: memoryview, buffers: Sequence[Buffer], number: int, at: int) -> tuple[int, int, int]:
        """Copy from byte `at` of buffer `number` on, and the buffers after it, to the start of `memory`.

        Return the number of copied bytes, and the buffer and offset of the next byte. Then `memory` is full, or no byte
        is left.

        Raises: ValueError when `at` is outside of the buffer.
        """
        ...


_kernel: BlockKernel = cast(Any, compiled_module("broker")) or blocks_pure_python
scan_blocks, lay_out, latencies, fill = _kernel.scan_blocks, _kernel.lay_out, _kernel.latencies, _kernel.fill
