"""Faults for the live audit: a fault with another explanation is not injected."""

from __future__ import annotations

import random
from typing import Any

import pytest
from msgspec.structs import replace

from memq.format.report import Begin, Report, ReportedDamage, ReportPart, ReportSpan
from tests.simulation.live_faults import LiveFaults
from tests.simulation.live_replay import History
from tests.simulation.reader import LogBlock, LogEntry
from tests.unit.audited import TOPIC, data_pointer

PRODUCER = 7


def passes_over(committed: str, *, damaged: bool, number: int = 0, later: tuple[str, str] | None = None) -> bool:
    """Whether a span of a group that has committed so far can be passed over, after another member met damage.

    `later` is where one more member began, and what it committed.
    """
    blocks = (LogBlock((0, PRODUCER), 0, 2, 0, (b"", b"")), LogBlock((0, PRODUCER), 2, 4, 2, (b"", b"")))
    entry = LogEntry(0, 0, data_pointer([(PRODUCER, 0, 4)]), blocks)
    damage = ReportedDamage(object="o", block=0, offset=0, records=2, cause="gone", producer=PRODUCER, first=0, next=2)
    span = ReportSpan(stage="processed", producer=PRODUCER, minute=0, ranges=((0, 4),))
    begins = (Begin(at="0:0:0", reason="start"),)
    history: History = [
        entry,
        (0, report(1, damages=(damage,) * damaged)),
        (0, replace(report(2, spans=(span,), begins=begins, committed=committed), number=number)),
    ]
    if later is not None:
        history.append((0, report(3, begins=(Begin(at=later[0], reason="stored"),), committed=later[1])))
    return LiveFaults(TOPIC, history, {}, random.Random(1)).passed_over() is not None


def report(client: int, **said: Any) -> Report:
    part = ReportPart(topic="clicks", topic_id=TOPIC.id, partition=0, **said)
    return Report(client=client, kind="consumer", name="g", number=0, since_ms=0, until_ms=1, next_ms=2, parts=(part,))


@pytest.mark.parametrize(
    ("committed", "damaged", "wanted"),
    [("0:1:0", False, True), ("0:0:4", False, True), ("0:0:3", False, False), ("0:1:0", True, False)],
)
def test_a_span_is_passed_over_where_nothing_else_explains_it(committed: str, damaged: bool, wanted: bool) -> None:
    assert passes_over(committed, damaged=damaged) == wanted


def test_a_member_whose_first_report_is_missing_is_passed_over_in_silence() -> None:
    """The audit does not know where such a member began, and names nothing."""
    assert passes_over("0:1:0", damaged=False, number=0)
    assert not passes_over("0:1:0", damaged=False, number=1)


def test_a_batch_whose_end_a_silent_member_committed_is_not_passed_over() -> None:
    assert passes_over("0:1:0", damaged=False, later=("0:5:0", "0:9:0"))
    assert not passes_over("0:0:3", damaged=False, later=("0:5:0", "0:9:0"))
