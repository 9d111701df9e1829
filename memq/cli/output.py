"""Output of commands: data on stdout, messages and log lines on stderr, as tables or JSON."""

from __future__ import annotations

import datetime
import json
import logging
import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Self

import click

from memq.errors import InvalidSettingError
from memq.redaction import redacted

_SHOWN_AS_THEY_ARE = frozenset("\n\t\u200c\u200d")  # the last two join letters and emoji
_CONTROLS = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")  # JSON escapes those below 0x20


def print_message(text: str) -> None:
    """Print a message to the user on stderr, so that it never mixes with data."""
    click.echo(text, err=True)


def confirm(question: str) -> None:
    """Ask on a terminal before an irreversible step.

    Raises: click.ClickException for a no; InvalidSettingError without a terminal, where only `--yes` is an answer.
    """
    if not sys.stdin.isatty():
        raise InvalidSettingError(f"no terminal to ask on: {question}", hint="add --yes")
    if not click.confirm(question, err=True):
        raise click.ClickException("nothing was changed")


def one_line(text: str) -> str:
    """Return `text` with control characters and line breaks made visible: an error is one line."""
    return text if text.isprintable() else "".join(map(_visible, text))


def _visible(character: str) -> str:
    return character if character.isprintable() else ascii(character)[1:-1]


def write_records(content: bytes, *, raw: bool) -> None:
    """Write records to stdout.

    On a terminal without `raw`, characters that would control it, or reorder its text, are shown as escapes.
    """
    if not raw and sys.stdout.isatty():
        text = content.decode("utf-8", "backslashreplace")
        shown = (each if each in _SHOWN_AS_THEY_ARE else _visible(each) for each in text)
        content = "".join(shown).encode()
    sys.stdout.buffer.write(content)
    sys.stdout.buffer.flush()


def print_json(value: object) -> None:
    """Print one JSON value on one line."""
    click.echo(json_text(value))


def print_done(text: str, found: object, *, as_json: bool) -> None:
    """Print the end of a change: a message, or its facts as JSON."""
    if as_json:
        print_json(found)
    else:
        print_message(text)


def json_text(value: object) -> str:
    """Return one line of JSON, with escapes for what would control a terminal or reorder its text."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def print_table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print columns under their heads; numbers to the right, with thousands separated."""
    cells = [[_cell(value) for value in row] for row in rows]
    right = [bool(cells) and all(row[at][1] for row in cells) for at in range(len(heads))]
    widths = [max(len(head), *(len(row[at][0]) for row in cells), 0) for at, head in enumerate(heads)]
    lines = [list(heads), *([text for text, _ in row] for row in cells)]
    for number, line in enumerate(lines):
        padded = [
            text.rjust(width) if to_right else text.ljust(width)
            for text, width, to_right in zip(line, widths, right, strict=True)
        ]
        text = "  ".join(padded).rstrip()
        click.echo(click.style(text, bold=True) if number == 0 and colored() else text)


def print_pairs(pairs: Iterable[tuple[str, object]]) -> None:
    """Print `name  value` lines."""
    shown = [(name, _cell(value)[0]) for name, value in pairs]
    width = max(len(name) for name, _ in shown)
    for name, value in shown:
        click.echo(f"{name:<{width}}  {value}")


def colored() -> bool:
    """Return whether stdout takes colors: a terminal without NO_COLOR."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ


def time_text(time_ms: int | None) -> str:
    """Return Unix ms as RFC 3339 with milliseconds, UTC.

    Return `-` for None, and the number itself if it is outside of the calendar.
    """
    if time_ms is None:
        return "-"
    try:
        moment = datetime.datetime.fromtimestamp(time_ms / 1_000, datetime.UTC)
    except (OverflowError, ValueError, OSError):
        return str(time_ms)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def size_text(count: int) -> str:
    """Return bytes as readable text: `8.0 MiB`."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1_024:
            return f"{count} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1_024
    return f"{amount:.1f} TiB"


def count_text(count: int, noun: str) -> str:
    """Return `1 record`, `2,000 records`, `2 batches`."""
    ending = "" if count == 1 else "es" if noun.endswith("ch") else "s"
    return f"{count:,} {noun}{ending}"


def _cell(value: object) -> tuple[str, bool]:
    """Return a value's text and whether it is a number."""
    if isinstance(value, bool) or value is None:
        return ("-" if value is None else str(value).lower()), False
    if isinstance(value, int):
        return f"{value:,}", True
    return one_line(str(value)), False


class ProgressBar:
    """A bar on stderr when that is a terminal and the amount is known; else nothing."""

    def __init__(self, label: str, total: int) -> None:
        self._bar = None
        if total > 0 and sys.stderr.isatty():
            self._bar = click.progressbar(length=total, label=label, file=sys.stderr)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.render_finish()

    def move(self, amount: int) -> None:
        """Note that so much more is done."""
        if self._bar is not None:
            self._bar.update(amount)


class GrowingCount:
    """A growing number on stderr, if that is a terminal: for work of unknown length."""

    def __init__(self, label: str, unit: str) -> None:
        self._text = f"{label}: {{:,}} {unit}"
        self.count = 0
        self._shown = sys.stderr.isatty()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown and self.count:
            click.echo(err=True)

    def move(self, amount: int) -> None:
        """Note that so much more is done."""
        self.count += amount
        if self._shown:
            click.echo("\r" + self._text.format(self.count), nl=False, err=True)


def log_to_stderr(level: str, form: str) -> None:
    """Send the log of memq to stderr from `level` on, as `text` or as `json`."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    logger = logging.getLogger("memq")
    for each in [each for each in logger.handlers if isinstance(each, WaitLines)]:
        logger.removeHandler(each)  # all lines are shown
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False


def print_waits() -> None:
    """Print to stderr when a command waits for a broker or a store; the rest of the log is silent."""
    logger = logging.getLogger("memq")
    if not any(isinstance(handler, WaitLines) for handler in logger.handlers):
        logger.addHandler(WaitLines(logging.WARNING))


WAITS = ("client.no-broker", "client.waits", "consumer.object-missing")


class WaitLines(logging.Handler):
    """`memq: no broker answers: can't reach 127.0.0.1:9876: …; trying again (for 3 s, 5 times)`."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the line of such a wait."""
        event = getattr(record, "event", "")
        if event in WAITS:
            print_message(f"memq: {one_line(record.getMessage().removeprefix(f'{event}: '))}")


class TextLines(logging.Formatter):
    """`2026-01-31T08:00:00.123Z warning swept-at-start: …`; a traceback follows indented."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line, and those of the traceback when there is one."""
        line = f"{_time(record)} {record.levelname.lower()} {one_line(redacted(record.getMessage()))}"
        if record.exc_info:
            line += "".join(f"\n  {part}" for part in redacted(self.formatException(record.exc_info)).splitlines())
        return line


class JsonLines(logging.Formatter):
    """`{"time": …, "level": …, "event": …, "text": …}`, with `traceback` when there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one JSON object."""
        event = str(getattr(record, "event", record.name))  # a library's line has the name of its logger
        text = redacted(record.getMessage()).removeprefix(f"{event}: ")
        found: dict[str, str] = {"time": _time(record), "level": record.levelname.lower()}
        found |= {"logger": record.name, "event": event, "text": text}
        if record.exc_info:
            found["traceback"] = redacted(self.formatException(record.exc_info))
        return json_text(found)


def _time(record: logging.LogRecord) -> str:
    return time_text(int(record.created * 1_000))


def print_ready(address: str) -> None:
    """Print `memq ready: HOST:PORT` at once, also into a pipe."""
    click.echo(f"memq ready: {address}")
    sys.stdout.flush()
