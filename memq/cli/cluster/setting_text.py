"""Settings of topics as a person reads them, with their units."""

from __future__ import annotations

from memq.cli.output import size_text
from memq.topic import TopicSettings

_TIME_UNITS = (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1_000))
_FOR_EVER = ("retention_ms", "retention_bytes")


def setting_text(key: str, value: object) -> str:
    """Return the value of a topic's setting: `7 d`, `8.0 MiB`, `on`, `1,000`; `-` for an empty text."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if not isinstance(value, int):
        return str(value) or "-"
    if not value and key in _FOR_EVER:
        return "0 (no limit)"
    if "bytes" in key:
        return size_text(value) + ("/s" if "bytes_s" in key else "")
    if key.endswith(("_ms", "_ms_max")):
        return time_span_text(value)
    return f"{value:,}" + ("/s" if key.endswith("_s") else "")


def time_span_text(value_ms: int) -> str:
    """Return a length of time in the largest unit that it is a multiple of: `7 d`, `90 s`, `500 ms`."""
    for unit, length_ms in _TIME_UNITS:
        if value_ms and value_ms % length_ms == 0:
            return f"{value_ms // length_ms:,} {unit}"
    return f"{value_ms:,} ms"


def retention_text(settings: TopicSettings) -> str:
    """Return the retention of a topic: `7 d`, `7 d or 1.0 GiB`, `for ever`."""
    parts = [time_span_text(settings.retention_ms)] if settings.retention_ms else []
    if settings.retention_bytes:
        parts.append(size_text(settings.retention_bytes))
    return " or ".join(parts) or "for ever"
