"""The columns that a record has in Spark: names, types, and which come when nobody chooses. Pure."""

from __future__ import annotations

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
    """Return the DDL of what is read: `columns`, with the DDL of decoded `fields`, if any, in place of the value.

    Raises: InvalidSettingError when there would be no value to decode.
    """
    if fields and "value" not in columns:
        raise InvalidSettingError("option 'schema' decodes the column value, which 'columns' lacks", hint="add value")
    return ", ".join(fields if fields and name == "value" else f"{name} {COLUMNS[name]}" for name in columns)
