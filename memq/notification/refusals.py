"""Refusals that are the same, in the same words, for every queue of this package."""

from __future__ import annotations

from memq.errors import EpochFencedError, InvalidRequestError, NotFoundError, QueueError, TooLargeError
from memq.limits import POINTER_BYTES_MAX
from memq.notification import Publication, Span
from memq.topic import Committed, ReadPartition

OFFSET_END = 1 << 39  # pointer offset << 24 | record index fits an int64
RECORD_INDEX_END = 1 << 24
TIME_MS_END = 1 << 53  # JSON's exact integers
EPOCH_END = 1 << 32
TOTAL_END = 1 << 63


def missing_partition(partition: ReadPartition) -> NotFoundError:
    """Return the error for a read partition that the queue does not hold."""
    return NotFoundError(f"read partition {partition.partition} of topic '{partition.topic}' is not in the queue")


def checked_span(partition: ReadPartition, begin: int, end: int) -> Span:
    """Return the span, when it can be one. Raises: QueueError."""
    if not 0 <= begin <= end:
        raise QueueError(
            f"read partition {partition.partition} of topic '{partition.topic}' begins at {begin} and ends at {end}, "
            "which can't be",
            hint="the request is tried again; if that stays, check the notification queue",
        )
    return Span(begin, end)


def check_publication(publication: Publication) -> None:
    """Refuse a pointer that is empty, as a lost one is, or too large, and numbers that no queue can hold."""
    if not publication.body:
        raise InvalidRequestError("a pointer of 0 bytes", hint="publish what encode_pointer returns")
    if len(publication.body) > POINTER_BYTES_MAX:
        raise TooLargeError(f"pointer of {len(publication.body)} bytes, {POINTER_BYTES_MAX} are allowed")
    if not (0 <= publication.epoch < EPOCH_END and 0 <= publication.time_ms < TIME_MS_END):
        raise InvalidRequestError(f"epoch {publication.epoch} or queue time {publication.time_ms} is out of bounds")


def check_epoch(publication: Publication, highest: int) -> None:
    """Refuse a publication of an epoch below the highest that the queue holds of its write partition."""
    if publication.epoch < highest:
        raise EpochFencedError(
            f"epoch {publication.epoch} of partition {publication.write_partition} of topic "
            f"'{publication.partition.topic}' is over: the queue holds epoch {highest}"
        )


def check_position(partition: ReadPartition, committed: Committed) -> None:
    """Refuse a position of another partition, or numbers that no position has."""
    position, totals = committed.position, committed.totals
    if position.read_partition != partition.partition:
        raise InvalidRequestError(f"position {position} is not one of read partition {partition.partition}")
    if not (0 <= position.pointer_offset < OFFSET_END and 0 <= position.record_index < RECORD_INDEX_END):
        raise InvalidRequestError(f"position {position} is out of bounds")
    if not (0 <= totals.records < TOTAL_END and 0 <= totals.bytes < TOTAL_END):
        raise InvalidRequestError(f"totals {totals.records} and {totals.bytes} at {position} are out of bounds")
