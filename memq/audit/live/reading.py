"""Members' responsibility: committed positions compared with records they processed. Pure.

A member that stands at a position and commits a later one says that all between is done. Its reports are dense, so all
that it processed is known by then: what is in the queue there, and processed by nobody of the group, was passed over.
No clock is needed for that, and no other member.
"""

from __future__ import annotations

from collections.abc import Iterator

from memq.audit.account import apart, common
from memq.audit.live.books import Books, Group, Progress, Reading, Stream
from memq.format.ranges import Range, RangeSet
from memq.format.report import Part, Span
from memq.topic import Position


def take_reading(books: Books, group: Group, client: int, part: Part) -> Iterator[int]:
    """Take what a member says about the write partition, and yield the producers whose verdict may change."""
    reading = group.members.setdefault(client, Reading())
    for begin in part.begins:
        reading.sure = True
        reading.at = first_judged(Position.parse(begin.at)) if begin.at else -1
        reading.reached.clear()
        if begin.at:
            go_back(books, group, Position.parse(begin.at).pointer_offset)
    for span in part.spans:
        if span.stage == "processed":
            take_processed(group, span)
            yield span.producer
    if part.committed:
        group.committed = part.committed
        yield from hold(books, group, reading, Position.parse(part.committed).pointer_offset)


def distrust_reading(group: Group, client: int) -> None:
    """Note that a report of a member is missing: it may have passed over nothing, and may have gone back."""
    if client in group.members:
        group.members[client].sure = False
    for progress in group.progress.values():
        progress.now = RangeSet()


def take_processed(group: Group, span: Span) -> int:
    """Take what was processed, and return how many records of it are new to the group."""
    progress = group.progress.setdefault(span.producer, Progress())
    new = 0
    for first, next_ in span.ranges:
        for piece in common([(first, next_)], progress.now):
            progress.doubled.add(*piece)
        progress.now.add(first, next_)
        new += progress.ever.add(first, next_)
    return new


def first_judged(begin: Position) -> int:
    """Return the first pointer that a member answers for: one that begins at or after a position."""
    return begin.pointer_offset + (begin.record_index > 0)


def go_back(books: Books, group: Group, offset: int) -> None:
    """Let everything from a pointer on be processed again: the group began again there."""
    for producer, progress in group.progress.items():
        stream = books.streams.get(producer)
        reach = stream.marks.reach(offset, sure=False) if stream is not None else 0
        if stream is not None and ((progress.now and progress.now.next > reach) or stream.marks.behind):
            kept = common([(0, reach)], progress.now)
            behind = RangeSet((first, next_) for at, first, next_ in stream.marks.behind if at >= offset)
            progress.now = RangeSet(apart(kept, behind))


def hold(books: Books, group: Group, reading: Reading, offset: int) -> Iterator[int]:
    """Hold a member to its word up to a pointer, and let it answer for what comes from there on."""
    begin, sure = reading.at, reading.sure
    reading.at, reading.sure = max(offset, begin), True
    if begin < 0 or offset <= begin:
        return
    for producer, stream in books.streams.items():
        progress = group.progress.get(producer)
        for damaged in books.damaged:
            if begin <= damaged < offset:
                low, high = stream.marks.reach(damaged, sure=False), stream.marks.reach(damaged + 1, sure=True)
                _excuse(stream, progress, _between(stream, (low, high), damaged, damaged + 1))
        low = reading.reached.get(producer, stream.marks.reach(begin, sure=True))
        reading.reached[producer] = high = max(low, stream.marks.reach(offset, sure=False))
        missing = apart(_between(stream, (low, high), begin, offset), stream.corrupt)
        if progress is not None:
            missing = apart(missing, progress.ever)
        if missing:
            progress = group.progress.setdefault(producer, Progress())
            for piece in missing:
                (progress.lost if sure else progress.unproven).add(*piece)
            yield producer


def _excuse(stream: Stream, progress: Progress | None, pieces: list[Range]) -> None:
    """Count as damaged the unprocessed part of a pointer with a damaged block of unknown producer."""
    for piece in apart(pieces, progress.ever if progress is not None else RangeSet()):
        stream.corrupt.add(*piece)


def _between(stream: Stream, inside: Range, begin: int, end: int) -> list[Range]:
    """Return the queue's sequences of a producer in `inside`, out of order in pointers `begin` to `end`."""
    behind = stream.marks.behind
    wanted = RangeSet([inside, *((first, next_) for at, first, next_ in behind if begin <= at < end)])
    elsewhere = RangeSet((first, next_) for at, first, next_ in behind if not begin <= at < end)
    return apart(common(wanted, stream.account.delivered), elsewhere)
