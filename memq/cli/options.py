"""Options shared by several commands: settings from their table, addresses, positions in a topic."""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

import click

from memq.errors import InvalidRequestError, InvalidSettingError, UnreachableError
from memq.limits import DELAY_MS_MAX
from memq.runtime.network import Address, parse_address
from memq.settings import (
    DEFAULTS,
    RULES,
    ClientSettings,
    Settings,
    Value,
    environment_settings,
    parse_time_ms,
    parse_unix_ms,
)
from memq.topic import Position

if TYPE_CHECKING:
    from memq.encryption.encryption import Encryption

Command = TypeVar("Command", bound=Callable[..., Any])

# Letters of settings; they are kcat's.
_LETTERS = {"brokers": "-b", "codec": "-z"}
_METAVARS = {
    "brokers": "ADDR",
    "data": "DIR",
    "spool": "DIR",
    "host": "HOST",
    "advertise": "ADDR",
    "cluster": "NAME",
    "encryption": "KEYS",
    "subjects": "FILE",
    "broker_id": "NAME",
    "zone": "NAME",
    "superusers": "NAMES",
    "broker_principals": "NAMES",
    "store": "URL",
    "queue": "URL",
    "coordinator": "URL",
    "audit_state": "URL",
    "dashboard_host": "HOST",
    "dashboard_tls_cert": "FILE",
    "dashboard_tls_key": "FILE",
    "dashboard_token_file": "FILE",
}
_TIME_UNITS = (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1_000))
_SIZE_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
_POINTS = "@2025-01-31T08:00:00Z, @1738310400000, @-1h or 0:17:3"
_KAFKA_POINTS = {"earliest": "beginning", "latest": "end"}
_START_HINT = f"write beginning, end, stored, -100, an offset as %o prints it, {_POINTS}"
_TARGET_HINT = f"write beginning, end, {_POINTS}"


def settings_options(command: Command) -> Command:
    """Add `--config` and `--profile`."""
    command = click.option("--profile", metavar="NAME", help="Use [profile.NAME] of the settings file.")(command)
    return click.option("--config", metavar="FILE", help="Settings file, instead of ./memq.toml.")(command)


def json_option(command: Command) -> Command:
    """Add `--json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def raw_option(command: Command) -> Command:
    """Add `--raw`: the command prints records to a terminal unchanged."""
    return click.option("--raw", is_flag=True, help="Print control characters to a terminal as they are.")(command)


def yes_option(command: Command) -> Command:
    """Add `--yes`: the command does not ask before an irreversible step."""
    return click.option("--yes", is_flag=True, help="Do not ask; needed without a terminal.")(command)


def setting_options(*names: str) -> Callable[[Command], Command]:
    """Add an option for each of these settings, with `--config` and `--profile`.

    An option that is not given is None.
    """

    def decorate(command: Command) -> Command:
        command = settings_options(command)
        for name in reversed(names):
            command = _setting_option(name)(command)
        return command

    return decorate


def broker_options(command: Command) -> Command:
    """Add the options of a command that asks a broker: `-b`, `--config`, `--profile`."""
    return setting_options("brokers")(command)


def settings_of(config: str | None, profile: str | None, **flags: Value | None) -> Settings:
    """Return the settings with these flags on top; a flag that is None was not given.

    The section `tls` goes to the environment, where all clients of this process and of its children find it.
    """
    settings = environment_settings(flags, config, profile)
    if context := click.get_current_context(silent=True):
        context.find_root().obj = settings  # for the hints of errors
    for name, (value, _) in settings.sections.get("tls", {}).items():
        os.environ[f"MEMQ_TLS_{name.upper()}"] = str(value).lower() if isinstance(value, bool) else str(value)
    return settings


def encryption_of_settings(settings: ClientSettings) -> Encryption | None:
    """Return the keys that the settings name; None without. Raises: InvalidSettingError, KeyProviderError."""
    if not settings.encryption:
        if settings.subjects:
            raise InvalidSettingError(
                "subjects without encryption", hint="pass --encryption, too: its keys open the file of subjects"
            )
        return None
    from memq.encryption.encryption import Encryption

    return Encryption(settings.encryption, subjects=settings.subjects or None, plain_blocks=settings.plain_blocks)


def s3_values(settings: Settings) -> dict[str, object]:
    """Return the settings of the section `s3`, by name."""
    parts = settings.parts()
    values: dict[str, object] = {setting: value for setting, (value, _) in parts.section("s3").items()}
    endpoint = dict(parse_qsl(urlsplit(parts.store).query)).get("endpoint", "")
    if endpoint:  # of the store that this configuration names: brokers may name it, too
        values["trusted_endpoints"] = ",".join(filter(None, (str(values.get("trusted_endpoints", "")), endpoint)))
    return values


def brokers_of(config: str | None, profile: str | None, flags: Mapping[str, Value | None]) -> str:
    """Return the brokers that the options, or the settings behind them, name."""
    return settings_of(config, profile, **flags).client().brokers


def listen_address(text: str, default_port: int) -> Address:
    """Return the address on which a command listens. Raises: InvalidSettingError."""
    try:
        return parse_address(text, default_port)
    except UnreachableError as error:
        raise InvalidSettingError(str(error), hint=error.hint) from error


def _setting_option(name: str) -> Callable[[Command], Command]:
    rule, default = RULES[name], DEFAULTS[name]
    long = "--" + name.replace("_", "-")
    text = f"{rule.doc[:1].upper()}{rule.doc[1:]} (default {shown_default(name)})."
    if isinstance(default, bool):
        return click.option(f"{long}/--no-{long[2:]}", name, default=None, help=text)
    metavar = "|".join(rule.choices) if rule.choices else _metavar(name, default)
    letters = [_LETTERS[name]] if name in _LETTERS else []
    return click.option(*letters, long, name, metavar=metavar, help=text)


def _metavar(name: str, default: Value) -> str:
    if "bytes" in name:
        return "SIZE"
    if name.endswith("_ms"):
        return "TIME"
    return "N" if isinstance(default, int) else _METAVARS[name]


def shown_default(name: str) -> str:
    """Return a default as a person would write it."""
    return shown_value(name, DEFAULTS[name])


def shown_value(name: str, value: Value) -> str:
    """Return a setting's value as a person would write it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int) and "bytes" in name:
        units = [(unit, size) for unit, size in _SIZE_UNITS if value and value % size == 0]
        return f"{value // units[0][1]}{units[0][0]}" if units else str(value)
    if isinstance(value, int) and name.endswith("_ms"):
        units = [(unit, ms) for unit, ms in _TIME_UNITS if value and value % ms == 0]
        unit, length_ms = units[0] if units else ("ms", 1)
        return f"{value // length_ms}{unit}"
    return str(value) or "none"


@dataclass(frozen=True, slots=True)
class LastRecords:
    """The last `records` of each partition."""

    records: int


@dataclass(frozen=True, slots=True)
class RecordOffset:
    """The record at an offset of a partition, as `Record.offset`: `%o` prints it."""

    offset: int


Point = str | datetime.datetime | Position
Start = Point | LastRecords | RecordOffset


def parse_start(text: str, now_ms: int) -> Start:
    """Return `beginning`, `end`, `stored`, LastRecords, a RecordOffset, a datetime in UTC, or a Position.

    Kafka's words for the first two are understood. A time is RFC 3339 (without a zone: UTC), epoch milliseconds, or
    `-1h` before `now_ms`.
    Raises: InvalidSettingError.
    """
    if text == "stored":
        return text
    if re.fullmatch(r"-\d{1,12}", text):
        return LastRecords(int(text[1:]))
    if re.fullmatch(r"[0-9]{1,18}", text):
        return RecordOffset(int(text))
    return _parse_point("start", text, now_ms, _START_HINT)


def parse_reset_target(text: str, now_ms: int) -> Point:
    """Return the target of a reset: as `parse_start`, but neither `stored` nor `-100`.

    Raises: InvalidSettingError.
    """
    return _parse_point("target", text, now_ms, _TARGET_HINT)


def parse_position(text: str) -> Position:
    """Return a position. Raises: InvalidSettingError."""
    try:
        return Position.parse(text)
    except InvalidRequestError as error:
        raise InvalidSettingError(str(error), hint=error.hint) from error


def _parse_point(what: str, text: str, now_ms: int, hint: str) -> Point:
    text = _KAFKA_POINTS.get(text, text)
    if text in ("beginning", "end"):
        return text
    if text.startswith("@"):
        return _parse_time(text[1:], now_ms, hint)
    try:
        return Position.parse(text)
    except InvalidRequestError as error:
        raise InvalidSettingError(f"bad {what} '{text[:60]}'", hint=hint) from error


def _parse_time(text: str, now_ms: int | None, hint: str) -> datetime.datetime:
    """Return a time in UTC; without `now_ms`, none is before now. Raises: InvalidSettingError."""
    shown = text[:60] if now_ms is None else f"@{text[:60]}"
    try:
        if re.fullmatch(r"\d{1,16}", text):
            return _moment(parse_unix_ms(text))
        if text.startswith("-"):
            ago_ms = parse_time_ms(text[1:])
            if ago_ms is not None and now_ms is not None:
                return _moment(now_ms - ago_ms)
        else:
            moment = datetime.datetime.fromisoformat(text)
            return moment.replace(tzinfo=moment.tzinfo or datetime.UTC).astimezone(datetime.UTC)
    except (ValueError, OverflowError, OSError) as error:
        raise InvalidSettingError(f"bad time '{shown}'", hint=hint) from error
    raise InvalidSettingError(f"bad time '{shown}'", hint=hint)


def delay_of(deliver_at: str | None, deliver_after: str | None, now_ms: int) -> dict[str, Any]:
    """Return the arguments of `Producer.send` for the options of a delay.

    Raises: InvalidSettingError for a time that can't be read, or is not allowed.
    """
    if deliver_at is not None and deliver_after is not None:
        raise click.UsageError("--deliver-at and --deliver-after exclude each other")
    if deliver_at is not None:
        at = _parse_time(deliver_at.removeprefix("@"), None, "write --deliver-at YYYY-MM-DDTHH:MM:SSZ, or Unix ms")
        _check_delay("--deliver-at", deliver_at, (at - _moment(now_ms)) // datetime.timedelta(milliseconds=1))
        return {"deliver_at": at}
    if deliver_after is None:
        return {}
    after_ms = milliseconds_of("--deliver-after", deliver_after)
    _check_delay("--deliver-after", deliver_after, after_ms)
    return {"deliver_after": datetime.timedelta(milliseconds=after_ms)}


def milliseconds_of(option: str, text: str) -> int:
    """Return the value of an option that is a length of time. Raises: InvalidSettingError."""
    found = parse_time_ms(text.strip())
    if found is None:
        what = "is negative" if parse_time_ms(text.strip().removeprefix("-")) is not None else "is not a time"
        raise InvalidSettingError(f"{option} {text[:60]!a} {what}", hint="write it with a unit: 250ms, 30s, 5m, 2h")
    return found


def _check_delay(option: str, text: str, delay_ms: int) -> None:
    if delay_ms > DELAY_MS_MAX:
        days = DELAY_MS_MAX // 86_400_000
        raise InvalidSettingError(f"{option} {text[:60]!a} is over the limit of {days} days", hint="write less")


def _moment(time_ms: int) -> datetime.datetime:
    """Return Unix ms as a datetime, exact to the millisecond: floats would round."""
    epoch = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    return epoch + datetime.timedelta(milliseconds=time_ms)
