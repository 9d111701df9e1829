"""Decides which instance of a named producer may write to a partition, and from which sequence on.

Pure.
"""

from __future__ import annotations

from memq.broker.partition.append import ProducerState
from memq.broker.partition.ownership import Ownership
from memq.errors import NotReadyError, OutOfSequenceError, ProducerFencedError, TooLargeError
from memq.limits import NAMED_PRODUCERS_MAX
from memq.topic import CLOCK_ERROR_MS

RETRY_MS_MAX = 5_000


def next_instance(own: Ownership, producer: ProducerState, epoch: int, now_s: float, *, by_age: bool) -> int:
    """Return the epoch of an instance that begins: the one it asks for, for 0 the next.

    `now_s` is monotonic.
    An older instance may have blocks at an earlier owner. Where the queue refuses by age (`by_age`), their pointer may
    land for S after this owner's `opened`; before that, nobody can say where the name is.
    Raises: ProducerFencedError for an older instance; NotReadyError until then; TooLargeError for a name too many.
    """
    if own.named.get(producer.id) is None:
        if len(own.named) >= NAMED_PRODUCERS_MAX:
            raise TooLargeError(
                f"partition {own.partition} remembers {len(own.named)} named producers, more are not allowed",
                hint="a name is forgotten when it was silent for the retention of the topic; use fewer names",
            )
    elif by_age:
        left_s = own.owned_s + own.stale_publish_s + CLOCK_ERROR_MS / 1000 - now_s
        if left_s > 0:
            raise NotReadyError(
                f"what an earlier owner of partition {own.partition} published may arrive for {left_s:.0f} s",
                retry_after_ms=min(RETRY_MS_MAX, int(left_s * 1000) + 1),
            )
    begun = epoch or producer.epoch + 1
    check_instance(producer, begun)
    return begun


def check_instance(producer: ProducerState, epoch: int, sequence: int = 0) -> None:
    """Refuse an instance that a newer one has followed, or one that leaves sequences out.

    Raises: ProducerFencedError, OutOfSequenceError.
    """
    if epoch < producer.epoch:
        raise ProducerFencedError(
            f"instance {epoch} of named producer {producer.id:016x} was followed by instance {producer.epoch}"
        )
    if sequence > producer.next:
        raise OutOfSequenceError(
            f"named producer {producer.id:016x} is at sequence {producer.next}, a stream from {sequence} leaves a gap"
        )
