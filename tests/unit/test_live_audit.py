"""The live audit's machines, on written pointers and reports: each fault, each doubt, each withdrawal."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

import msgspec
import pytest

from memq.audit.finding import Kind
from memq.audit.live.event_minute import PIECES_MAX
from memq.audit.live.group_readers import MEMBERS_MAX
from memq.audit.live.storage.state import decode_state, encode_state
from memq.audit.minutes import QUEUE, MinuteRow, active_ms
from memq.errors import CorruptDataError
from memq.format.pointer import INTEGER_END
from memq.format.report import ReportSpan
from memq.limits import FORWARD_S_MAX, SEQUENCE_END
from tests.unit.audited import TOPIC
from tests.unit.live_audit_harness import GROUP, MINUTE, PRODUCER, READER, SENDER, LiveAuditHarness, span

LATE_MS = active_ms(TOPIC.settings) + 1
HELD_MS = int(FORWARD_S_MAX * 1000)
LOST = ("lost", "queue", "", PRODUCER)


def test_records_processed_without_faults_are_ok() -> None:
    harness = LiveAuditHarness()
    harness.sent(span("sent", (0, 10)), span("acked", (0, 10)))
    harness.queue((PRODUCER, 0, 10))
    harness.read(span("fetched", (0, 10)), span("processed", (0, 10)), begin="0:0:0", committed="0:1:0")
    harness.settle()
    assert harness.found(grave=False) == []
    assert (harness.word(), harness.word(GROUP)) == ("ok", "ok")
    assert harness.rows[MINUTE].side("").counts == {"sent": 10, "acked": 10, "committed": 10}
    assert harness.rows[MINUTE].side(GROUP).counts == {"fetched": 10, "processed": 10}


def test_pointers_say_how_old_their_records_were_and_copies_are_not_timed() -> None:
    harness = LiveAuditHarness()
    harness.queue((PRODUCER, 0, 10), latency=((4, 7), (9, 3)))
    harness.queue((PRODUCER, 0, 10), latency=((15, 10),))
    harness.queue((PRODUCER, 10, 12), latency=((4, 2),))
    harness.queue((PRODUCER, 12, 14))  # as a restore makes them
    harness.settle()
    assert harness.rows[MINUTE].side("").latency == {"committed": {4: 9, 9: 3}}


def test_records_acked_with_all_without_pointer_are_lost_until_it_comes() -> None:
    harness = LiveAuditHarness()
    harness.sent(span("sent", (0, 30)), span("acked", (0, 30)), last=True)
    harness.queue((PRODUCER, 0, 10))
    harness.queue((PRODUCER, 20, 30))
    harness.settle()
    assert harness.found() == [(*LOST, ((10, 20),))]
    assert harness.word() == "lost"
    harness.settle(LATE_MS)
    assert harness.found() == [(*LOST, ((10, 20),))]
    harness.queue((PRODUCER, 10, 15))
    harness.settle()
    assert harness.found() == [(*LOST, ((15, 20),))]
    harness.queue((PRODUCER, 15, 20))
    harness.settle()
    assert harness.found() == []
    assert [finding.resolved_ms for finding in harness.findings.values()] == [harness.now_ms]
    assert harness.word() == "ok"


def test_records_acked_with_less_are_lost_only_when_no_pointer_can_come() -> None:
    harness = LiveAuditHarness()
    harness.sent(span("sent", (0, 10), level=1), span("acked", (0, 10), level=1))
    harness.sent(span("sent", (0, 5), level=0, producer=6), client=101)
    harness.settle()
    assert (harness.found(), harness.word()) == ([], "in flight")
    harness.settle(LATE_MS)
    assert harness.found() == []
    harness.settle(HELD_MS)
    assert harness.found() == [(*LOST, ((0, 10),)), ("lost", "queue", "", 6, ((0, 5),))]


def test_unacked_records_are_unproven_and_given_up_ones_not_missing() -> None:
    harness = LiveAuditHarness()
    harness.sent(span("sent", (0, 10)), span("gave-up", (5, 10)))
    harness.settle()
    assert harness.word() == "in flight"
    harness.settle(LATE_MS)
    assert harness.found() == []
    assert harness.found(grave=False) == [("unproven hole", "queue", "", PRODUCER, ((0, 5),))]
    assert harness.word() == "unknown"


def test_records_that_an_instance_gave_up_do_not_date_those_of_the_next() -> None:
    harness = LiveAuditHarness()
    harness.sent(span("gave-up", (0, 10)))
    harness.queue((PRODUCER, 0, 10))
    harness.sent(span("sent", (0, 10), minute=MINUTE + 1), client=101)
    harness.settle()
    assert harness.rows[MINUTE + 1].side("")["committed"] == 10


@pytest.mark.parametrize("later", [1, 60], ids=["a minute", "an hour"])
@pytest.mark.parametrize("gave_up", [(), (span("gave-up", (5, 10)),)], ids=["died", "gave up"])
@pytest.mark.parametrize("order", list(permutations(("before", "after", "reader"))), ids="-".join)
@pytest.mark.parametrize("apart", [False, True], ids=["at once", "one by one"])
def test_a_sequence_that_a_later_instance_uses_again_is_counted_in_the_minute_of_the_record_in_the_queue(
    later: int, gave_up: tuple[ReportSpan, ...], order: tuple[str, ...], apart: bool
) -> None:
    harness = LiveAuditHarness()
    then = MINUTE + later
    reports: dict[str, tuple[Callable[[], None], ...]] = {
        "before": (lambda: harness.sent(span("sent", (0, 10)), span("acked", (0, 5)), *gave_up),),
        "after": (
            lambda: harness.sent(span("sent", (5, 10), minute=then), client=101),
            lambda: harness.sent(span("acked", (5, 10), minute=then), client=101),
        ),
        "reader": (
            lambda: harness.read(span("processed", (0, 5)), begin="0:0:0", committed="0:1:0"),
            lambda: harness.read(span("processed", (5, 10), minute=then), committed="0:2:0"),
        ),
    }
    harness.queue((PRODUCER, 0, 5))
    harness.queue((PRODUCER, 5, 10))
    for report in (each for who in order for each in reports[who]):
        report()
        if apart:
            harness.settle()
    harness.settle()
    assert harness.found(grave=False) == []
    for minute in (MINUTE, then):
        assert (harness.word(minute=minute), harness.word(GROUP, minute)) == ("ok", "ok")
        assert [harness.rows[minute].side("")[name] for name in ("sent", "acked", "committed")] == [5, 5, 5]


@pytest.mark.parametrize("order", list(permutations(("first try", "second try", "reader"))), ids="-".join)
@pytest.mark.parametrize("apart", [False, True], ids=["at once", "one by one"])
def test_the_minute_that_a_reader_names_holds_against_an_ack_of_another_try(
    order: tuple[str, ...], apart: bool
) -> None:
    """The block of the first try is in the queue; the second try has other records, and gets the ack of a copy."""
    harness = LiveAuditHarness()
    reports: dict[str, Callable[[], None]] = {
        "first try": lambda: harness.sent(span("sent", (0, 10))),
        "second try": lambda: harness.sent(
            span("sent", (0, 10), minute=MINUTE + 1), span("acked", (0, 10), minute=MINUTE + 1), client=101
        ),
        "reader": lambda: harness.read(span("processed", (0, 10)), begin="0:0:0", committed="0:1:0"),
    }
    harness.queue((PRODUCER, 0, 10))
    for each in order:
        reports[each]()
        if apart:
            harness.settle()
    harness.settle()
    assert nonzero(harness, MINUTE) == {"sent": 10, "acked": 10, "committed": 10}
    assert nonzero(harness, MINUTE + 1) == {}
    assert (harness.word(), harness.word(GROUP), harness.word(minute=MINUTE + 1)) == ("ok", "ok", "ok")


@pytest.mark.parametrize("apart", [False, True], ids=["at once", "one by one"])
def test_without_a_reader_the_last_ack_names_the_minute(apart: bool) -> None:
    harness = LiveAuditHarness()
    harness.queue((PRODUCER, 0, 10))
    for minute in (MINUTE, MINUTE + 1):
        harness.sent(span("sent", (0, 10), minute=minute), span("acked", (0, 10), minute=minute), client=minute)
        if apart:
            harness.settle()
    harness.settle()
    assert nonzero(harness, MINUTE) == {}
    assert nonzero(harness, MINUTE + 1) == {"sent": 10, "acked": 10, "committed": 10}


def test_a_guessed_minute_takes_one_entry_however_many_acks_confirm_or_move_it() -> None:
    harness = LiveAuditHarness()
    harness.queue((PRODUCER, 0, 1_000))
    for minute in (MINUTE, MINUTE + 1, MINUTE + 1):
        for first in range(0, 1_000, 10):
            harness.sent(span("acked", (first, first + 10), minute=minute))
        harness.settle()
    (stream,) = harness.audit.state.streams.values()
    assert stream.guessed == [(0, 1_000, MINUTE + 1, False)]
    for first in range(0, 1_000, 20):
        harness.read(span("processed", (first, first + 10), minute=MINUTE + 1))
    harness.settle()
    (stream,) = harness.audit.state.streams.values()
    assert sum(next_ - first for first, next_, _, _ in stream.guessed) == 500


def test_guessed_minutes_that_alternate_are_bounded() -> None:
    harness = LiveAuditHarness()
    ends = 2 * PIECES_MAX
    harness.queue((PRODUCER, 0, ends))
    for odd in (0, 1):
        pieces = [(first, first + 1) for first in range(odd, ends, 2)]
        for at in range(0, len(pieces), 1_024):  # a report has 64 KiB at most
            harness.sent(span("acked", *pieces[at : at + 1_024], minute=MINUTE + odd))
    harness.settle()
    (stream,) = harness.audit.state.streams.values()
    assert len(stream.guessed) == PIECES_MAX
    assert [harness.rows[minute].side("")["committed"] for minute in (MINUTE, MINUTE + 1)] == [PIECES_MAX] * 2


def nonzero(harness: LiveAuditHarness, minute: int) -> dict[str, int]:
    """Return the counts of the queue's side of a minute that are not 0."""
    counts = harness.rows[minute].side("").counts if minute in harness.rows else {}
    return {name: records for name, records in counts.items() if records}


def test_records_of_a_dead_instance_resent_an_hour_later_leave_the_flight() -> None:
    harness = LiveAuditHarness()
    harness.sent(span("sent", (0, 10)), span("acked", (0, 5)), last=True)
    harness.queue((PRODUCER, 0, 5))
    harness.settle(LATE_MS)
    assert harness.word() == "unknown"
    harness.settle(3_600_000)
    for stage in ("sent", "acked"):
        harness.sent(span(stage, (5, 10), minute=MINUTE + 60), client=101)
        if stage == "sent":
            harness.queue((PRODUCER, 5, 10))
        harness.settle()
    assert (harness.word(), harness.word(minute=MINUTE + 60)) == ("ok", "ok")
    assert [harness.rows[minute].side("")["committed"] for minute in (MINUTE, MINUTE + 60)] == [5, 5]


def test_a_hole_below_the_reported_end_of_a_producer_is_lost_when_no_late_pointer_can_land() -> None:
    harness = LiveAuditHarness()
    harness.sent(span("sent", (0, 20)), span("acked", (0, 10)))
    harness.queue((PRODUCER, 0, 10))
    harness.end(20, (15, 20))
    harness.settle()
    assert harness.found() == []
    harness.settle(LATE_MS)
    assert harness.found() == [(*LOST, ((10, 15),))]


def test_a_hole_below_an_end_waits_for_forwarding_where_an_ack_with_1_was_not_heard() -> None:
    harness = LiveAuditHarness()
    harness.sent(span("sent", (0, 20), level=1), span("acked", (0, 10), level=1))
    harness.queue((PRODUCER, 0, 10))
    harness.end(20, (15, 20))
    harness.settle(LATE_MS)
    assert harness.found() == []
    harness.settle(HELD_MS)
    assert harness.found() == [(*LOST, ((10, 15),))]


def test_a_hole_below_an_end_waits_for_forwarding_if_no_report_has_the_level_and_stays_lost() -> None:
    harness = LiveAuditHarness()
    harness.queue((PRODUCER, 0, 10))
    harness.end(20, (15, 20))
    harness.settle(LATE_MS)
    assert harness.found() == []
    harness.settle(HELD_MS)
    assert harness.found() == [(*LOST, ((10, 15),))]
    harness.sent(span("sent", (0, 20), level=0))  # the report comes late
    harness.settle()
    assert harness.found() == [(*LOST, ((10, 15),))]
    harness.settle(LATE_MS + HELD_MS)
    assert harness.found() == [(*LOST, ((10, 15),))]


def test_a_copy_is_dropped_and_half_a_copy_is_doubled() -> None:
    harness = LiveAuditHarness()
    harness.queue((PRODUCER, 0, 10))
    harness.queue((PRODUCER, 0, 10), (PRODUCER, 10, 20))
    harness.settle()
    assert harness.found() == []
    assert harness.rows[MINUTE].side("")["copies"] == 10
    harness.queue((PRODUCER, 15, 25))
    harness.settle()
    assert harness.found() == [("doubled", "queue", "", PRODUCER, ((15, 20),))]


def test_blocks_that_the_pointer_skips_are_not_counted() -> None:
    harness = LiveAuditHarness()
    harness.queue((PRODUCER, 0, 10))
    harness.queue((PRODUCER, 0, 10), (PRODUCER, 10, 20), skip=(0,))
    harness.settle(60_001)  # nobody tells their minute: that of the pointer holds
    assert (harness.found(), harness.rows[MINUTE].side("").counts) == ([], {"committed": 20})


def test_records_that_a_member_skipped_are_lost_for_its_group_alone() -> None:
    harness = LiveAuditHarness()
    for first in (0, 10, 20):
        harness.queue((PRODUCER, first, first + 10))
    harness.read(span("processed", (0, 10), (20, 30)), begin="0:0:0", committed="0:3:0")
    harness.read(span("processed", (0, 30)), begin="0:0:0", committed="0:3:0", client=201, group="other")
    harness.settle()
    assert harness.found() == [("lost", "consumer", GROUP, PRODUCER, ((10, 20),))]
    assert (harness.word(GROUP), harness.word("other"), harness.word()) == ("lost", "ok", "ok")


def test_records_that_a_filter_leaves_out_are_passed_and_not_lost() -> None:
    harness = LiveAuditHarness()
    harness.sent(span("sent", (0, 20)), span("acked", (0, 20)))
    harness.queue((PRODUCER, 0, 10))
    harness.queue((PRODUCER, 10, 20))
    harness.read(span("processed", (0, 4)), span("passed", (4, 10)), begin="0:0:0", committed="0:1:0")
    harness.settle()
    assert (harness.found(), harness.word(GROUP)) == ([], "in flight")
    harness.read(span("passed", (10, 20)), committed="0:2:0")
    harness.settle()
    assert (harness.found(), harness.word(GROUP)) == ([], "ok")
    assert harness.rows[MINUTE].side(GROUP).counts == {"processed": 4, "passed": 16}
    harness.read(span("passed", (10, 20)), begin="0:1:0", committed="0:2:0", client=201)  # its first member died
    harness.settle()
    assert (harness.found(), harness.rows[MINUTE].side(GROUP)["passed"]) == ([], 16)


def test_a_record_that_a_filtering_member_neither_passed_nor_processed_is_lost() -> None:
    harness = LiveAuditHarness()
    harness.queue((PRODUCER, 0, 10))
    harness.read(span("passed", (0, 5), (7, 10)), begin="0:0:0", committed="0:1:0")
    harness.settle()
    assert harness.found() == [("lost", "consumer", GROUP, PRODUCER, ((5, 7),))]
    harness.read(span("passed", (5, 7)), committed="0:1:0", client=201)
    harness.settle()
    assert harness.found() == []


def test_the_last_member_may_have_processed_what_the_next_one_did_not() -> None:
    harness = LiveAuditHarness()
    for first in (0, 10, 20):
        harness.queue((PRODUCER, first, first + 10))
    harness.read(span("processed", (10, 30)), begin="0:1:0", committed="0:3:0", client=201)
    harness.settle()
    assert harness.found() == []
    harness.read(span("processed", (0, 10)), begin="0:0:0", committed="0:1:0", last=True)
    harness.settle()
    assert (harness.found(), harness.word(GROUP)) == ([], "ok")


def test_records_processed_twice_are_doubled_unless_the_group_went_back() -> None:
    harness = LiveAuditHarness()
    for first in (0, 10):
        harness.queue((PRODUCER, first, first + 10))
    harness.read(span("processed", (0, 20)), begin="0:0:0", committed="0:2:0")
    harness.settle()
    harness.read(span("processed", (10, 20)), begin="0:1:0", reason="seek", committed="0:2:0")
    harness.settle()
    assert harness.found() == []
    harness.read(span("processed", (5, 10)), committed="0:2:0")
    harness.settle()
    assert harness.found() == [("doubled", "consumer", GROUP, PRODUCER, ((5, 10),))]


def test_work_of_a_member_that_is_heard_after_the_next_one_began_doubles_nothing() -> None:
    harness = LiveAuditHarness()
    for first in (0, 10, 20):
        harness.queue((PRODUCER, first, first + 10))
    harness.read(begin="0:0:0", reason="start")
    harness.read(begin="0:1:0", client=201)  # a commit landed late: the group's position went back from 0:2:0
    harness.settle()
    harness.read(span("processed", (0, 20)), committed="0:2:0")
    harness.settle()
    harness.read(span("processed", (10, 30)), committed="0:3:0", client=201)
    harness.settle()
    assert (harness.found(), harness.word(GROUP)) == ([], "ok")
    harness.read(span("processed", (25, 30)), client=201)
    harness.settle()
    assert harness.found() == [("doubled", "consumer", GROUP, PRODUCER, ((25, 30),))]


def test_records_from_before_the_start_of_a_member_are_doubled() -> None:
    harness = LiveAuditHarness()
    for first in (0, 10):
        harness.queue((PRODUCER, first, first + 10))
    harness.read(begin="0:0:0", reason="start")
    harness.read(begin="0:1:0", client=201)
    harness.settle()
    harness.read(span("processed", (0, 10)), committed="0:1:0")
    harness.read(span("processed", (5, 20)), committed="0:2:0", client=201)
    harness.settle()
    assert harness.found() == [("doubled", "consumer", GROUP, PRODUCER, ((5, 10),))]


def test_a_missing_report_may_have_said_that_its_member_began_again() -> None:
    harness = LiveAuditHarness()
    for first in (0, 10):
        harness.queue((PRODUCER, first, first + 10))
    harness.read(span("processed", (0, 20)), begin="0:0:0", committed="0:2:0")
    harness.read(span("processed", (0, 20)), committed="0:2:0", number=2)
    harness.settle()
    assert harness.found() == []


def test_the_members_that_began_longest_ago_are_forgotten() -> None:
    harness = LiveAuditHarness()
    harness.queue((PRODUCER, 0, 10))
    for client in range(MEMBERS_MAX):
        harness.read(begin="0:0:0", client=1_000 + client)
    harness.read(begin="0:0:0", client=1_000)
    harness.read(begin="0:0:0", client=READER)
    harness.settle()
    members = harness.audit.state.groups[GROUP].members
    assert (len(members), 1_000 in members, 1_001 in members, READER in members) == (MEMBERS_MAX, True, False, True)


def test_a_missing_report_makes_the_minute_unknown_and_holds_nothing_against_its_group() -> None:
    harness = LiveAuditHarness()
    for first in (0, 10, 20):
        harness.queue((PRODUCER, first, first + 10))
    harness.read(span("processed", (0, 10)), begin="0:0:0", committed="0:1:0")
    harness.read(span("processed", (20, 30)), committed="0:3:0", number=2)
    harness.settle()
    assert harness.found() == []
    assert harness.found(grave=False) == [("unproven hole", "consumer", GROUP, PRODUCER, ((10, 20),))]
    assert (harness.word(GROUP), harness.word()) == ("unknown", "ok")


def test_a_missing_report_may_have_been_about_what_a_client_names_later() -> None:
    harness = LiveAuditHarness()
    harness.queue((PRODUCER, 0, 20))
    harness.report(SENDER, "producer", "", None, {"number": 3})  # the first that is heard of it, and it says nothing
    harness.settle()
    assert harness.word() == "ok"
    harness.sent(span("sent", (10, 20)), span("acked", (10, 20)))
    harness.settle()
    assert harness.word() == "unknown"


def test_a_client_that_breaks_its_promise_makes_its_minutes_unknown_until_it_comes_back() -> None:
    harness = LiveAuditHarness()
    harness.sent(span("sent", (0, 10)), span("acked", (0, 10)))
    harness.queue((PRODUCER, 0, 10))
    harness.settle()
    assert harness.word() == "ok"
    harness.settle(60_000)
    assert harness.word() == "unknown"
    harness.sent(span("sent", (10, 20)), span("acked", (10, 20)), since_ms=harness.now_ms - 60_000)
    harness.queue((PRODUCER, 10, 20))
    harness.settle()
    assert harness.word() == "ok"
    harness.sent(last=True)
    harness.settle(3_600_000)
    assert harness.word() == "ok"


def test_a_pointer_that_can_not_be_read_is_reported_and_what_it_named_is_lost() -> None:
    harness = LiveAuditHarness()
    harness.queue((PRODUCER, 0, 10))
    harness.audit.take_unreadable(1, harness.now_ms, CorruptDataError("pointer of 3 bytes can't be read"))
    harness.offset = 2
    harness.sent(span("sent", (0, 20)), span("acked", (0, 20)))
    harness.settle()
    assert harness.found() == [(*LOST, ((10, 20),)), ("unreadable pointer", "queue", "", 0, ())]


def test_a_record_that_the_totals_count_and_no_pointer_shows_is_reported() -> None:
    harness = LiveAuditHarness()
    harness.queue((PRODUCER, 0, 10))
    harness.totals = harness.totals.plus(7, 1)
    harness.queue((PRODUCER, 17, 20))
    harness.settle()
    (finding,) = harness.findings.values()
    assert (finding.kind, finding.records, finding.offset) == (Kind.TOTALS, 7, 1)


def test_a_repeated_report_changes_nothing() -> None:
    harness = LiveAuditHarness()
    harness.queue((PRODUCER, 0, 10))
    harness.read(span("processed", (0, 10)), begin="0:0:0", committed="0:1:0", number=0)
    harness.read(span("processed", (0, 10)), begin="0:0:0", committed="0:1:0", number=0)
    harness.settle()
    assert harness.found() == []
    assert harness.rows[MINUTE].side(GROUP)["processed"] == 10


def test_a_member_whose_report_is_missing_may_have_gone_back() -> None:
    harness = LiveAuditHarness()
    harness.queue((PRODUCER, 0, 20))
    harness.read(span("processed", (0, 20)), begin="0:0:0", committed="0:1:0")
    harness.settle()
    harness.read(span("processed", (0, 20)), committed="0:1:0", number=2)
    harness.settle()
    assert harness.found() == []
    assert harness.word(GROUP) == "unknown"


def test_counts_of_reports_that_claim_all_sequences_can_be_stored() -> None:
    harness = LiveAuditHarness()
    for producer in (5, 6, 7):
        everything = span("sent", (0, SEQUENCE_END), producer=producer)
        harness.sent(msgspec.structs.replace(everything, latency=((3, INTEGER_END - 1),) * 2_000))
    harness.settle()
    row = harness.rows[MINUTE]
    assert decode_state(MinuteRow, encode_state(row)) == row
    assert row.side(QUEUE)["sent"] == INTEGER_END - 1
