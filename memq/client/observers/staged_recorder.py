"""The report on a staged batch, from its manifest: sent when decided, acked when published.

Pure: time comes in. The blocks of a piece have the producer id of their object and sequences from 0 on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memq.client.observers.audit_recorder import PartRecorder
from memq.format.manifest import StagedObject, StagedPiece
from memq.format.report import Stage
from memq.protocol.frames import AckLevel

Pieces = Sequence[tuple[StagedObject, StagedPiece]]


class StagedRecorder:
    """The notes on the pieces of one batch in one write partition.

    `part` is None when nobody wants to know.
    """

    def __init__(self, part: PartRecorder | None, pieces: Pieces) -> None:
        self._part = part
        self._pieces = pieces
        self._acked = 0

    def send(self, now_ms: int) -> None:
        """Note (at Unix ms) that the pieces are to be published, since their manifest is there."""
        self._note("sent", self._pieces, now_ms)

    def ack(self, published: int, now_ms: int) -> None:
        """Note that the owner has published so many of them."""
        self._note("acked", self._pieces[self._acked : published], now_ms)
        self._acked = max(self._acked, published)

    def _note(self, stage: Stage, pieces: Iterable[tuple[StagedObject, StagedPiece]], now_ms: int) -> None:
        if self._part is None:
            return
        for staged, piece in pieces:
            first, producer = 0, int(staged.producer, 16)
            for base_ms, next_ in piece.times:
                self._part.pass_stage(stage, producer, first, next_, base_ms, now_ms, AckLevel.ALL)
                first = next_
