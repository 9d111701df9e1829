"""Segments of the spool: removed with the last ticket, copied if little is needed, within bounds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from memq.broker.spool.segments import COPY_SHARE, SEGMENTS_PER_SPOOL, Segment, Segments, Ticket

BYTES_MAX = 1_600
SEGMENT_BYTES = BYTES_MAX // SEGMENTS_PER_SPOOL
BLOCK_BYTES_MAX = SEGMENT_BYTES // 2


class Model:
    """What a writer does with segments: appends blocks, copies what it is asked to, removes what is wanted no more."""

    def __init__(self) -> None:
        self.segments = Segments(BYTES_MAX)
        self.freed = 0
        self.begun = 0
        self.written_bytes = 0
        self.copied_bytes = 0

    def _wake(self) -> None:
        self.freed += 1

    def append(self, size: int) -> Ticket:
        ticket = Ticket(self._wake)
        segment, start = self._grow(size)
        ticket.bind(segment, ((start, start + size),))
        self.written_bytes += size
        self.work()
        return ticket

    def _grow(self, size: int) -> tuple[Segment, int]:
        segment = self.segments.open
        if segment is None:
            self.begun += 1
            segment = self.segments.begin(f"{self.begun}", 0)
        start = segment.bytes
        self.segments.grow(segment, size)
        return segment, start

    def work(self) -> None:
        self._remove()
        while (old := self.segments.to_copy()) is not None:
            segment, at = self._grow(old.wanted_bytes)
            self.copied_bytes += old.wanted_bytes
            for ticket in list(old.tickets):
                size = sum(end - start for start, end in ticket.spans)
                ticket.move(segment, ((at, at + size),))
                at += size
            assert (old.wanted_bytes, old.tickets) == (0, {})
            self._remove()

    def _remove(self) -> None:
        for segment in self.segments.unwanted():
            self.segments.forget(segment)


@given(st.lists(st.tuples(st.integers(1, BLOCK_BYTES_MAX), st.integers(0, 60)), max_size=200))
def test_little_is_kept_next_to_the_needed_bytes_and_little_is_copied(blocks: list[tuple[int, int]]) -> None:
    """Each block is wanted until so many others came after it; some of them until the end."""
    model = Model()
    wanted: dict[int, list[tuple[Ticket, int]]] = {}
    wanted_bytes = 0
    for number, (size, lasts) in enumerate(blocks):
        wanted_bytes += size
        wanted.setdefault(number + lasts if lasts < 55 else len(blocks), []).append((model.append(size), size))
        for ticket, freed_bytes in wanted.pop(number, []):
            ticket.release()
            ticket.release()
            wanted_bytes -= freed_bytes
        model.work()
        bound = max(BYTES_MAX // COPY_SHARE, 2 * wanted_bytes)
        assert wanted_bytes <= model.segments.bytes <= bound + SEGMENT_BYTES + BLOCK_BYTES_MAX
        assert model.copied_bytes <= model.written_bytes
    model.segments.open = None
    for tickets in wanted.values():
        for ticket, _ in tickets:
            ticket.release()
    model.work()
    assert (model.segments.bytes, len(model.segments)) == (0, 0)


def test_the_writer_is_woken_when_a_segment_may_go_or_is_kept_for_little() -> None:
    segments, woken = Segments(BYTES_MAX), []
    segment = segments.begin("one", 0)
    tickets = [Ticket(lambda: woken.append(1)) for _ in range(4)]
    segments.grow(segment, 80)
    for number, ticket in enumerate(tickets):
        ticket.bind(segment, ((20 * number, 20 * number + 20),))
    found = []
    for ticket in tickets:
        ticket.release()
        found.append(len(woken))
    assert found == [0, 1, 2, 3]


def test_the_segment_that_is_appended_to_stays_without_tickets() -> None:
    segments = Segments(BYTES_MAX)
    segment = segments.begin("one", 0)
    assert segments.unwanted() == []
    segments.open = None
    assert segments.unwanted() == [segment]


def test_segments_for_the_operator_are_not_copied() -> None:
    segments = Segments(BYTES_MAX)
    for number in range(SEGMENTS_PER_SPOOL):
        segment = segments.find(f"{number}", 0, SEGMENT_BYTES)
        Ticket(lambda: None).bind(segment, ((0, 1),))
        segment.kept, segment.fixed = number == 0, number == 1
    found = segments.to_copy()
    assert found is not None
    assert found.name == "2"


def test_block_released_during_its_copy_needs_no_segment() -> None:
    segments = Segments(BYTES_MAX)
    one, two = segments.find("1", 0, 10), segments.find("2", 0, 10)
    ticket = Ticket(lambda: None)
    ticket.bind(one, ((0, 10),))
    ticket.release()
    ticket.move(two, ((0, 10),))
    assert [each.name for each in segments.unwanted()] == ["1", "2"]
    assert (one.wanted_bytes, two.wanted_bytes) == (0, 0)
