"""Log lines on stderr: a broker's for people or as one JSON object per line; a client's waits."""

from __future__ import annotations

import json
import logging

from memq.cli.output import one_line, talk, time_text


def log_to_stderr(level: str, form: str) -> None:
    """Send the log of memq to stderr from `level` on, as `text` or as `json`."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    logger = logging.getLogger("memq")
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False


def talk_of_waits() -> None:
    """Say on stderr when a command waits because no broker answers; the rest of the log stays silent."""
    logging.getLogger("memq").addHandler(Waits(logging.WARNING))


class Waits(logging.Handler):
    """`memq: no broker answers: can't reach 127.0.0.1:9876: …; trying again (for 3 s, 5 times)`."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the line of such a wait."""
        event = getattr(record, "event", "")
        if event == "client.no-broker":
            talk(f"memq: {one_line(record.getMessage().removeprefix(f'{event}: '))}")


class TextLines(logging.Formatter):
    """`2026-01-31T08:00:00.123Z warning swept-at-start: …`; a traceback follows indented."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line, and those of the traceback when there is one."""
        line = f"{_time(record)} {record.levelname.lower()} {one_line(record.getMessage())}"
        if record.exc_info:
            line += "".join(f"\n  {part}" for part in self.formatException(record.exc_info).splitlines())
        return line


class JsonLines(logging.Formatter):
    """`{"time": …, "level": …, "event": …, "text": …}`, with `traceback` when there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one JSON object."""
        event = str(getattr(record, "event", record.name))  # what a library says has its logger's name
        text = record.getMessage().removeprefix(f"{event}: ")
        found: dict[str, str] = {"time": _time(record), "level": record.levelname.lower()}
        found |= {"logger": record.name, "event": event, "text": text}
        if record.exc_info:
            found["traceback"] = self.formatException(record.exc_info)
        return json.dumps(found, ensure_ascii=False)


def _time(record: logging.LogRecord) -> str:
    return time_text(int(record.created * 1_000))
