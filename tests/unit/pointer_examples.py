"""Random pointers of every kind, and histories of the totals that pointers state."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from memq.format.pointer import (
    Adopted,
    Location,
    NamedProducer,
    Pointer,
    ProducerEnd,
    ProducerRanges,
)
from memq.format.totals import adopted_of
from memq.topic import Totals

names = st.from_regex(r"\A[A-Za-z0-9_-]{1,20}\Z")
numbers = st.integers(0, (1 << 53) - 1)
times = st.integers(-(1 << 53) + 1, (1 << 53) - 1)
u32 = st.integers(0, (1 << 32) - 1)
sequences = st.integers(0, 1 << 63)
producer_ids = st.integers(1, (1 << 63) - 1)
texts = st.text(max_size=20)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, int], ...]:
    edges = sorted(draw(st.sets(sequences, max_size=8)))
    return tuple(zip(edges[::2], edges[1::2], strict=False))


def pairs(values: st.SearchStrategy[int]) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(values, values).map(lambda pair: (min(pair), max(pair)))


def tuples(values: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(values, max_size=3).map(tuple)


locations = st.builds(Location, store=names, key=names.map("a/{}".format), offset=numbers, length=numbers)
adopted = st.builds(Adopted, offset=numbers, epoch=u32, batch_sequence=numbers, records=numbers, bytes=numbers)
named = st.builds(
    NamedProducer, producer=producer_ids, epoch=u32, last_sequence=sequences, batch_id=texts, last_seen_ms=times
)
acks = st.none() | st.integers(0, 2)
ended = st.builds(ProducerEnd, producer=producer_ids, next_sequence=sequences, burned=ranges(), acks=acks)


@st.composite
def pointers(draw: st.DrawFn) -> Pointer:
    """Any pointer that may be written."""
    data = draw(st.booleans())
    least, greatest = draw(pairs(times))
    return Pointer(
        kind="data" if data else draw(st.sampled_from(["opened", "closed", "ended"])),
        cluster=draw(names),
        topic=draw(names),
        topic_id=draw(st.from_regex(r"\A[0-9a-f]{32}\Z")),
        partition=draw(u32),
        epoch=draw(u32),
        batch_sequence=draw(numbers),
        locations=draw(st.lists(locations, min_size=data, max_size=2).map(tuple)),
        records=draw(numbers) or int(data),
        raw_bytes=draw(numbers),
        stored_bytes=draw(numbers),
        least_ms=least,
        greatest_ms=greatest,
        totals=Totals(draw(numbers), draw(numbers)),
        adopted=draw(tuples(adopted)),
        skip=tuple(sorted(draw(st.sets(st.integers(0, (1 << 20) - 1), max_size=5)))),
        producers=draw(tuples(st.builds(ProducerRanges, producer_ids, ranges()))),
        producers_complete=draw(st.booleans()),
        slots=draw(pairs(st.integers(0, 65_535))),
        tag_bits=draw(st.integers(0, (1 << 64) - 1)),
        checksum=draw(u32),
        broker=draw(names | st.just("")),
        sealed_ms=draw(times),
        latency=draw(tuples(st.tuples(st.integers(0, 64), numbers))),
        ended=draw(tuples(ended)),
        named=draw(tuples(named)),
    )


def pointer(
    kind: str, epoch: int, batch: int = 0, records: int = 0, before: int = 0, adopted: tuple[Adopted, ...] = ()
) -> Pointer:
    """A pointer with `records` of ten bytes each, and `before` records before it."""
    return Pointer(
        kind=kind,
        cluster="c",
        topic="t",
        topic_id="0" * 32,
        partition=0,
        epoch=epoch,
        batch_sequence=batch,
        records=records,
        stored_bytes=10 * records,
        totals=Totals(before, 10 * before),
        adopted=adopted,
    )


FIRST = pointer("data", 1, 0, 5)
LATE = pointer("data", 1, 9, 4)
# What lies in the queue, in order; the totals behind it are the plain sum from offset 0 on.
HISTORIES = {
    "in order": (pointer("opened", 1), FIRST, pointer("data", 1, 1, 7, before=5)),
    "a batch that landed twice": (FIRST, FIRST, pointer("data", 1, 1, 2, before=10, adopted=(adopted_of(0, FIRST),))),
    "a repetition that adopts what the first try had not met": (
        pointer("opened", 2),
        LATE,
        pointer("data", 2, 0, 3),
        pointer("data", 2, 0, 3, before=4, adopted=(adopted_of(1, LATE),)),
        pointer("data", 2, 1, 1, before=10, adopted=(adopted_of(2, FIRST),)),
    ),
    "a repetition that lands last and adopts again": (
        LATE,
        pointer("data", 2, 0, 3),
        pointer("data", 2, 1, 1, before=7, adopted=(adopted_of(0, LATE),)),
        pointer("data", 2, 0, 3, before=4, adopted=(adopted_of(0, LATE),)),
    ),
    "beside an opening": (FIRST, pointer("data", 1, 1, 7, before=5), pointer("opened", 2, before=5), LATE),
}
