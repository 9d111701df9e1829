"""Headers of a group's retried records and dead letters, before those of the original record. Pure.

Theory. Both topics belong to one group, so other groups see nothing of them. A retried record keeps value, key, tag and
headers of the original. memq's headers come first, in a fixed order and number: a reader removes exactly these, also if
the original has headers of the same names.

A partition of the retry topic is a *lane* for delays up to a bound: a record with a short delay never waits behind one
with a much longer delay. Within a lane, records come in order of sending. If all their delays are equal, as those of a
table are, this is the order of their due times.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Literal, NamedTuple

from memq.client.listener.answers import cut_cause
from memq.errors import InvalidNameError, InvalidRequestError
from memq.format.blocks.columns import RecordHeaders
from memq.limits import BLOCK_RAW_BYTES_MAX, NAME_CHARS_MAX
from memq.topic import Position, check_group

RETRY_SUFFIX, LETTERS_SUFFIX = ".retry", ".dead-letters"
LANE_S = (1.0, 5.0, 30.0, 120.0, 600.0, 1_800.0, 7_200.0)  # longest delay of each lane; the last lane has no bound
LANES = len(LANE_S) + 1
_DAY_MS = 86_400_000
LetterState = Literal["dead", "parked"]
_STATES: tuple[LetterState, ...] = ("dead", "parked")
_TOPIC, _POSITION, _TIME = "memq-topic", "memq-position", "memq-timestamp-ms"
_ATTEMPT, _DUE, _CAUSE, _LETTER = "memq-attempt", "memq-due-ms", "memq-cause", "memq-letter"
_STATE, _ATTEMPTS, _DIED, _CUT = "memq-state", "memq-attempts", "memq-dead-ms", "memq-cut"
_RETRY_NAMES = (_TOPIC, _POSITION, _TIME, _ATTEMPT, _DUE, _LETTER, _CAUSE)
_LETTER_NAMES = (_TOPIC, _POSITION, _TIME, _STATE, _ATTEMPTS, _DIED, _CUT, _CAUSE)


def retry_topic(group: str) -> str:
    """Return the name of a group's retry topic: `<group>.retry`. Raises: InvalidNameError."""
    return _topic_of_group(group, RETRY_SUFFIX)


def letters_topic(group: str) -> str:
    """Return the name of a group's dead-letter topic, `<group>.dead-letters`. Raises: InvalidNameError."""
    return _topic_of_group(group, LETTERS_SUFFIX)


def _topic_of_group(group: str, suffix: str) -> str:
    name = check_group(group) + suffix
    if len(name) > NAME_CHARS_MAX:
        left = NAME_CHARS_MAX - len(LETTERS_SUFFIX)
        raise InvalidNameError(
            f"group name of {len(group)} characters is too long for its topic '…{suffix}'",
            hint=f"a group with retries has a name of at most {left} characters",
        )
    return name


def retry_topic_settings(name: str) -> dict[str, int | bool | str]:
    """Return the settings of such a topic: records stay until the group of the same name is behind them.

    They stay for 7 days at least, and for 366 days at most.
    """
    return {
        "retention_ms": 7 * _DAY_MS,
        "retention_groups": name,
        "retention_groups_ms_max": 366 * _DAY_MS,
        "record_bytes_max": BLOCK_RAW_BYTES_MAX - 64,  # the original may be as large as its topic allows
    }


def lane_of(delay_s: float, lanes: int = LANES) -> int:
    """Return the partition of the retry topic for a delay; `lanes` is how many partitions it has."""
    return min(bisect_left(LANE_S, delay_s), lanes - 1)


class OriginalRecord(NamedTuple):
    """Topic, position and timestamp (Unix ms) of the original record."""

    topic: str
    position: Position
    timestamp_ms: int


class RetryNote(NamedTuple):
    """Headers of a retried record: its origin, and the coming attempt, not before `due_ms` (Unix ms).

    `error` is the reason of the retry. `letter` is the position of the dead letter that was sent back, "" without one.
    """

    origin: OriginalRecord
    attempt: int
    due_ms: int
    letter: str
    error: str


class LetterNote(NamedTuple):
    """Headers of a dead letter: its origin, the number of handler calls, time (Unix ms), and the cause.

    `cut`: the letter has no value and no original headers, because it would have been too large.
    """

    origin: OriginalRecord
    state: LetterState
    attempts: int
    dead_ms: int
    cause: str
    cut: bool = False


def retry_headers(note: RetryNote, headers: RecordHeaders) -> RecordHeaders:
    """Return the headers of a record of the retry topic."""
    texts = (*_origin_texts(note.origin), str(note.attempt), str(note.due_ms), note.letter, cut_cause(note.error))
    return _joined(_RETRY_NAMES, texts, headers)


def read_retry(headers: RecordHeaders) -> tuple[RetryNote, RecordHeaders]:
    """Return what a record of the retry topic says, and the original headers. Raises: InvalidRequestError."""
    texts, rest = _split(_RETRY_NAMES, headers)
    *origin, attempt, due_ms, letter, error = texts
    note = RetryNote(_origin_of(origin), _number(_ATTEMPT, attempt), _number(_DUE, due_ms), letter, error)
    return note, rest


def letter_headers(note: LetterNote, headers: RecordHeaders) -> RecordHeaders:
    """Return the headers of a dead letter."""
    numbers = (str(note.attempts), str(note.dead_ms), str(int(note.cut)))
    return _joined(_LETTER_NAMES, (*_origin_texts(note.origin), note.state, *numbers, cut_cause(note.cause)), headers)


def read_letter(headers: RecordHeaders) -> tuple[LetterNote, RecordHeaders]:
    """Return what a dead letter says, and the original headers. Raises: InvalidRequestError."""
    texts, rest = _split(_LETTER_NAMES, headers)
    *origin, state, attempts, dead_ms, cut, cause = texts
    if state not in _STATES:
        raise InvalidRequestError(f"header {_STATE} = {state[:60]!a} is not one of {', '.join(_STATES)}")
    known = _STATES[_STATES.index(state)]
    calls, died_ms = _number(_ATTEMPTS, attempts), _number(_DIED, dead_ms)
    return LetterNote(_origin_of(origin), known, calls, died_ms, cause, cut == "1"), rest


def _joined(names: Sequence[str], texts: Sequence[str], headers: RecordHeaders) -> RecordHeaders:
    return (*((name, text.encode()) for name, text in zip(names, texts, strict=True)), *headers)


def _split(names: Sequence[str], headers: RecordHeaders) -> tuple[list[str], RecordHeaders]:
    first, rest = headers[: len(names)], headers[len(names) :]
    if tuple(name for name, _ in first) != tuple(names):
        raise InvalidRequestError(f"the record does not begin with the headers {', '.join(names)}")
    return [(value or b"").decode("utf-8", "replace") for _, value in first], rest


def _origin_texts(origin: OriginalRecord) -> tuple[str, str, str]:
    return origin.topic, str(origin.position), str(origin.timestamp_ms)


def _origin_of(texts: Sequence[str]) -> OriginalRecord:
    topic, position, timestamp_ms = texts
    return OriginalRecord(topic, Position.parse(position), _number(_TIME, timestamp_ms))


def _number(name: str, text: str) -> int:
    digits = text.removeprefix("-") if name == _TIME else text
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 16):
        raise InvalidRequestError(f"header {name} = {text[:60]!a} is not a number")
    return int(text)
