"""The report on one read partition: start, delivered, skipped, damaged, committed.

Pure: time comes in. It knows read partitions as consumers have them; what is said goes to the tallies of write
partitions, whose pointers lie there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from memq.client.consumer.batch import Damage
from memq.client.consumer.fetch.partition_cursor import Copy, ReadyRange
from memq.client.observers.audit_recorder import PartRecorder
from memq.errors import UnsupportedFormatError
from memq.format.report import BeginReason, damage_of
from memq.topic import Committed, Position

HANDED_MAX = 20_000  # blocks that were given out and are not committed


class _Handed(NamedTuple):
    """Records of one block that were given out: they are processed when `behind` is committed."""

    behind: Position
    part: PartRecorder
    producer: int
    first: int
    next: int
    base_ms: int


class ReadRecorder:
    """The notes on one read partition, while a consumer reads it.

    `part` finds the tally of a write partition; `writers` are those known to come here. `commits`: there is a group.

    The map of the topic may be older than the log, or lack a write partition that is retired. So the beginning is kept,
    and noted for each write partition that appears later: without it the audit takes a seek for a double delivery.
    """

    def __init__(self, part: Callable[[int], PartRecorder | None], writers: Iterable[int], *, commits: bool) -> None:
        self._part = part
        self._commits = commits
        self._writers = dict.fromkeys(writers)
        self._handed: deque[_Handed] = deque()
        self._begun: tuple[str, BeginReason] | None = None
        self._storing = False
        self._later: list[Callable[[], None]] = []

    def begin(self, at: Position, reason: BeginReason, before: ReadRecorder | None = None) -> None:
        """Note that reading begins at a position, in place of `before`: behind what that one stores just now."""
        if before is not None and before._storing:
            self._storing = True  # nothing is stored of this one before it has begun: commits come one by one
            before._later.append(partial(self.begin, at, reason))
            return
        self._begun = (str(at), reason)
        for part in self._parts():
            part.begin(str(at), reason)
        self.end_storing()

    def begin_storing(self) -> None:
        """Note that the group is asked to store a position: what is read instead meanwhile begins behind that."""
        self._storing = True

    def end_storing(self) -> None:
        """Note that the group has answered, or will not."""
        self._storing = False
        later, self._later = self._later, []
        for begin in later:
            begin()

    def give(self, delivery: ReadyRange, now_ms: int) -> None:
        """Note what goes to the user (at Unix ms), and what of it is damaged."""
        if delivery.pointer is None:
            return
        part = self._part_met(delivery.pointer.partition)
        if part is None:
            return
        for piece, low, high in delivery.slices:
            header = piece.header
            assert header is not None, "what is given out is sound"
            first, next_ = header.first_sequence + low, header.first_sequence + high
            part.pass_stage("fetched", header.producer_id, first, next_, header.base_ms, now_ms)
            if self._commits:
                self._keep(_Handed(delivery.behind.position, part, header.producer_id, first, next_, header.base_ms))
        key = delivery.pointer.locations[0].key
        for piece in delivery.damaged:
            if isinstance(piece.cause, UnsupportedFormatError):
                continue  # newer than this reader, and no damage
            part.damage(damage_of(key, piece.number, delivery.first.pointer_offset, piece.records, piece.cause))

    def leave_out(self, copies: Iterable[Copy], now_ms: int) -> None:
        """Note blocks that are copies of what was given out before."""
        for writer, header in copies:
            part = self._part(writer)
            if part is not None:
                first, next_ = header.first_sequence, header.next_sequence
                part.pass_stage("dropped", header.producer_id, first, next_, header.base_ms, now_ms)

    def spoil(self, writer: int, damage: Damage) -> None:
        """Note a block of a write partition whose payload turned out to be damaged when the user read it."""
        part = self._part(writer)
        if part is not None:
            offset = damage.position.pointer_offset
            part.damage(damage_of(damage.object_key, damage.block, offset, damage.records, damage.cause))

    def store(self, committed: Committed, now_ms: int) -> None:
        """Note that the group has stored a position: all that was given out before it is processed."""
        handed = self._handed
        while handed and handed[0].behind <= committed.position:
            _, part, producer, first, next_, base_ms = handed.popleft()
            part.pass_stage("processed", producer, first, next_, base_ms, now_ms)
        for part in self._parts():
            part.commit(str(committed.position))

    # ---- inside ----------------------------------------------------------------------------------

    def _part_met(self, writer: int) -> PartRecorder | None:
        """Return the tally of a write partition whose records are given out, where reading began if it is new."""
        part = self._part(writer)
        if writer not in self._writers:
            self._writers[writer] = None
            if part is not None and self._begun is not None:
                part.begin(*self._begun)
        return part

    def _parts(self) -> list[PartRecorder]:
        found = [self._part(writer) for writer in self._writers]
        return [part for part in found if part is not None]

    def _keep(self, handed: _Handed) -> None:
        if len(self._handed) >= HANDED_MAX:
            self._handed.popleft().part.lacks = True
        self._handed.append(handed)
