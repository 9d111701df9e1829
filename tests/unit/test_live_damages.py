"""Damages that readers report to the live audit: each damaged record is named once, with its place."""

from __future__ import annotations

import pytest

from memq.audit.finding import Kind
from memq.format.report import ReportedDamage
from tests.unit.audited import KEY
from tests.unit.live_audit_harness import MINUTE, PRODUCER, READER, LiveAuditHarness, span


def test_a_damaged_block_is_corrupt_with_its_place_and_not_lost() -> None:
    harness = LiveAuditHarness()
    for first in (0, 10, 20):
        harness.queue((PRODUCER, first, first + 10))
    damage = ReportedDamage(
        object=KEY, block=0, offset=1, records=10, cause="checksum", producer=PRODUCER, first=10, next=20
    )
    nameless = ReportedDamage(object="other", block=0, offset=2, records=10, cause="magic")
    harness.read(span("processed", (0, 10)), begin="0:0:0", committed="0:3:0", damages=[damage, nameless])
    harness.read(begin="0:0:0", committed="0:1:0", damages=[damage], client=201, group="other")
    harness.settle()
    found = [finding for finding in harness.findings.values() if finding.kind is Kind.CORRUPT]
    assert [(each.object, each.block, each.offset, each.ranges) for each in found] == [
        (KEY, 0, 1, ((10, 20),)),
        ("other", 0, 2, ()),
    ]
    assert [each for each in harness.found() if each[0] != "corrupt"] == [
        ("lost", "consumer", "other", PRODUCER, ((0, 10),))
    ]
    assert harness.word() == "corrupt"


def batch_damage(producer: int, first: int, next_: int, *, block: int = 0, records: int = 0) -> ReportedDamage:
    count = records or next_ - first
    return ReportedDamage(
        object=KEY, block=block, offset=0, records=count, cause="gone", producer=producer, first=first, next=next_
    )


WHOLE_BATCH = (batch_damage(PRODUCER, 0, 20), batch_damage(6, 0, 10))
NAMELESS_BATCH = (batch_damage(0, 0, 0, records=30),)


@pytest.mark.parametrize("apart", [False, True], ids=["at once", "one by one"])
@pytest.mark.parametrize(
    "reports",
    [
        (NAMELESS_BATCH, WHOLE_BATCH),
        (WHOLE_BATCH, NAMELESS_BATCH),
        (NAMELESS_BATCH, WHOLE_BATCH, NAMELESS_BATCH),
        (NAMELESS_BATCH, (batch_damage(PRODUCER, 0, 10),), WHOLE_BATCH),
        ((batch_damage(0, 0, 0, records=10),), NAMELESS_BATCH, WHOLE_BATCH),
        ((batch_damage(PRODUCER, 0, 10),), WHOLE_BATCH),
        (WHOLE_BATCH, (batch_damage(PRODUCER, 10, 20, block=1),)),
        ((batch_damage(PRODUCER, 10, 20, block=1),), NAMELESS_BATCH, WHOLE_BATCH),
    ],
)
def test_each_damaged_record_is_named_and_counted_once_whatever_reports_say_of_its_batch(
    reports: tuple[tuple[ReportedDamage, ...], ...],
    apart: bool,
) -> None:
    harness = LiveAuditHarness()
    harness.queue((PRODUCER, 0, 10), (PRODUCER, 10, 20), (6, 0, 10))
    for number, damages in enumerate(reports):
        harness.read(begin="0:0:0", damages=damages, client=READER + number)
        if apart:
            harness.settle()
    harness.settle()
    found = [each for each in harness.findings.values() if not each.resolved_ms]
    named = [(each.producer, number) for each in found for piece in each.ranges for number in range(*piece)]
    assert sorted(named) == [*((PRODUCER, number) for number in range(20)), *((6, number) for number in range(10))]
    assert [each.records for each in found if not each.ranges] == []
    assert harness.rows[MINUTE].side("")["corrupt"] == 30


def test_a_batch_that_one_reader_did_not_get_stays_damaged_though_a_block_of_it_is_named() -> None:
    harness = LiveAuditHarness()
    harness.queue((PRODUCER, 0, 20), (6, 0, 10))
    harness.read(begin="0:0:0", damages=NAMELESS_BATCH)
    harness.read(begin="0:0:0", damages=[batch_damage(PRODUCER, 0, 20)], client=READER + 1)
    harness.settle()
    found = sorted((each.records, each.producer) for each in harness.findings.values() if not each.resolved_ms)
    assert found == [(20, PRODUCER), (30, 0)]


def test_a_block_that_nobody_dates_is_of_its_pointers_minute_whenever_it_is_found_damaged() -> None:
    damage = ReportedDamage(object=KEY, block=0, offset=0, records=20, cause="c", producer=PRODUCER, first=0, next=20)
    minutes = []
    for later_ms in (0, 600_000):
        harness = LiveAuditHarness()
        harness.queue((PRODUCER, 0, 20))
        harness.settle(later_ms)
        harness.read(begin="0:0:0", committed="0:1:0", damages=[damage])
        harness.settle(later_ms)
        minutes += [each.minute for each in harness.findings.values()]
    assert minutes == [MINUTE, MINUTE]
