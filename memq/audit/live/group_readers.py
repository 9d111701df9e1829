"""Members' responsibility: committed positions compared with records they processed. Pure.

A member that starts at one position and commits a later one is responsible for all records between. Its reports are
dense, so the audit then knows all records that it processed, or passed because of its filter. A record there that no
member of the group processed or passed is lost for the group. This needs no clock and no other member.

Reports of one member are ordered, reports of two members are not: a partition of `_memq_audit` that hangs for 20 s
delays one member's reports only. So it is unknown whether a member processed a record before or after another member
started. A group's position can also go back when a commit arrives late. Therefore only one member's reports prove a
doubling: it processed a record twice since its start, or one before its start that the group had processed already.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from memq.audit.account import apart, common
from memq.audit.live.partition_state import AuditedGroup, AuditedProducer, GroupProgress, MemberReading, PartitionState
from memq.format.ranges import Range, RangeSet
from memq.format.report import ReportPart
from memq.topic import Position

MEMBERS_MAX = 1_024  # of a group in a write partition; those that began longest ago are forgotten


def take_reading(state: PartitionState, group: AuditedGroup, client: int, part: ReportPart) -> Iterator[int]:
    """Take a member's report on the write partition; yield the producers whose verdict may change."""
    if part.begins:  # the one that began last is the last in the dictionary
        group.members[client] = group.members.pop(client, MemberReading())
    reading = group.members.setdefault(client, MemberReading())
    while len(group.members) > MEMBERS_MAX:
        del group.members[next(iter(group.members))]
    for begin in part.begins:
        begin_reading(reading, begin.at)
    for span in part.spans:
        if span.stage == "processed":
            take_processed(state, group, reading, span.producer, span.ranges)
        if span.stage in ("processed", "passed"):
            yield span.producer
    if part.committed:
        group.committed = part.committed
        yield from hold(state, group, reading, Position.parse(part.committed).pointer_offset)


def begin_reading(reading: MemberReading, at: str) -> None:
    """Let a member begin at a position, "" for an unknown one: it may process all records from there."""
    position = Position.parse(at) if at else None
    reading.sure = True
    reading.at = -1 if position is None else first_judged(position)
    reading.begin = -1 if position is None else position.pointer_offset
    reading.reached.clear()
    reading.now.clear()


def distrust_reading(group: AuditedGroup, client: int) -> None:
    """Note that a report of a member is missing.

    It may contain the records that the member seems to have skipped, and a seek back.
    """
    if client in group.members:
        reading = group.members[client]
        reading.sure, reading.begin = False, -1
        reading.now.clear()


def take_processed(
    state: PartitionState,
    group: AuditedGroup,
    reading: MemberReading,
    producer: int,
    ranges: Iterable[Range],
    *,
    repeats: bool = False,
) -> int:
    """Take the records that a member processed; return how many are new to the group.

    With `repeats`, the work repeats a failed try, and doubles nothing.
    """
    progress = group.progress.setdefault(producer, GroupProgress())
    now = reading.now.setdefault(producer, RangeSet())
    stream, new = state.streams.get(producer), 0
    for piece in ranges:
        if not repeats:
            before = _before(stream, piece, reading.begin) if stream is not None else []
            for again in [*common([piece], now), *common(before, progress.ever)]:
                progress.doubled.add(*again)
        now.add(*piece)
        new += progress.ever.add(*piece)
    return new


def first_judged(begin: Position) -> int:
    """Return the first pointer that a member is responsible for: one that begins at or after a position."""
    return begin.pointer_offset + (begin.record_index > 0)


def _before(stream: AuditedProducer, piece: Range, begin: int) -> list[Range]:
    """Return the part of a piece that is certainly in pointers below the offset `begin`."""
    first, next_ = piece[0], min(piece[1], stream.marks.reach(begin, sure=False))
    behind = RangeSet((low, high) for at, low, high in stream.marks.behind if at >= begin)
    return apart([(first, next_)], behind) if first < next_ else []


def hold(state: PartitionState, group: AuditedGroup, reading: MemberReading, offset: int) -> Iterator[int]:
    """Compare a member's reports with the records up to a pointer, and make it responsible from there on."""
    begin, sure = reading.at, reading.sure
    reading.at, reading.sure = max(offset, begin), True
    if begin < 0 or offset <= begin:
        return
    for producer, stream in state.streams.items():
        progress = group.progress.get(producer)
        for damaged in state.damaged:
            if begin <= damaged < offset:
                low, high = stream.marks.reach(damaged, sure=False), stream.marks.reach(damaged + 1, sure=True)
                _excuse(stream, progress, _between(stream, (low, high), damaged, damaged + 1))
        low = reading.reached.get(producer, stream.marks.reach(begin, sure=True))
        reading.reached[producer] = high = max(low, stream.marks.reach(offset, sure=False))
        missing = apart(_between(stream, (low, high), begin, offset), stream.corrupt)
        if progress is not None:
            missing = apart(missing, progress.ever, progress.passed)
        if missing:
            progress = group.progress.setdefault(producer, GroupProgress())
            for piece in missing:
                (progress.lost if sure else progress.unproven).add(*piece)
            yield producer


def _excuse(stream: AuditedProducer, progress: GroupProgress | None, pieces: list[Range]) -> None:
    """Count as damaged the unhandled part of a pointer with a damaged block of unknown producer."""
    handled = (progress.ever, progress.passed) if progress is not None else ()
    for piece in apart(pieces, *handled):
        stream.corrupt.add(*piece)


def _between(stream: AuditedProducer, inside: Range, begin: int, end: int) -> list[Range]:
    """Return the sequences of a producer in the pointers `begin` to `end`.

    These are those in `inside` and those that these pointers have out of order, without those of other pointers.
    """
    behind = stream.marks.behind
    wanted = RangeSet([inside, *((first, next_) for at, first, next_ in behind if begin <= at < end)])
    elsewhere = RangeSet((first, next_) for at, first, next_ in behind if not begin <= at < end)
    return apart(common(wanted, stream.account.delivered), elsewhere)
