"""Parses `consume -o` and `group reset --to`: from text to a place in a topic."""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass

from memq.errors import InvalidRequestError, InvalidSettingError
from memq.settings import parse_time_ms
from memq.topic import Position

_PLACES = "@2025-01-31T08:00:00Z, @1738310400000, @-1h or 0:17:3"
_START_HINT = f"write beginning, end, stored, -100, {_PLACES}"
_PLACE_HINT = f"write beginning, end, {_PLACES}"


@dataclass(frozen=True, slots=True)
class LastRecords:
    """The last `records` of each partition."""

    records: int


Place = str | datetime.datetime | Position
Start = Place | LastRecords


def parse_start(text: str, now_ms: int) -> Start:
    """Return `beginning`, `end` or `stored`, LastRecords, a datetime in UTC, or a Position.

    A time is RFC 3339 (without a zone: UTC), epoch milliseconds, or `-1h` before `now_ms`.
    Raises: InvalidSettingError.
    """
    if text == "stored":
        return text
    if re.fullmatch(r"-\d{1,12}", text):
        return LastRecords(int(text[1:]))
    return _parse_place("start", text, now_ms, _START_HINT)


def parse_place(text: str, now_ms: int) -> Place:
    """Return a place for a group: as `parse_start`, but neither `stored` nor `-100`.

    Raises: InvalidSettingError.
    """
    return _parse_place("place", text, now_ms, _PLACE_HINT)


def _parse_place(what: str, text: str, now_ms: int, hint: str) -> Place:
    if text in ("beginning", "end"):
        return text
    if text.startswith("@"):
        return _parse_time(text[1:], now_ms, hint)
    try:
        return Position.parse(text)
    except InvalidRequestError as error:
        raise InvalidSettingError(f"bad {what} '{text[:60]}'", hint=hint) from error


def _parse_time(text: str, now_ms: int, hint: str) -> datetime.datetime:
    try:
        if re.fullmatch(r"\d{1,16}", text):
            return _moment(int(text))
        if text.startswith("-"):
            ago_ms = parse_time_ms(text[1:])
            if ago_ms is not None:
                return _moment(now_ms - ago_ms)
        else:
            moment = datetime.datetime.fromisoformat(text)
            return moment.replace(tzinfo=moment.tzinfo or datetime.UTC).astimezone(datetime.UTC)
    except (ValueError, OverflowError, OSError) as error:
        raise InvalidSettingError(f"bad time '@{text[:60]}'", hint=hint) from error
    raise InvalidSettingError(f"bad time '@{text[:60]}'", hint=hint)


def _moment(time_ms: int) -> datetime.datetime:
    """Return Unix ms as a datetime, exact to the millisecond: floats would round."""
    epoch = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    return epoch + datetime.timedelta(milliseconds=time_ms)
