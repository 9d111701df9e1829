"""The sequences of held records: a sequence says that its record was held. Pure.

It also says when the record is due, or when its transaction began. A held record is delayed, or of a transaction. Its
producer id is of its block or transaction alone, so it never states an end. Sequences from HELD_BEGIN on are of held
records only, and no producer counts so far. So every reader of a block, an index or a pointer knows held records, also
after compaction and restore.

- A delayed record that is due at `due_ms` (Unix ms) has the sequence HELD_BEGIN + due_ms.
- The records of a transaction in a partition follow on TRANSACTIONAL_BEGIN + (Unix minute of its begin << 32).

Delayed records of an earlier release, and those of its transactions, begin at 0: they are as those of a producer that
has not closed.
"""

from __future__ import annotations

from memq.limits import SEQUENCE_END

HELD_BEGIN = 1 << 62
TRANSACTIONAL_BEGIN = HELD_BEGIN + (1 << 61)
_INDEX_BITS = 32
_MINUTE_MAX = (SEQUENCE_END - TRANSACTIONAL_BEGIN >> _INDEX_BITS) - 1
_MINUTE_MS = 60_000


def delayed_sequence(due_ms: int) -> int:
    """Return the sequence of a record that is due at `due_ms` (Unix ms)."""
    return HELD_BEGIN + min(max(due_ms, 0), TRANSACTIONAL_BEGIN - HELD_BEGIN - 1)


def transactional_sequence(begun_ms: int) -> int:
    """Return the first sequence of a transaction that began at `begun_ms` (Unix ms), in a partition."""
    minute = min(max(begun_ms // _MINUTE_MS, 0), _MINUTE_MAX)
    return TRANSACTIONAL_BEGIN + (minute << _INDEX_BITS)


def is_held(sequence: int) -> bool:
    """Whether a record with this sequence was held."""
    return sequence >= HELD_BEGIN


def is_transactional(sequence: int) -> bool:
    """Whether a record with this sequence is of a transaction."""
    return sequence >= TRANSACTIONAL_BEGIN


def due_time_of(sequence: int) -> int:
    """Return when a delayed record is due (Unix ms); 0 for all others."""
    return sequence - HELD_BEGIN if is_held(sequence) and not is_transactional(sequence) else 0


def held_minute(sequence: int) -> int:
    """Return the Unix minute in which a delayed record is due, or its transaction began."""
    if is_transactional(sequence):
        return sequence - TRANSACTIONAL_BEGIN >> _INDEX_BITS
    return (sequence - HELD_BEGIN) // _MINUTE_MS
