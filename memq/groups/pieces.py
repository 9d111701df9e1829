"""A decision about many members in several entries: it takes effect with the last one. Pure.

A decision about all members of a large group does not fit into one entry, and its application would hold the event
loop for long. So it is made of parts, each a decision about some of the members. The bytes of the parts, each after its
length, are cut into pieces, and each piece is an entry. The machine decodes each part with the piece that completes it
(ADR 67), and changes the group when the last piece counts. Before that nothing has changed, also for a later owner: a
snapshot has the pieces so far (S7). An owner that ends between two pieces leaves some behind. The next decision of the
group begins with piece 0, which replaces them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from awscrt.checksums import crc32c

from memq.errors import TooLargeError
from memq.limits import KIB, MIB

PIECE_BYTES_MAX = 48 * KIB  # an entry has at most 64 KiB
WHOLE_BYTES_MAX = 64 * MIB  # of a decision
LENGTH_BYTES = 4  # before each part, big-endian


class PieceDecision(msgspec.Struct, frozen=True, tag="piece"):
    """Piece `number` (from 0) of the `count` pieces of a decision about members of `group`.

    `checksum` is the CRC-32C of all their bytes.
    """

    group: str
    checksum: int
    number: int
    count: int
    piece: bytes


class GatheredPieces(msgspec.Struct, array_like=True):
    """The first pieces of a decision, whose last one does not count yet, as snapshots have them."""

    checksum: int
    count: int
    pieces: list[bytes]


class PieceReader:
    """Takes the pieces of one decision in order; each completes some of its parts."""

    def __init__(self, checksum: int, count: int) -> None:
        self.gathered = GatheredPieces(checksum, count, [])
        self._rest = b""
        self._checksum = 0

    def is_next(self, decision: PieceDecision) -> bool:
        """Whether a piece follows on these, as a piece of the same decision."""
        same = (decision.checksum, decision.count) == (self.gathered.checksum, self.gathered.count)
        return same and decision.number == len(self.gathered.pieces)

    def take(self, piece: bytes) -> list[bytes]:
        """Take the next piece; return the parts that it completes."""
        self.gathered.pieces.append(piece)
        self._checksum = crc32c(piece, self._checksum)
        left, at, parts = self._rest + piece, 0, list[bytes]()
        while (begin := at + LENGTH_BYTES) <= len(left):
            end = begin + int.from_bytes(left[at:begin], "big")
            if end > len(left):
                break
            parts.append(left[begin:end])
            at = end
        self._rest = left[at:]
        return parts

    @property
    def is_whole(self) -> bool:
        """Whether the last piece was taken."""
        return len(self.gathered.pieces) == self.gathered.count

    @property
    def is_sound(self) -> bool:
        """Whether all pieces together have the checksum of the decision, and end with a part."""
        return not self._rest and self._checksum == self.gathered.checksum


def pieces_of(group: str, parts: Sequence[bytes]) -> Iterator[PieceDecision]:
    """Yield the pieces of a decision about members, in order. Raises: TooLargeError."""
    body = b"".join(each for part in parts for each in (len(part).to_bytes(LENGTH_BYTES, "big"), part))
    if len(body) > WHOLE_BYTES_MAX:
        raise TooLargeError(f"a decision about group '{group}' has {len(body)} bytes, at most {WHOLE_BYTES_MAX}")
    count, checksum = -(-len(body) // PIECE_BYTES_MAX), crc32c(body)
    for number in range(count):
        begin = number * PIECE_BYTES_MAX
        yield PieceDecision(group, checksum, number, count, body[begin : begin + PIECE_BYTES_MAX])
