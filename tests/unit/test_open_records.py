"""The machine of a listener: floors, due times, keys, bounds."""

from __future__ import annotations

import random
from typing import cast

import pytest

from memq.client.consumer.assigned import Assigned
from memq.client.consumer.batch import Batch, Record, TopicPartition
from memq.client.consumer.fetch.partition_cursor import PartitionCursor
from memq.client.consumer.fetch.ready_batches import ReadyBatch
from memq.client.listener import open_records
from memq.client.listener.open_records import OpenRecords, Work
from memq.client.listener.retry_records import OriginalRecord, RetryNote, retry_headers
from memq.topic import Committed, Position, ReadPartition, TopicSettings, Totals

RETRIES = "g.retry"


class ListedBatch:
    """A batch of records that the test lists."""

    def __init__(self, records: list[Record], first: Position) -> None:
        self.records = records
        self.first = first
        self.pieces: list[object] = []

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> object:
        return iter(self.records)


class Source:
    """One partition: makes batches as a consumer hands them out."""

    def __init__(self, opened: OpenRecords, topic: str = "orders", number: int = 0) -> None:
        cursor = PartitionCursor(ReadPartition(topic, "00" * 16, number), Position(number, 0), window_ms=1_000)
        self.assigned = Assigned(cursor, TopicSettings(), [number])
        self.place = TopicPartition(topic, number)
        self._opened = opened
        self._number = number
        self._offset = 0

    def add(self, *keys: bytes | None, notes: list[RetryNote] | None = None) -> None:
        offset, self._offset = self._offset, self._offset + 1
        records = [
            Record(
                b"%d.%d" % (offset, at),
                key,
                () if notes is None else retry_headers(notes[at], ()),
                0,
                None,
                offset << 24 | at,
                self._number,
            )
            for at, key in enumerate(keys)
        ]
        entry = self.assigned.ledger.hand(Committed(Position(self._number, self._offset), Totals(), 7))
        batch = cast(Batch, ListedBatch(records, Position(self._number, offset)))
        self._opened.add(ReadyBatch(self.assigned, batch, Totals(100 * offset, 0), entry))

    def skip(self) -> None:
        self._offset += 1

    def due(self) -> Committed | None:
        self._opened.settle_floors()
        return self.assigned.ledger.due

    def floor(self) -> Committed | None:
        self._opened.settle_floors()
        return self.assigned.ledger.prefix


def opened(*, ordered: bool = False) -> OpenRecords:
    return OpenRecords(RETRIES, ordered=ordered, ahead=4)


def all_taken(records: OpenRecords, now_ms: int = 0) -> list[Work]:
    return list(iter(lambda: taken(records, now_ms), None))


def taken(records: OpenRecords, now_ms: int = 0) -> Work | None:
    """Take a record; positions with tries are stored at once."""
    while (work := records.take(now_ms)) is None and records.beginning:
        records.begun(records.beginning)
    return work


def values(works: list[Work]) -> list[bytes | None]:
    return [work.record.value for work in works]


def note(due_ms: int, *, topic: str = "orders", attempt: int = 2) -> RetryNote:
    return RetryNote(OriginalRecord(topic, Position(0, 9, 9), 5), attempt, due_ms, "", "ValueError: no")


def test_a_floor_is_the_first_record_that_is_not_complete() -> None:
    records = opened()
    source = Source(records)
    source.add(None, None, None)
    source.add(None)
    first, second, third, last = all_taken(records)
    begun = Committed(Position(0, 0), Totals(), tried=((0, 1),))
    assert source.due() == begun, "the mark of the first position is that of the pointer before"
    records.complete(last)
    records.complete(second)
    assert source.due() == begun
    records.complete(first)
    assert source.floor() == Committed(Position(0, 0, 2), Totals(2, 0), 7), "the third one is open"
    records.complete(third)
    assert source.floor() == Committed(Position(0, 2), Totals(), 7)


def test_the_floor_of_a_partition_whose_first_record_is_open_hides_no_other_floor() -> None:
    records = opened()
    first, second = Source(records), Source(records, number=1)
    for source in (first, second):
        source.add(None, None)
    works = all_taken(records)
    (done,) = (work for work in works if work.record.partition == 1 and work.record.value == b"0.0")
    records.complete(done)
    assert (first.floor(), second.floor()) == (
        Committed(Position(0, 0), Totals()),
        Committed(Position(1, 0, 1), Totals(1, 0), 7),
    )


def test_records_that_are_not_taken_are_above_the_floor() -> None:
    records = opened()
    source = Source(records)
    source.add(None, None)
    work = taken(records, 0)
    assert work is not None
    records.complete(work)
    assert source.floor() == Committed(Position(0, 0, 1), Totals(1, 0), 7)


def test_floors_are_right_in_any_order_of_completion() -> None:
    draw = random.Random(5)
    for _ in range(200):
        records = opened()
        source = Source(records)
        for _ in range(draw.randrange(1, 4)):
            source.add(*[None] * draw.randrange(1, 4))
        left = {work.record.offset: work for work in all_taken(records)}
        end = Position(0, max(left) + (1 << 24) >> 24)
        while left:
            offset = draw.choice(list(left))
            records.complete(left.pop(offset))
            floor = source.floor()
            first = min(left, default=end.offset)
            reached = floor.position.offset if floor is not None else 0
            assert reached <= first
            assert not [each for each in range(reached, first) if each in left]
            if left and first & 0xFFFFFF:
                assert reached == first, "within a batch, the floor is exact"


def test_a_retry_waits_for_its_due_time_and_others_do_not() -> None:
    records = opened()
    retries, source = Source(records, RETRIES), Source(records)
    retries.add(None, None, notes=[note(500), note(300)])
    source.add(None)
    (work,) = all_taken(records)
    assert (work.origin.topic, work.attempt, work.batch.partition.place) == ("orders", 1, source.place)
    assert records.next_due_ms == 300
    assert not all_taken(records, 299)
    (early,) = all_taken(records, 300)
    assert (early.record.value, early.attempt, early.error) == (b"0.1", 2, "ValueError: no")
    assert early.origin == OriginalRecord("orders", Position(0, 9, 9), 5)
    records.complete(early)
    assert retries.floor() is None, "the first retry still waits"
    (late,) = all_taken(records, 500)
    assert late.record.value == b"0.0"


def test_a_record_of_the_retry_topic_without_its_headers_has_a_fault() -> None:
    records = opened()
    Source(records, RETRIES).add(None)
    (work,) = all_taken(records)
    assert "does not begin with the headers" in work.fault


def test_a_key_has_one_record_at_work_in_its_order() -> None:
    records = opened(ordered=True)
    source = Source(records)
    source.add(b"a", b"b", b"a", None, b"a")
    works = all_taken(records)
    assert values(works) == [b"0.0", b"0.1", b"0.3"]
    records.complete(works[1])
    assert not all_taken(records)
    records.complete(works[0])
    (second,) = all_taken(records)
    assert second.record.value == b"0.2"
    records.again(second, due_ms=50, error="no")
    assert not all_taken(records, 49), "the key waits for the record that failed"
    (again,) = all_taken(records, 50)
    assert (again.record.value, again.attempt, again.error) == (b"0.2", 2, "no")
    records.complete(again)
    assert values(all_taken(records)) == [b"0.4"]


def test_records_without_order_do_not_wait_for_their_key() -> None:
    records = opened()
    Source(records).add(b"a", b"a")
    assert values(all_taken(records)) == [b"0.0", b"0.1"]


def test_a_record_of_a_parked_key_is_marked_and_a_letter_that_was_sent_back_is_not() -> None:
    records = opened(ordered=True)
    records.parked["orders", b"a"] = None
    Source(records).add(b"a", b"b")
    assert [work.parked for work in all_taken(records)] == [True, False]
    again = opened(ordered=True)
    again.parked["orders", b"a"] = None
    Source(again, RETRIES).add(b"a", notes=[note(0)._replace(letter="0:3:0")])
    assert [work.parked for work in all_taken(again)] == [False]


def test_a_partition_with_many_kept_records_is_stuck_and_others_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_records, "KEPT_RECORDS_MAX", 2)
    records = opened(ordered=True)
    one, other = Source(records), Source(records, number=1)
    one.add(b"a", b"a", b"a", b"b")
    other.add(b"c")
    works = all_taken(records)
    assert values(works) == [b"0.0", b"0.0"], "the record of key b is behind the kept ones"
    assert records.stuck() == {one.place}
    assert records.wants_more, "what is stuck does not count"
    records.complete(works[0])
    works = all_taken(records)
    assert values(works) == [b"0.1", b"0.3"]
    records.complete(works[0])
    assert values(all_taken(records)) == [b"0.2"]
    assert not records.stuck()


def test_a_partition_with_many_batches_above_its_floor_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_records, "OPEN_BATCHES_MAX", 3)
    records = opened()
    source = Source(records)
    source.add(None)
    slow = taken(records, 0)
    assert slow is not None
    for _ in range(2):
        source.add(None)
        for work in all_taken(records):
            records.complete(work)
    assert records.stuck() == {source.place}
    records.complete(slow)
    assert not records.stuck()
    assert source.floor() == Committed(Position(0, 2), Totals(), 7)


def test_a_partition_that_is_released_gives_nothing_more_and_completes_what_is_at_work() -> None:
    records = opened(ordered=True)
    source, other = Source(records), Source(records, "orders", 1)
    source.add(b"a", b"a", b"x")
    source.add(b"y")
    first = taken(records, 0)
    assert first is not None
    other.add(b"a")
    closed = records.close([source.place])
    assert records.working(closed) == 1
    assert not all_taken(records), "key a is at work in the partition that leaves"
    records.complete(first)
    assert records.working(closed) == 0
    assert source.floor() == Committed(Position(0, 0, 1), Totals(1, 0), 7)
    records.drop([source.place])
    assert values(all_taken(records)) == [b"0.0"]
    assert not records.working(closed)


def test_a_waiting_record_of_a_released_partition_frees_its_key() -> None:
    records = opened(ordered=True)
    source, other = Source(records), Source(records, number=1)
    source.add(b"a")
    other.add(b"a")
    (work,) = all_taken(records)
    records.again(work, 1_000, "no")
    records.close([source.place])
    records.drop([source.place])
    assert values(all_taken(records)) == [b"0.0"]
    assert records.next_due_ms is None


def test_an_attempt_that_ends_after_the_release_is_not_repeated_here() -> None:
    records = opened()
    source = Source(records)
    source.add(None)
    (work,) = all_taken(records)
    records.close([source.place])
    records.again(work, 0, "no")
    assert not all_taken(records, 10)
    assert source.floor() is None


def test_a_partition_that_comes_again_begins_with_nothing() -> None:
    records = opened()
    first = Source(records)
    first.add(None, None)
    (one, _) = all_taken(records)
    second = Source(records)
    second.add(None)
    assert values(all_taken(records)) == [b"0.0"]
    records.complete(one)
    assert first.assigned.ledger.prefix is None, "what belongs to the former grant moves nothing"


def test_a_listener_wants_batches_until_enough_records_are_ahead() -> None:
    records = opened()
    source = Source(records)
    found = [records.wants_more]
    source.add(*[None] * 4)
    found.append(records.wants_more)
    taken(records, 0)
    assert [*found, records.wants_more] == [True, False, True]
    source.add(*[None] * 5)
    assert not records.wants_more
    for _ in range(3):
        taken(records, 0)  # the rest of the first batch
    taken(records, 0)
    assert not records.wants_more, "four of the second batch are ahead"
    taken(records, 0)
    assert records.wants_more


def begun_before(records: OpenRecords, *tried: tuple[int, int], at: int = 0) -> Source:
    """Return a partition whose stored position names tried records."""
    source = Source(records)
    source.assigned.ledger.stored(Committed(Position(0, at), tried=tried))
    return source


def test_the_first_record_of_an_assignment_waits_until_the_position_counts_its_try() -> None:
    records = opened(ordered=True)
    source = Source(records)
    source.add(b"a", b"b")
    assert records.take(0) is None
    (first,) = records.beginning
    assert (source.due(), records.working()) == (Committed(Position(0, 0), tried=((0, 1),)), 0)
    assert records.take(0) is None, "no other record of the partition may end the process before that"
    records.begun([first])
    assert values(all_taken(records)) == [b"0.0", b"0.1"]
    records.begun([first])
    assert (records.take(0), first.attempt, first.unanswered) == (None, 1, False), "once"
    records.complete(first)
    assert source.due() == Committed(Position(0, 0, 1), Totals(1, 0), 7), "later records are not counted"


def test_a_record_whose_key_is_free_while_a_try_is_stored_waits_and_then_comes_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(open_records, "KEPT_RECORDS_MAX", 2)
    records = opened(ordered=True)
    retries, source = Source(records, RETRIES), Source(records)
    retries.add(b"a", notes=[note(0)])
    (retry,) = all_taken(records)
    source.add(b"a", b"b")
    assert records.take(0) is None
    records.complete(retry)
    assert records.take(0) is None, "the try of the other record is not stored yet"
    assert records.stuck() == {source.place}, "both count as kept"
    records.begun(records.beginning)
    assert values(all_taken(records)) == [b"0.1", b"0.0"]
    assert not records.stuck()


def test_a_record_that_was_tried_before_is_alone_at_work_with_the_next_number() -> None:
    records = opened()
    source = begun_before(records, (0, 2), (2, 1))
    source.add(None, None, None)
    source.add(None)
    first = taken(records)
    assert first is not None
    assert (first.attempt, first.unanswered, first.error) == (3, True, open_records.NO_ANSWER)
    assert source.due() == Committed(Position(0, 0), tried=((0, 3), (2, 1)))
    assert taken(records) is None, "the others wait for it"
    records.complete(first)
    assert records.take(0) is None
    assert source.due() == Committed(Position(0, 0, 1), Totals(1, 0), 7, tried=((1, 1), (2, 1))), "each is counted now"
    second = taken(records)
    assert second is not None
    assert (second.attempt, second.unanswered) == (1, False)
    records.complete(second)
    third = taken(records)
    assert third is not None
    assert (third.attempt, third.unanswered) == (2, True)


def test_a_record_that_fails_does_not_hold_back_those_that_are_handled_one_by_one() -> None:
    records = opened(ordered=True)
    source = begun_before(records, (0, 1))
    source.add(b"a", b"a", b"b")
    first = taken(records)
    assert first is not None
    records.again(first, 1_000, "no")
    assert (first.attempt, first.error, first.unanswered) == (3, "no", False)
    (other,) = all_taken(records)
    assert other.record.value == b"0.2"
    assert source.due() == Committed(Position(0, 0), tried=((0, 1), (2, 1))), "a try with an answer is taken back"
    assert taken(records, 1_000) is None, "one by one"
    records.complete(other)
    assert all_taken(records, 1_000) == [first]
    assert source.due() == Committed(Position(0, 0), tried=((0, 2),)), "each try is counted"


def test_records_are_handled_at_once_again_after_some_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_records, "CAREFUL_RECORDS", 2)
    records = opened()
    source = begun_before(records, (0, 1))
    source.add(*[None] * 5)
    for expected in (b"0.0", b"0.1"):
        (work,) = all_taken(records)
        assert work.record.value == expected
        records.complete(work)
    assert values(all_taken(records)) == [b"0.2", b"0.3", b"0.4"]
    assert source.due() == Committed(Position(0, 0, 2), Totals(2, 0), 7)


def test_records_of_which_too_many_are_tried_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_records, "TRIED_MAX", 3)
    records = opened()
    source = begun_before(records, (7, 2), (8, 1), (9, 1))
    source.add(None)
    assert records.take(0) is None
    assert source.due() == Committed(Position(0, 0), tried=((0, 1), (7, 2), (9, 1)))


def test_tried_records_before_the_position_are_not_stored_again() -> None:
    records = opened()
    source = begun_before(records, (3, 4), (1 << 24, 2), at=1)
    source.skip()
    source.assigned.ledger.passed(Committed(Position(0, 2)))
    assert source.assigned.ledger.due == Committed(Position(0, 2)), "retention took them"
    source.skip()
    source.add(None)
    work = taken(records)
    assert work is not None
    assert (work.attempt, work.unanswered) == (1, False)


def test_control_pointers_before_a_record_keep_its_tries() -> None:
    records = opened()
    source = begun_before(records, (1 << 24, 4))
    source.assigned.ledger.passed(Committed(Position(0, 1)))
    assert source.due() == Committed(Position(0, 1), tried=((1 << 24, 4),))
    source.skip()
    source.add(None)
    work = taken(records)
    assert work is not None
    assert (work.attempt, source.due()) == (5, Committed(Position(0, 1), tried=((1 << 24, 5),)))


def test_an_orderly_end_of_an_assignment_takes_the_last_try_back() -> None:
    records = opened(ordered=True)
    source = begun_before(records, (0, 2))
    source.add(b"a", b"b")
    work = taken(records)
    assert work is not None
    assert source.due() == Committed(Position(0, 0), tried=((0, 3),))
    records.close_all()
    assert source.due() is None, "as it was stored"
    records.complete(work)
    assert source.due() == Committed(Position(0, 0, 1), Totals(1, 0), 7), "the handler has answered meanwhile"


def test_the_try_of_a_first_record_that_fails_stays_until_it_is_complete() -> None:
    records = opened(ordered=True)
    source = Source(records)
    source.add(b"a", b"b")
    first, second = all_taken(records)
    records.again(first, 1_000, "no")
    assert source.due() == Committed(Position(0, 0), tried=((0, 1),)), "the second one may end the process"
    assert all_taken(records, 1_000) == [first]
    records.again(first, 2_000, "no")
    records.close_all()
    assert source.due() == Committed(Position(0, 0)), "an orderly end"
    records.complete(second)


def test_an_orderly_end_takes_no_try_back_that_had_its_answer() -> None:
    records = opened(ordered=True)
    source = begun_before(records, (0, 2))
    source.add(b"a")
    work = taken(records)
    assert work is not None
    records.again(work, 1_000, "no")
    records.close_all()
    assert source.due() is None


def test_a_record_whose_try_is_not_stored_frees_its_key_when_its_partition_is_released() -> None:
    records = opened(ordered=True)
    first, second = Source(records), Source(records, number=1)
    first.add(b"a")
    assert records.take(0) is None
    second.add(b"a")
    assert records.take(0) is None
    left = records.beginning
    records.close([first.place])
    records.begun(left)
    (work,) = all_taken(records)
    assert work.record.partition == 1
