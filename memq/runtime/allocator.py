"""Settings of the C library for the memory of blocks: set when a client or a broker is made."""

from __future__ import annotations

from memq.limits import KIB, MIB

KEPT_BYTES_MAX = 64 * MIB  # what a producer may have pending; the C library learns no more than that
_kept_bytes = 0


def keep_freed_blocks(kept_bytes_max: int = KEPT_BYTES_MAX) -> None:
    """Make glibc keep this much freed memory for later blocks instead of returning it.

    A buffer of 128 KiB or more is mapped again each time, and touching fresh pages costs ten times what the copy does:
    sealing a block took 815 ns per record of 1 KB, and takes 140. The threshold learns: freeing a large buffer raises
    it to the size of that buffer, and the bound of what is kept to twice as much (mallopt(3), M_MMAP_THRESHOLD). So one
    is made and freed; it comes from the kernel cleared, and its pages are never touched. It must be a little less than
    half, the C library's own bytes included. A greater value that was set before stays. Other C libraries are not
    changed by this.
    """
    global _kept_bytes
    kept_bytes_max = min(kept_bytes_max, KEPT_BYTES_MAX)
    if kept_bytes_max > _kept_bytes:
        _kept_bytes = kept_bytes_max
        bytes(kept_bytes_max // 2 - 64 * KIB)
