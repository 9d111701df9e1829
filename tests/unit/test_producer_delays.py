"""When a delayed record is due, and which delays are refused."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import click
import pytest

from memq.cli.options import delay_of
from memq.client.producer.delayed import DeliverAfter, DeliverAt, due_ms_of, due_times_of
from memq.errors import InvalidRequestError, InvalidSettingError
from memq.limits import DELAY_MS_MAX

NOW_MS = 1_700_000_000_000
YEAR_2029_MS = 1_870_000_000_000


@pytest.mark.parametrize(
    ("at", "after", "due_ms"),
    [
        (None, 0, NOW_MS),
        (None, 1.5, NOW_MS + 1_500),
        (None, 0.0001, NOW_MS + 1),  # never early
        (None, timedelta(minutes=5), NOW_MS + 300_000),
        (None, DELAY_MS_MAX / 1_000, NOW_MS + DELAY_MS_MAX),
        (NOW_MS + 7, None, NOW_MS + 7),
        (NOW_MS + 0.2, None, NOW_MS + 1),
        (-5, None, 1),
        (999_999_999, None, 999_999_999),
        (100_000_000_000, None, 100_000_000_000),
        (datetime(2023, 11, 14, 22, 13, 20, 500_100, tzinfo=UTC), None, NOW_MS + 501),
        (datetime(2023, 11, 15, 0, 13, 21, tzinfo=timezone(timedelta(hours=2))), None, NOW_MS + 1_000),
    ],
)
def test_a_delay_gives_the_time_at_which_the_record_is_due(at: DeliverAt, after: DeliverAfter, due_ms: int) -> None:
    assert due_ms_of(at, after, NOW_MS) == due_ms


@pytest.mark.parametrize(
    ("at", "after", "text"),
    [
        (1, 1, "exclude each other"),
        (None, -0.001, "is negative"),
        (None, timedelta(seconds=-1), "is negative"),
        (None, DELAY_MS_MAX / 1_000 + 86_400, "a delay of 367.0 days is over the limit of 366 days"),
        (NOW_MS + DELAY_MS_MAX + 1, None, "over the limit of 366 days"),
        (datetime(2030, 1, 1), None, "no time zone"),  # noqa: DTZ001
        (NOW_MS // 1_000 + 60, None, "is a time before 1974"),  # seconds
        (1_000_000_000, None, "is a time before 1974"),
        (99_999_999_999, None, "is a time before 1974"),
        (None, float("inf"), "is no time"),
        (float("nan"), None, "is no time"),
    ],
)
def test_a_delay_that_is_not_allowed_is_refused(at: DeliverAt, after: DeliverAfter, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=text):
        due_ms_of(at, after, NOW_MS)


@pytest.mark.parametrize("value", ["5m", True, [1]])
def test_a_delay_of_another_type_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="deliver_after must be seconds or timedelta"):
        due_ms_of(None, value, NOW_MS)
    with pytest.raises(TypeError, match="deliver_at must be Unix ms or datetime"):
        due_ms_of(value, None, NOW_MS)


@pytest.mark.parametrize(
    ("at", "after", "due_ms"),
    [
        (None, 2, [NOW_MS + 2_000] * 3),
        (None, [1, timedelta(seconds=2), 0], [NOW_MS + 1_000, NOW_MS + 2_000, NOW_MS]),
        (NOW_MS + 5, None, [NOW_MS + 5] * 3),
        ((NOW_MS + 5, NOW_MS + 6, NOW_MS + 7), None, [NOW_MS + 5, NOW_MS + 6, NOW_MS + 7]),
    ],
)
def test_many_records_have_one_time_or_a_column(at: Any, after: Any, due_ms: list[int]) -> None:
    assert due_times_of(at, after, 3, NOW_MS) == due_ms


@pytest.mark.parametrize(
    ("at", "after", "error", "text"),
    [
        (None, [1, 2], InvalidRequestError, "2 times in deliver_after for 3 values"),
        ([NOW_MS] * 4, None, InvalidRequestError, "4 times in deliver_at for 3 values"),
        ([NOW_MS] * 3, [1] * 3, InvalidRequestError, "exclude each other"),
        (None, [1, -1, 1], InvalidRequestError, "is negative"),
        (None, [1, None, 1], TypeError, "deliver_at must be"),
        (None, "123", TypeError, "deliver_after must be a time or a sequence of times, not str"),
        (b"123", None, TypeError, "deliver_at must be a time or a sequence of times, not bytes"),
    ],
)
def test_times_of_many_records_are_checked(at: Any, after: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        due_times_of(at, after, 3, NOW_MS)


def test_options_of_a_delay_become_arguments_of_send() -> None:
    assert delay_of(None, None, NOW_MS) == {}
    assert delay_of(None, "5m", NOW_MS) == {"deliver_after": timedelta(minutes=5)}
    at = {"deliver_at": datetime(2030, 1, 31, 8, tzinfo=UTC)}
    assert delay_of("2030-01-31T08:00:00Z", None, YEAR_2029_MS) == delay_of("@1896076800000", None, YEAR_2029_MS) == at
    for delay, text in (("5", "is not a time"), ("-250ms", "is negative"), ("367d", "is over the limit of 366 days")):
        with pytest.raises(InvalidSettingError, match=f"--deliver-after '{delay}' {text}"):
            delay_of(None, delay, NOW_MS)
    with pytest.raises(InvalidSettingError, match="--deliver-at '2030-01-31T08:00:00Z' is over the limit"):
        delay_of("2030-01-31T08:00:00Z", None, YEAR_2029_MS - 86_400_000 * 366)
    for at_text in ("tomorrow", "-1h"):
        with pytest.raises(InvalidSettingError, match=f"bad time '{at_text}'") as caught:
            delay_of(at_text, None, NOW_MS)
        assert "--deliver-at" in caught.value.hint
    with pytest.raises(click.UsageError):
        delay_of("2030-01-31", "5m", NOW_MS)
