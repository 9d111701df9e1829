"""The broker's hot loops over blocks: compiled where memq-native is installed, else in Python.

The compiled functions take what is plainly right. They keep the interpreter's lock while they read or copy memory,
because Python writes slabs. A batch of 4 KiB blocks has thousands of blocks: here each one costs no bytecode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

from memq.format.blocks.header import Buffer
from memq.format.blocks.latency import Latency
from memq.kernel import blocks_in_python, compiled

Extents = list[tuple[Any, int, int]]  # slab, whose `view` is its memory, and start and end of each block


class BlockKernel(Protocol):
    """Functions over received blocks, from their arrival to the object; a module implements it.

    Integers are those of the formats: sequences and producer ids below 2^63, times in Unix ms.
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

        Each frame has its prefix and a block without any doubt: of this producer and scope, beginning at `first` or
        behind the block before, complete before `end`, and with a right checksum. `kind` is the second word of each
        prefix: api, flags and stream. `oldest_ms` is the least first-sent time. There are at most `blocks_max` blocks,
        and the one that reaches `bytes_max`, with prefixes, is the last. Raises: ValueError when `end` is outside of
        the view.
        """
        ...

    def lay_out(self, extents: Extents) -> tuple[list[memoryview], tuple[Any, ...]]:
        """Return a view of each checked block, and the fields of `memq.kernel.header_table.HeaderTable`.

        The checksum is combined from those that the blocks state. In Python, small blocks are read again, which costs
        less there. Raises: ValueError without blocks, or for a block that is shorter than a header.
        """
        ...

    def latencies(self, headers: bytes, now_ms: int, skip: Sequence[int]) -> Latency:
        """Return the number of records by bucket of age, without the blocks with the ascending numbers `skip`.

        Raises: IndexError for a number without a block.
        """
        ...

    def fill(self, memory: memoryview, buffers: Sequence[Buffer], number: int, at: int) -> tuple[int, int, int]:
        """Copy bytes `at` on of buffer `number`, and the buffers behind it, to the start of `memory`.

        Returns how many bytes were copied, and number and place of the next byte. `memory` is full, or no byte is left.
        Raises: ValueError when `at` is outside of the buffer.
        """
        ...


_kernel: BlockKernel = cast(Any, compiled("broker")) or blocks_in_python
scan_blocks, lay_out, latencies, fill = _kernel.scan_blocks, _kernel.lay_out, _kernel.latencies, _kernel.fill
