"""The copied part of a segment: entries that tickets still need, for their new place."""

from __future__ import annotations

import asyncio

from memq.broker.spool.segments import Segment, Span, Ticket
from memq.format.spool import copied_entries

SLICE_ENTRIES = 256  # a millisecond of the event loop

Moves = list[tuple[Ticket, tuple[Span, ...]]]


async def wanted_entries(segment: Segment, data: bytes, seed: int, at: int) -> tuple[list[bytes | memoryview], Moves]:
    """Return a segment's needed entries as entries of segment `seed` from byte `at` on, with places.

    Raises: CorruptDataError when one of them can't be read.
    """
    buffers: list[bytes | memoryview] = []
    moves: Moves = []
    for ticket in list(segment.tickets):
        began = at
        for start, end in ticket.spans:
            for header, block in copied_entries(data, start, end, seed):
                buffers += (header, block)
                at += len(header) + len(block)
                if len(buffers) % (2 * SLICE_ENTRIES) == 0:
                    await asyncio.sleep(0)
        moves.append((ticket, ((began, at),)))
    return buffers, moves
