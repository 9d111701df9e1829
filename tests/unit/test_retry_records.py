"""Records of retry topics and dead-letter topics: names, lanes, headers, and the decision after an attempt."""

from __future__ import annotations

import pytest

import memq
from memq.client.consumer.settings import ConsumerSettings
from memq.client.listener.answers import CAUSE_CHARS_MAX, HandlerAnswer
from memq.client.listener.retry_records import (
    LANES,
    LetterNote,
    OriginalRecord,
    RetryNote,
    lane_of,
    letter_headers,
    letters_topic,
    read_letter,
    read_retry,
    retry_headers,
    retry_topic,
)
from memq.client.listener.settings import (
    RETRY_DELAYS_S,
    Again,
    GivenUp,
    ListenerSettings,
    WhenFailing,
    outcome_of,
)
from memq.errors import InvalidNameError, InvalidRequestError, InvalidSettingError
from memq.topic import Position

ORIGIN = OriginalRecord("orders", Position(3, 17, 4), -5)


def settings(when_failing: WhenFailing = "dead-letter", delays: tuple[float, ...] = (1, 5)) -> ListenerSettings:
    return ListenerSettings(
        consumer=ConsumerSettings(topics=("orders",), group="billing"),
        group="billing",
        ordered=when_failing != "dead-letter",
        when_failing=when_failing,
        retry_delays_s=delays,
    ).check()


def test_a_group_has_two_topics_named_after_it() -> None:
    assert retry_topic("billing") == "billing.retry"
    assert letters_topic("billing") == "billing.dead-letters"
    letters_topic("g" * 236)
    with pytest.raises(InvalidNameError, match="too long"):
        letters_topic("g" * 237)
    with pytest.raises(InvalidNameError):
        retry_topic("_memq")


def test_lanes_are_by_delay() -> None:
    assert [lane_of(delay) for delay in (0, 1, 1.1, 5, 6, 30, 120, 600, 1800, 7200, 7201, 1e9)] == [
        *(0, 0, 1, 1, 2, 2, 3, 4, 5, 6, 7, 7)
    ]
    assert lane_of(1e9, 3) == 2
    assert LANES == 8


def test_a_retry_keeps_the_headers_of_its_record_also_those_with_names_of_memq() -> None:
    note = RetryNote(ORIGIN, 2, 123, "0:1:0", "ValueError: ü\nno")
    own = (("memq-topic", b"x"), ("a", None), ("a", b"\xff"))
    assert read_retry(retry_headers(note, own)) == (note, own)


def test_a_letter_keeps_the_headers_of_its_record_and_the_cause() -> None:
    note = LetterNote(ORIGIN, "parked", 16, 99, "KeyError: 'x'")
    assert read_letter(letter_headers(note, (("a", b"1"),))) == (note, (("a", b"1"),))


def test_a_long_cause_is_cut() -> None:
    note, _ = read_retry(retry_headers(RetryNote(ORIGIN, 2, 1, "", "x" * 5_000), ()))
    assert note.error == "x" * (CAUSE_CHARS_MAX - 1) + "…"


@pytest.mark.parametrize("at", range(7))
def test_headers_that_memq_did_not_write_are_refused(at: int) -> None:
    headers = list(retry_headers(RetryNote(ORIGIN, 2, 1, "", ""), ()))
    with pytest.raises(InvalidRequestError):
        read_retry(tuple(headers[:at] + headers[at + 1 :]))
    if headers[at][0] not in ("memq-topic", "memq-letter", "memq-cause"):
        headers[at] = (headers[at][0], b"x")
        with pytest.raises(InvalidRequestError):
            read_retry(tuple(headers))


def test_a_letter_of_an_unknown_state_is_refused() -> None:
    headers = dict(letter_headers(LetterNote(ORIGIN, "dead", 1, 1, ""), ()))
    with pytest.raises(InvalidRequestError, match="memq-state"):
        read_letter(tuple((headers | {"memq-state": b"lost"}).items()))


def test_the_default_table_has_16_tries_from_1_s_to_2_h() -> None:
    assert len(RETRY_DELAYS_S) + 1 == 16
    assert (RETRY_DELAYS_S[0], RETRY_DELAYS_S[-1]) == (1, 7_200)
    assert list(RETRY_DELAYS_S) == sorted(RETRY_DELAYS_S)


def test_a_record_is_tried_by_the_table_and_then_given_up() -> None:
    error = ValueError("no")
    assert outcome_of(None, 1, settings()) is None
    assert outcome_of(False, 1, settings()) is None, "any other value is done, too"
    assert outcome_of(error, 1, settings()) == Again(1, "ValueError: no")
    assert outcome_of(error, 2, settings()) == Again(5, "ValueError: no")
    assert outcome_of(error, 3, settings()) == GivenUp("dead", "ValueError: no")
    assert outcome_of(error, 1, settings(delays=())) == GivenUp("dead", "ValueError: no")


def test_a_record_that_blocks_its_key_is_tried_for_ever() -> None:
    assert outcome_of(ValueError(), 99, settings("block")) == Again(5, "ValueError")
    assert outcome_of(ValueError(), 99, settings("block", ())) == Again(1.0, "ValueError")


def test_a_record_parks_its_key_after_its_tries() -> None:
    assert outcome_of(ValueError("x"), 3, settings("park")) == GivenUp("parked", "ValueError: x", parks_key=True)


def test_answers_say_what_follows() -> None:
    assert outcome_of(memq.Retry(after=70), 1, settings()) == Again(70, "the handler asked for a retry")
    assert outcome_of(memq.Retry(reason="later"), 2, settings()) == Again(5, "later")
    assert outcome_of(memq.Retry(after=1), 3, settings()) == GivenUp("dead", "the handler asked for a retry")
    assert outcome_of(memq.Retry, 1, settings()) == Again(1, "the handler asked for a retry")
    assert outcome_of(memq.Park(), 1, settings()) == GivenUp("parked", "parked by the handler")
    assert outcome_of(memq.DeadLetter("bad"), 1, settings()) == GivenUp("dead", "bad")
    assert outcome_of(memq.DeadLetter, 1, settings()) == GivenUp("dead", "given up by the handler")


def test_answers_are_checked() -> None:
    for after in (-1, 8 * 86_400, float("nan")):
        with pytest.raises(InvalidSettingError):
            memq.Retry(after=after)
    with pytest.raises(TypeError):
        memq.DeadLetter(5)  # type: ignore[arg-type]
    assert issubclass(memq.Park, HandlerAnswer)
