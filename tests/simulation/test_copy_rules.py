"""Objects that a sweep keeps, because no pointer in the queue names their records: the checker expects the same."""

from __future__ import annotations

import pytest

from memq.format.key import shared_object_key
from memq.format.object import BatchEntry, BlockEntry, ObjectMeta, ObjectTopic, encode_index
from memq.topic import ReadPartition
from tests.simulation.checked_log import PARTITION, TOPIC_ID, Log, block
from tests.simulation.retry_rules import LETTERS, RETRIES

LOGS = {
    "topic": PARTITION,
    "retries": ReadPartition(f"g{RETRIES}", TOPIC_ID, 0),
    "dead letters": ReadPartition(f"g{LETTERS}", TOPIC_ID, 0),
}


def begun_log(partition: ReadPartition) -> Log:
    """Return a log that has sequence 0 of a producer, in batch 0, in a run with listeners."""
    log = Log(partition=partition)
    log.checker.on_retry_topic = lambda partition, entry, records: None
    log.open(1)
    log.batch([block(0, log.send(0))], 0)
    return log


def orphan(log: Log, sequence: int) -> str:
    """Store a shared object of batch 1 with one record of the producer, which no pointer names; return its key."""
    sealed = block(sequence, [b"p orphan"])
    entries = [BlockEntry.from_header(sealed.header, 0)]
    meta = ObjectMeta(
        cluster="c", broker="b", topics=(ObjectTopic(log.partition.topic, log.partition.topic_id),), created_ms=1
    )
    length = len(sealed.data)
    index = encode_index(meta, [BatchEntry(0, length, 1_000, 1, 1, 0, 1, 0, 1)], entries, length)
    key = shared_object_key("c", "b", 1, 1, 1_000)
    log.objects[key] = bytes(sealed.data) + index
    return key


@pytest.mark.parametrize("name", LOGS)
def test_an_object_whose_records_its_log_lacks_is_kept(name: str) -> None:
    log = begun_log(LOGS[name])
    orphan(log, 1)
    assert log.checker.left_objects(log.world.now) == []


@pytest.mark.parametrize("name", LOGS)
def test_an_object_whose_records_its_log_has_is_left(name: str) -> None:
    log = begun_log(LOGS[name])
    key = orphan(log, 0)
    assert log.checker.left_objects(log.world.now) == [key]


def test_an_object_of_a_topic_without_a_log_is_left() -> None:
    log = begun_log(PARTITION)
    log.partition = ReadPartition("other", "cd" * 16, 0)
    key = orphan(log, 1)
    assert log.checker.left_objects(log.world.now) == [key]
