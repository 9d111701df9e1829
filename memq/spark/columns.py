"""The columns that a record has in Spark: names, types, and which come when nobody chooses. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from memq.errors import InvalidSettingError

COLUMNS = {
    "key": "BINARY",
    "value": "BINARY",
    "headers": "ARRAY<STRUCT<name: STRING, value: BINARY>>",
    "tag": "STRING",
    "timestamp": "TIMESTAMP",
    "topic": "STRING",
    "partition": "INT",
    "offset": "BIGINT",
    "record_index": "INT",
    "producer_id": "BIGINT",
    "sequence": "BIGINT",
    "object": "STRING",
    "damage": "STRING",
    "orphan": "BOOLEAN",
}
# `damage` makes a row of each damaged block that was skipped, in place of its records; `orphan` tells of objects that
# no pointer would have named, which only who reads by `path` can meet. Both come only when they are asked for.
DEFAULT_COLUMNS = tuple(name for name in COLUMNS if name not in ("damage", "orphan"))


def table_ddl(columns: tuple[str, ...], fields: str) -> str:
    """Return the DDL of a read: `columns`, with decoded `fields` in place of the value, if any.

    Raises: InvalidSettingError when there would be no value to decode.
    """
    if fields and "value" not in columns:
        raise InvalidSettingError("option 'schema' decodes the column value, which 'columns' lacks", hint="add value")
    return ", ".join(fields if fields and name == "value" else f"{name} {COLUMNS[name]}" for name in columns)


def fields_at(names: Sequence[str], columns: tuple[str, ...], fields: str) -> range:
    """Return where the decoded fields are among the `names` of a table that `table_ddl` describes.

    A field may have the name of a column that is not there, or `value`, in whose place it is. Raises:
    InvalidSettingError for one that has the name of a column next to it, in any case of letters, as Spark tells names
    apart; and for a table that is another one.
    """
    first = columns.index("value") if fields else 0
    found = range(first, first + len(names) - len(columns) + 1) if fields else range(0)
    others = [name for name in columns if name != "value"]
    twice = [names[number] for number in found if names[number].lower() in others]
    if twice:
        left = [name for name in columns if name not in {each.lower() for each in twice}]
        raise InvalidSettingError(
            f"option 'schema' has fields with names of columns: {', '.join(twice)}", hint=f"columns = {','.join(left)}"
        )
    own = [name for number, name in enumerate(names) if number not in found]
    strange = [name for name in own if name not in columns]
    if strange or (fields and own != others):
        raise InvalidSettingError(
            f"Spark was given a schema of its own, with {', '.join(strange or names)[:120]}",
            hint="leave .schema(…) out; the option 'schema' has the fields of values, the option 'columns' the rest",
        )
    return found
