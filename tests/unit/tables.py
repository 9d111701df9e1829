"""Reads the tables of a Markdown page, to compare them with the code."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]


def read_tables(page: str) -> list[tuple[str, list[dict[str, str]]]]:
    """Return every table of `docs/<page>` with the heading above it, each row as a dict by column."""
    tables: list[tuple[str, list[dict[str, str]]]] = []
    heading = ""
    columns: list[str] = []
    for line in (ROOT / "docs" / page).read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if not cells:
            columns = []
        elif not columns:
            columns = cells
            tables.append((heading, []))
        elif set(cells[0]) != {"-"}:
            tables[-1][1].append(dict(zip(columns, cells, strict=True)))
    return tables


def read_table(page: str, heading: str, column: str) -> list[dict[str, str]]:
    """Return the one table under `heading` that has `column`."""
    found = [rows for title, rows in read_tables(page) if title.split(",")[0] == heading and column in rows[0]]
    assert len(found) == 1, f"{len(found)} tables under '{heading}' with a column '{column}'"
    return found[0]
