"""Tables of HTML for notebooks. Every cell is escaped: records may hold anything."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

CELL_CHARACTERS_MAX = 200


def table_html(heads: Sequence[str], rows: Iterable[Sequence[object]], caption: str = "") -> str:
    """Return a table; long cells are cut."""
    parts = ["<table>"]
    if caption:
        parts.append(f"<caption>{cell_html(caption)}</caption>")
    parts.append("<thead>" + _row("th", heads) + "</thead><tbody>")
    parts += [_row("td", row) for row in rows]
    return "".join([*parts, "</tbody></table>"])


def _row(tag: str, cells: Iterable[object]) -> str:
    return "<tr>" + "".join(f"<{tag}>{cell_html(each)}</{tag}>" for each in cells) + "</tr>"


def cell_html(value: object) -> str:
    """Return a value as escaped text; None is empty, bytes are decoded, and a long text is cut."""
    text = "" if value is None else shown_bytes(value) if isinstance(value, bytes) else str(value)
    from html import escape  # its import takes a millisecond, which a program without a notebook need not pay

    return escape(text if len(text) <= CELL_CHARACTERS_MAX else f"{text[:CELL_CHARACTERS_MAX]}…")


def shown_bytes(value: bytes) -> str:
    """Return the beginning of bytes as text, with escapes for what is not UTF-8 or can't be printed."""
    text = value[: 4 * CELL_CHARACTERS_MAX].decode("utf-8", "backslashreplace")
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
