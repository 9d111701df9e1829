"""Opens the encrypted blocks of fetched batches, before records are delivered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from memq.errors import KeyMissingError, MemqError
from memq.format.batch import BlockPiece
from memq.format.blocks.header import ENVELOPE
from memq.format.pointer import Pointer
from memq.runtime.threads import ThreadPool

if TYPE_CHECKING:
    from memq.encryption.encryption import Encryption


def must_open(pieces: Sequence[BlockPiece], encryption: Encryption | None) -> bool:
    """Whether blocks can't be delivered as they are: one is encrypted, or plain ones are refused."""
    if encryption is not None and not encryption.allows_plain:
        return True
    return any(piece.header is not None and piece.header.codec == ENVELOPE for piece in pieces)


async def open_content(
    pieces: Sequence[BlockPiece], pointer: Pointer, encryption: Encryption | None
) -> Sequence[BlockPiece]:
    """Return the blocks of a batch in plain. One that can't be opened has the error as its cause.

    Raises: KeyProviderError: try again.
    """
    if not must_open(pieces, encryption):
        return pieces
    if encryption is None:
        return [_closed(piece) for piece in pieces]
    if not encryption.needs_wait(pieces):
        return encryption.open_pieces(pieces, pointer.topic_id, pointer.partition)
    threads = ThreadPool("decryption", 1)  # the provider may ask a server, or read a file
    try:
        return await threads.run(encryption.open_pieces, pieces, pointer.topic_id, pointer.partition)
    finally:
        await threads.close()


def _closed(piece: BlockPiece) -> BlockPiece:
    if piece.header is None or piece.header.codec != ENVELOPE:
        return piece
    try:
        key_id = piece.reader().envelope().key_id
        cause: MemqError = KeyMissingError(f"{piece.header.describe()} is encrypted with the key {key_id[:60]!a}")
    except MemqError as error:
        cause = error
    return piece._replace(header=None, cause=cause)
