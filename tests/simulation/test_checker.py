"""The checker: a correct log passes, and each broken promise is found by its own message."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from memq.format.compaction_manifest import CompactionManifest, encode_compaction_manifest
from memq.format.key import compaction_manifest_key
from memq.format.pointer import Location
from memq.simulation.world.node import EPOCH_MS
from memq.topic import Position, TopicSettings
from tests.simulation.checked_log import PARTITION, TOPIC_ID, WINDOW_MS, Log, block
from tests.simulation.checker import Checker
from tests.simulation.reader import delivered_twice
from tests.simulation.retention_rules import RetentionRules


def test_a_good_log_passes() -> None:
    log = Log()
    log.open(1)
    first, second, third = log.send(0, 1, 2), log.send(3), log.send(4, 5)
    log.batch([block(0, first), block(3, second)], 0)
    log.ack(first)
    log.open(2)
    log.batch([block(3, second), block(4, third)], 0, epoch=2, skip=(0,))  # sent again after a failover
    log.ack(second + third)
    log.batch([block(4, third)], 1, epoch=2, skip=(0,))
    log.batch([block(0, first), block(3, second)], 0, epoch=1)  # the first pointer again, landing late
    consume(log, "c", first + second + third)
    assert log.checker.groups.is_drained("g")
    assert log.finish() == []
    assert (log.checker.acked, log.checker.groups.consumed) == (6, 6)


def consume(log: Log, consumer: str, values: Sequence[bytes]) -> None:
    """Consume records where they lie."""
    for value in values:
        place = log.checker.records[value].place
        assert place is not None
        record = log.checker.logs[PARTITION].stream[place[1]]
        log.checker.groups.consume(consumer, "g", PARTITION, (record.offset, record.record_index), value)


def ack_before_pointer(log: Log) -> None:
    log.ack(log.send(0))


def pointer_before_object(log: Log) -> None:
    log.batch([block(0, log.send(0))], 0, store=False)


def ack_twice(log: Log) -> None:
    values = log.send(0)
    log.batch([block(0, values)], 0)
    log.ack(values + values)


def ack_that_comes_late(log: Log) -> None:
    log.checker.ack_s_max = 3.0
    values = log.send(0)
    log.batch([block(0, values)], 0)
    log.world.now += 3.1
    log.ack(values)


def give_up_after_ack(log: Log) -> None:
    values = log.send(0)
    log.batch([block(0, values)], 0)
    log.ack(values)
    log.checker.give_up(values[0])


def damage(log: Log) -> None:
    sealed = block(0, log.send(0))
    log.batch([replace(sealed, data=bytes(sealed.data[:-1]) + b"!")], 0)


def garbage(log: Log) -> None:
    log.batch([block(0, [b"nobody sent this"])], 0)


def other_partition(log: Log) -> None:
    log.batch([block(0, log.send(0), partition=3)], 0)


def same_record_in_other_sequences(log: Log) -> None:
    values = log.send(0)
    log.batch([block(0, values), block(1, values)], 0)


def block_with_other_bounds(log: Log) -> None:
    values = log.send(0, 1, 2)
    log.batch([block(0, values[:2])], 0)
    log.batch([block(1, values[1:])], 1)


def other_bytes_under_one_identity(log: Log) -> None:
    values = log.send(0, 1)
    log.open(2)
    log.batch([block(0, values)], 0, epoch=2)
    log.batch([block(0, values[::-1])], 0)  # a late pointer of the owner before


def batches_out_of_order(log: Log) -> None:
    log.batch([block(0, log.send(0))], 1)


def epoch_opened_twice(log: Log) -> None:
    log.open(1, broker="other")


def epoch_not_opened(log: Log) -> None:
    log.batch([block(0, log.send(0))], 0, epoch=2)


def epoch_of_another_broker(log: Log) -> None:
    log.publish(log.pointer(kind="closed", epoch=1, broker="other"), 1)


def copy_that_the_owner_knew(log: Log) -> None:
    values = log.send(0)
    log.batch([block(0, values)], 0)
    log.batch([block(0, values)], 1)


def copy_that_the_tail_showed(log: Log) -> None:
    values = log.send(0)
    log.batch([block(0, values)], 0)
    log.open(2)
    log.batch([block(0, values)], 0, epoch=2)


def copy_that_the_owner_read(log: Log) -> None:
    log.open(2)
    values = log.send(0)
    log.batch([block(0, values)], 0, epoch=1)  # late
    log.batch([block(0, values)], 0, epoch=2, read_to=3)


def false_proof(log: Log) -> None:
    log.open(2)
    log.batch([block(0, log.send(0))], 0, epoch=1, time_ms=1_000)


def queue_takes_a_lower_epoch(log: Log) -> None:
    log.checker = Checker(log.objects, WINDOW_MS, log.findings.append, log.now, refuse="epoch")
    log.open(2)
    log.batch([block(0, log.send(0))], 0, epoch=1)


def acked_out_of_order(log: Log) -> None:
    values = log.send(0, 1)
    log.batch([block(1, values[1:]), block(0, values[:1])], 0)
    log.ack(values)


def named_object_deleted(log: Log) -> None:
    log.batch([block(0, log.send(0))], 0)
    log.checker.deleted("1-0")


def held_object_deleted(log: Log) -> None:
    log.checker.is_held = {"held"}.__contains__
    log.checker.deleted("other")
    log.checker.deleted("held")


def ranges_missing(log: Log) -> None:
    sealed = block(0, log.send(0))
    log.objects["k"] = bytes(sealed.data)
    location = Location(store="s", key="k", offset=0, length=len(sealed.data))
    log.publish(log.pointer(kind="data", epoch=1, broker="b", locations=(location,), records=1), 1)


def copy_beyond_the_window(log: Log) -> None:
    values = log.send(0)
    log.batch([block(0, values)], 0)
    log.world.now = 2 * WINDOW_MS / 1000
    log.open(2)
    log.batch([block(1, log.send(1))], 0, epoch=2, time_ms=2 * WINDOW_MS)
    log.batch([block(0, values)], 0, epoch=1, time_ms=2 * WINDOW_MS)  # far too late, but the queue took it


def consumed_wrong_value(log: Log) -> None:
    log.batch([block(0, log.send(0, 1))], 0)
    log.checker.groups.consume("c", "g", PARTITION, (1, 0), b"p 1")


def consumed_with_a_hole(log: Log) -> None:
    values = log.send(0, 1, 2)
    log.batch([block(0, values)], 0)
    consume(log, "c", [values[0], values[2]])


def group_skips_after_a_restart(log: Log) -> None:
    values = log.send(0, 1, 2)
    log.batch([block(0, values)], 0)
    consume(log, "c", values[:1])
    log.checker.fetched("g", PARTITION, Position(0, 1, 2))
    log.checker.groups.assign("c", "g", PARTITION)
    consume(log, "c", values[2:])


def restart_reads_more_again_than_it_must(log: Log) -> None:
    values = log.send(0, 1, 2)
    log.batch([block(0, values)], 0)
    consume(log, "c", values)
    log.checker.fetched("g", PARTITION, Position(0, 1, 2))
    log.checker.groups.assign("c", "g", PARTITION)
    consume(log, "c", values[1:])


def commit_of_more_than_was_iterated(log: Log) -> None:
    values = log.send(0, 1, 2)
    log.batch([block(0, values)], 0)
    consume(log, "c", values[:2])
    log.checker.committed("g", PARTITION, Position(0, 2))


def paused_and_consumed(log: Log) -> None:
    values = log.send(0, 1)
    log.batch([block(0, values)], 0)
    consume(log, "c", values[:1])
    log.checker.groups.pause("c", PARTITION, paused=True)
    consume(log, "c", values[1:])


def sought_and_missed(log: Log) -> None:
    values = log.send(0, 1)
    log.batch([block(0, values)], 0)
    consume(log, "c", values)
    log.checker.groups.seek("c", PARTITION, (1, 0))
    consume(log, "c", values[1:])


def retained_and_not_told(log: Log) -> None:
    values = log.send(0, 1, 2)
    for number, value in enumerate(values):
        log.batch([block(number, [value])], number)
    consume(log, "c", values[:1])
    log.checker.logs[PARTITION].leave_queue(3)
    log.checker.groups.consume("c", "g", PARTITION, (3, 0), values[2])


def held_and_lost(log: Log) -> None:
    log.checker.ack_held(log.send(0)[0])


def taken_too_young(log: Log) -> None:
    log.checker.retention = RetentionRules(TopicSettings(), 0)
    log.batch([block(0, log.send(0))], 0, time_ms=EPOCH_MS)
    log.batch([block(1, log.send(1))], 1, time_ms=EPOCH_MS)
    log.checker.trimmed(PARTITION, 2)


def last_pointer_taken(log: Log) -> None:
    log.checker.retention = RetentionRules(TopicSettings(), 0)
    log.batch([block(0, log.send(0))], 0)
    log.checker.trimmed(PARTITION, 2)


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (ack_before_pointer, "is acked, but no pointer"),
        (pointer_before_object, "pointer before object"),
        (ack_twice, "is acked twice"),
        (ack_that_comes_late, "waited 3.1 s for its ack"),
        (give_up_after_ack, "is given up after it was acked"),
        (damage, "checksum"),
        (garbage, "was never sent"),
        (other_partition, "belongs to another partition"),
        (same_record_in_other_sequences, "is delivered twice"),
        (block_with_other_bounds, "was seen in part"),
        (other_bytes_under_one_identity, "another one there, up to 2"),
        (batches_out_of_order, "comes before 0"),
        (epoch_opened_twice, "is opened by b and again by other, process 0"),
        (epoch_of_another_broker, "which it has not opened"),
        (copy_that_the_owner_knew, "which knew it"),
        (copy_that_the_tail_showed, "which knew it"),
        (copy_that_the_owner_read, "which had read it"),
        (false_proof, "is proved 1000 ms after epoch 2 was opened"),
        (queue_takes_a_lower_epoch, "the queue took epoch 1 after 2"),
        (epoch_not_opened, "which it has not opened"),
        (acked_out_of_order, "comes after number 1"),
        (named_object_deleted, "pointers name it"),
        (held_object_deleted, "'held' is deleted while a state log names it"),
        (ranges_missing, "is not in its ranges"),
        (copy_beyond_the_window, "resumed at"),
        (consumed_wrong_value, "not what lies there"),
        (consumed_with_a_hole, "the next one is 1"),
        (group_skips_after_a_restart, "skips records 1 to 2"),
        (restart_reads_more_again_than_it_must, "begins with record 1"),
        (commit_of_more_than_was_iterated, "it has iterated 2"),
        (paused_and_consumed, "which it has paused"),
        (sought_and_missed, "the next one is 0"),
        (retained_and_not_told, "delivers record 2 of ReadPartition"),
        (held_and_lost, "is acked with 1, and lost"),
        (taken_too_young, "must stay"),
        (last_pointer_taken, "the last pointer of write partition 0"),
    ],
)
def test_each_broken_promise_is_found(break_it: Callable[[Log], None], words: str) -> None:
    log = Log()
    log.open(1)
    break_it(log)
    findings = log.finish()
    assert any(words in finding for finding in findings), findings


def test_a_wait_counts_from_the_last_block_that_a_broker_sent_back() -> None:
    log, throttles = Log(), 0
    log.open(1)
    log.checker.ack_s_max, log.checker.throttles = 3.0, lambda: throttles
    for first in (0, 10):
        values = log.send(first)
        log.batch([block(first, values)], first)
        log.world.now += 3.1
        throttles += 1 - first // 10
        log.ack(values)
    assert [finding for finding in log.finish() if "waited" in finding] != [], "the second one met no throttle"
    assert len([finding for finding in log.finish() if "waited" in finding]) == 1


def test_a_restart_may_deliver_again_from_what_was_reached() -> None:
    log = Log()
    log.open(1)
    values = log.send(0, 1, 2)
    log.batch([block(0, values)], 0)
    consume(log, "c", values[:2])
    assert not log.checker.groups.is_drained("g")
    log.checker.fetched("g", PARTITION, None)
    log.checker.groups.assign("c", "g", PARTITION)
    consume(log, "c", values)
    assert log.checker.groups.is_drained("g")
    assert log.finish() == []


def test_an_object_without_a_pointer_is_left() -> None:
    log = Log()
    log.objects["k"] = b""
    assert log.checker.left_objects(log.world.now - 1.0) == ["k"]
    log.checker.stored("k")  # its put hung until now
    log.world.run(4.0)
    assert log.checker.left_objects(log.world.now - 5.0) == []
    log.world.run(2.0)
    assert log.checker.left_objects(log.world.now - 5.0) == ["k"]


def test_trimmed_objects_may_go() -> None:
    log = Log()
    log.open(1)
    log.batch([block(0, log.send(0))], 0)
    log.checker.trimmed(PARTITION, 2)
    log.checker.deleted("1-0")
    assert log.findings == []


def test_a_manifest_under_a_number_that_was_swept_gets_the_time_of_a_sweep_from_its_put_on() -> None:
    log = Log()
    log.open(1)
    for number in (1, 2, 3, 2):  # the last one by a writer that slept: retention knew number 1 from before
        body = CompactionManifest(
            number=number, cluster="c", topic="t", topic_id=TOPIC_ID, partition=0, next=0, parts=()
        )
        key = compaction_manifest_key("c", "t", TOPIC_ID, 0, number)
        log.objects[key] = encode_compaction_manifest(body)
        log.world.run(10.0)
        log.checker.stored(key)
        if number == 3:
            for old in (1, 2):  # the sweep
                del log.objects[compaction_manifest_key("c", "t", TOPIC_ID, 0, old)]
    log.world.run(4.0)
    assert log.checker.left_objects(log.world.now - 5.0) == []
    log.world.run(2.0)
    assert ["0000000000000002" in left for left in log.checker.left_objects(log.world.now - 5.0)] == [True]


def held_by_a_killed_owner(log: Log) -> None:
    log.node.kill()


def held_by_a_fenced_owner(log: Log) -> None:
    log.node = log.world.add_node("c", offset_ms=0)
    log.open(2, broker="c")


def held_by_a_fenced_owner_and_the_next_is_killed(log: Log) -> None:
    log.world.now += 1.0
    held_by_a_fenced_owner(log)
    log.node.kill()


def held_by_a_fenced_owner_that_is_killed_later(log: Log) -> None:
    first = log.node
    held_by_a_fenced_owner(log)
    first.kill()


def held_by_an_owner_that_exits(log: Log) -> None:
    log.node.die()


def held_and_closed(log: Log) -> None:
    log.publish(log.pointer(kind="closed", epoch=1, broker="b"), 1)
    log.node.kill()


@pytest.mark.parametrize(
    ("end", "lost"),
    [
        (held_by_a_killed_owner, 0),
        (held_by_a_fenced_owner_that_is_killed_later, 0),
        (held_by_a_fenced_owner, 1),
        (held_by_a_fenced_owner_and_the_next_is_killed, 1),
        (held_by_an_owner_that_exits, 1),
        (held_and_closed, 1),
    ],
)
def test_held_records_are_lost_with_a_killed_owner_only(end: Callable[[Log], None], lost: int) -> None:
    log = Log()
    log.open(1)
    log.checker.ack_held(log.send(0)[0])
    end(log)
    assert len(log.checker.missing()) == lost


def test_a_copy_whose_first_was_taken_by_retention_is_delivered() -> None:
    log = Log()
    log.open(1)
    first, second = log.send(0), log.send(1)
    log.batch([block(0, first)], 0)
    log.open(2)
    log.batch([block(1, second)], 0, epoch=2)
    log.batch([block(0, first)], 0)
    consume(log, "c", first + second)
    log.checker.trimmed(PARTITION, 2)
    log.checker.groups.consume("c", "g", PARTITION, (4, 0), first[0])
    assert log.finish() == []


def _repeated(log: Log) -> list[bytes]:
    """Land the rows of one task in three orders, of which retention takes the first; return the rows."""
    rows = [b"row 0", b"row 1"]
    for number, row in enumerate(rows):
        log.checker.sent(row.decode(), 0, number, row, keyed=True, repeats=True)
    log.open(1)
    log.batch([block(0, rows, producer=7)], 0)
    log.batch([block(0, rows[::-1], producer=8)], 1)
    log.batch([block(0, rows[1:], producer=9)], 2)
    log.open(2)
    log.batch([block(0, rows[::-1], producer=8)], 1)  # the second pointer again, landing late
    log.checker.trimmed(PARTITION, 2)
    return rows


def test_rows_of_a_task_under_another_identity_are_no_copies_of_rows_that_retention_took() -> None:
    log = Log()
    _repeated(log)
    assert log.finish() == []


def test_a_copy_of_a_row_is_found_whose_own_identity_retention_has_left() -> None:
    log = Log()
    rows = _repeated(log)
    log.checker.groups.consume("c", "g", PARTITION, (5, 1), rows[0])
    assert ["which is not what lies there" in finding for finding in log.findings] == [True]


def test_readers_deliver_what_two_tries_of_a_task_landed_under_one_identity_and_drop_copies() -> None:
    log = Log()
    rows = [b"row 0", b"row 1"]
    for number, row in enumerate(rows):
        log.checker.sent(row.decode(), 0, number, row, keyed=True, repeats=True)
    log.open(1)
    log.open(2)
    log.batch([block(0, rows)], 0, epoch=2)
    log.batch([block(0, rows[::-1])], 0)  # a late pointer of the owner before
    log.batch([block(0, rows, now_ms=5)], 1)  # sealed again: a copy
    log.batch([block(0, rows[::-1])], 2)
    log.ack(rows)
    stream = log.checker.logs[PARTITION].stream
    assert [each.value for each in stream] == [*rows, *rows[::-1]]
    for each in stream:
        log.checker.groups.consume("c", "g", PARTITION, (each.offset, each.record_index), each.value)
    assert log.finish() == []
    entries = log.checker.logs[PARTITION].entries
    assert {source: list(ranges) for source, ranges in delivered_twice(entries).items()} == {(0, 7): [(0, 2)]}


def test_a_reader_that_drops_other_records_of_a_known_identity_is_found() -> None:
    log = Log()
    rows = [b"row 0", b"row 1"]
    for number, row in enumerate(rows):
        log.checker.sent(row.decode(), 0, number, row, keyed=True, repeats=True)
    log.open(1)
    log.batch([block(0, rows)], 0)
    log.open(2)
    log.batch([block(0, rows[::-1])], 0, epoch=2)
    log.batch([block(2, rows)], 1, epoch=2)
    consume(log, "c", rows)
    log.checker.groups.consume("c", "g", PARTITION, (4, 0), rows[0])
    assert any("the next one is 2" in finding for finding in log.findings), log.findings
