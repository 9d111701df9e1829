"""A decision about many members in several entries: it takes effect with the last one. Pure.

A decision about all members of a large group does not fit into one entry. Its bytes are cut into pieces, and each piece
is an entry. The machine gathers them, and applies the decision when the last piece counts. Before that nothing has
changed, also for a later owner: a snapshot has the pieces so far (S7). An owner that ends between two pieces leaves
some behind. The next decision of the group begins with piece 0, which replaces them.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from awscrt.checksums import crc32c

from memq.errors import TooLargeError
from memq.limits import KIB, MIB

PIECE_BYTES_MAX = 48 * KIB  # an entry has at most 64 KiB
WHOLE_BYTES_MAX = 64 * MIB  # of a decision


class PieceDecision(msgspec.Struct, frozen=True, tag="piece"):
    """Piece `number` (from 0) of the `count` pieces of a decision about members of `group`.

    `checksum` is the CRC-32C of the whole decision.
    """

    group: str
    checksum: int
    number: int
    count: int
    piece: bytes


class GatheredPieces(msgspec.Struct, array_like=True):
    """The first pieces of a decision, whose last one does not count yet."""

    checksum: int
    count: int
    pieces: list[bytes]

    def is_next(self, decision: PieceDecision) -> bool:
        """Whether a piece follows on these, as a piece of the same decision."""
        same = (decision.checksum, decision.count) == (self.checksum, self.count)
        return same and decision.number == len(self.pieces)

    def add(self, decision: PieceDecision) -> bytes | None:
        """Add the next piece; return the whole decision after the last one."""
        self.pieces.append(decision.piece)
        return b"".join(self.pieces) if len(self.pieces) == self.count else None


def pieces_of(group: str, body: bytes) -> Iterator[PieceDecision]:
    """Yield the pieces of a decision about members, in order. Raises: TooLargeError."""
    if len(body) > WHOLE_BYTES_MAX:
        raise TooLargeError(f"a decision about group '{group}' has {len(body)} bytes, at most {WHOLE_BYTES_MAX}")
    count, checksum = -(-len(body) // PIECE_BYTES_MAX), crc32c(body)
    for number in range(count):
        begin = number * PIECE_BYTES_MAX
        yield PieceDecision(group, checksum, number, count, body[begin : begin + PIECE_BYTES_MAX])
