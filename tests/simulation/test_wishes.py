"""Filters in the simulation: the truth about records, and the rules of groups and of reads with an end."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import pytest

from memq.client.consumer.fetch.cursor_outcomes import Counts
from memq.client.consumer.record_filter import RecordFilter
from memq.format.blocks.builder import BlockBuilder
from memq.format.blocks.columns import open_block
from memq.format.blocks.header import parse_header
from memq.topic import Position
from tests.simulation.bounded_reads import BoundedPart, Found
from tests.simulation.checked_log import PARTITION, Log, block
from tests.simulation.group_rules import GroupRules
from tests.simulation.plan import draw_plan
from tests.simulation.read_log import ReadLog
from tests.simulation.wishes import WISHES, Facets, WantedPlaces, Wish, draw_marks, facets_of

PAID = WISHES[0]
MARKS = (b"@paid ", b"@late ", b"@late ", b"@paid ", b"@;amount=7 ")


def marked(*marks: bytes) -> list[bytes]:
    return [b"p 0 %d " % number + mark for number, mark in enumerate(marks)]


def test_a_value_says_its_tag_and_headers() -> None:
    assert facets_of(b"p.1 0 7 @late;amount=51;amount;region=EU \x00 @x ") == Facets(
        "late", (("amount", b"51"), ("amount", None), ("region", b"EU"))
    )
    assert facets_of(b"p.1 0 7 @;amount=-3.5 ").amount == -3.5
    assert facets_of(b"p.1 0 7 no mark") == facets_of(b"") == Facets(None, ())


def test_a_filter_of_the_product_agrees_with_each_wish() -> None:
    draw = random.Random(5)
    marks = [mark for _ in range(200) for mark in draw_marks(draw, 3)]
    values = [b"p 0 1 " + mark for mark in marks]
    builder = BlockBuilder()
    for value in values:
        builder.append(value, headers=facets_of(value).headers, tag=facets_of(value).tag)
    sealed = builder.seal(producer_id=1, first_sequence=0, scope=1, now_ms=1, codec="none")
    reader = open_block(memoryview(sealed.data)[: parse_header(memoryview(sealed.data), 0).length])
    for wish in WISHES:
        wanted = bytes(wish.wants_value(value) for value in values)
        assert RecordFilter(wish.tags, wish.where).mask(reader) == wanted, wish
        assert any(wanted) or wish.tags == "never sent"


def test_places_of_wanted_records_follow_a_log_that_grows_and_is_cut() -> None:
    stream, places = log_of(*MARKS).stream, WantedPlaces(PAID)
    assert [places.next(stream[:2], at) for at in range(4)] == [0, 2, 2, 3]
    assert [places.next(stream, at) for at in range(6)] == [0, 3, 3, 3, 5, 5]
    places.cut(3)
    assert places.next(stream[:3], 1) == 3
    assert places.next([*stream[:3], stream[4], stream[0]], 1) == 4


def written(marks: Sequence[bytes], wishes: Mapping[str, Wish] | None = None) -> Log:
    log = Log()
    log.checker.reports.wishes = wishes or {}
    log.open(1)
    values = marked(*marks)
    for number, value in enumerate(values):
        log.checker.sent("p", 0, number, value)
    log.batch([block(0, values)], 0)
    return log


def log_of(*marks: bytes) -> ReadLog:
    """Return a log with one block, whose records have these marks."""
    return written(marks).checker.logs[PARTITION]


class FilteredGroup:
    """Group `g` with a filter reads a log; `found` are findings."""

    def __init__(self) -> None:
        self.log = log_of(*MARKS)
        self.found: list[str] = []
        self.rules = GroupRules({PARTITION: self.log}, self.found.append, lambda: 0.0, lambda _source, _value: None)
        self.rules.wishes = {"g": PAID}

    def consume(self, *places: int) -> None:
        for place in places:
            one = self.log.stream[place]
            self.rules.consume("c", "g", PARTITION, (one.offset, one.record_index), one.value)

    def commit(self, place: int) -> None:
        offset = self.log.stream[0].offset
        self.rules.committed("g", PARTITION, Position(0, offset, place))


def test_a_group_that_gets_all_wanted_records_and_passes_the_others_is_drained() -> None:
    group = FilteredGroup()
    group.consume(0)
    group.commit(3)  # over two records that nobody wants
    group.consume(3)
    assert not group.rules.is_drained("g")
    group.commit(4)
    assert not group.rules.is_drained("g")
    group.commit(5)
    assert group.rules.is_drained("g")
    assert group.found == []


def deliver_an_unwanted_record(group: FilteredGroup) -> None:
    group.consume(0, 1)


def deliver_the_second_wanted_record_alone(group: FilteredGroup) -> None:
    group.consume(3)


def store_behind_a_wanted_record(group: FilteredGroup) -> None:
    group.consume(0)
    group.commit(4)


def begin_behind_a_wanted_record(group: FilteredGroup) -> None:
    group.consume(0, 3)
    group.rules.fetched("g", PARTITION, Position(0, group.log.stream[0].offset, 0))
    group.rules.assign("c", "g", PARTITION)
    group.consume(3)


@pytest.mark.parametrize(
    ("deed", "words"),
    [
        (deliver_an_unwanted_record, "delivers record 1"),
        (deliver_the_second_wanted_record_alone, "skips records 0 to 3"),
        (store_behind_a_wanted_record, "record 4, it has iterated 3"),
        (begin_behind_a_wanted_record, "begins with record 3"),
    ],
)
def test_a_group_with_a_filter_that_breaks_a_rule_is_found(deed: Callable[[FilteredGroup], None], words: str) -> None:
    group = FilteredGroup()
    deed(group)
    assert words in group.found[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("none", []),
        ("lacks one", ["1 records instead of 2, the first difference at -1"]),
        ("has another", ["3 records instead of 2, the first difference at -1"]),
        ("position", ["it ends at 0:1:4"]),
        ("position behind what retention took", []),
        ("records", ["it counts 3 records, and gave out 2"]),
        ("left out", ["it counts 3 records as left out, they are 2 to 2"]),
    ],
)
def test_a_read_with_an_end_is_compared_with_its_part_of_the_log(change: str, words: list[str]) -> None:
    log = log_of(*MARKS)
    offset = log.stream[0].offset
    end = Position(0, offset, 4)
    part = BoundedPart(PARTITION, Position(0, offset, 0), end, PAID, log)
    found: list[Found] = [(offset, index, log.stream[index].value) for index in (0, 3)]
    if change == "lacks one":
        del found[1]
    elif change == "has another":
        found.append((offset, 4, log.stream[4].value))
    counts = Counts(records=2 + (change == "records"), filtered_records=2 + (change == "left out"))
    counts.expired_offsets = int("retention" in change)
    position = end if "position" not in change else Position(0, offset + 1, 4)
    said = part.findings(found, [], position, counts)
    assert [each.replace(f"0:{offset + 1}", "0:1") for each in said] == words


@pytest.mark.parametrize(
    ("group", "stage", "sequence", "fits"),
    [
        ("g", "passed", 1, True),
        ("g", "passed", 0, False),
        ("g", "fetched", 0, True),
        ("g", "fetched", 1, False),
        ("g", "processed", 2, False),
        ("g", "dropped", 2, True),
        ("another", "processed", 1, True),
        ("another", "passed", 1, False),
    ],
)
def test_a_report_agrees_with_the_filter_of_its_group(group: str, stage: str, sequence: int, fits: bool) -> None:
    log = written(MARKS, {"g": PAID})
    assert log.checker.reports.fits_wish(group, stage, (0, 7), sequence) == fits


def test_a_block_in_which_wanted_and_other_records_alternate_is_reported_as_a_whole() -> None:
    log = written((b"@paid ", b"@late ") * 5, {"g": PAID})
    assert all(log.checker.reports.fits_wish("g", "processed", (0, 7), sequence) for sequence in range(10))
    assert not log.checker.reports.fits_wish("g", "passed", (0, 7), 0)


def test_a_plan_with_filters_gives_one_to_some_groups() -> None:
    plans = [draw_plan(seed, "calm", aspects=("filter",)) for seed in range(1, 60)]
    assert all(plan.wishes and plan.wishes.keys() <= set(plan.consumers) for plan in plans)
    assert {id(wish) for plan in plans for wish in (plan.wishes or {}).values()} == {id(wish) for wish in WISHES}
    assert any(set(plan.consumers) - set(plan.wishes or {}) for plan in plans)
    assert draw_plan(1, "calm", aspects=()).wishes is None
