"""The table of operations in docs/permissions.md is that of the brokers. Run as a program, this writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memq.broker.api.operations import Operation
from tests.unit.test_operations import EXAMPLES, table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "permissions.md"
HEAD = "| operation | permission | on |\n|---|---|---|\n"
MARK = "writes this table -->\n\n"


def row_of(row: Operation[Any]) -> str:
    reads = {"group": "group (`read`)", "topic": "topic (`read`)"} if row.permission.value == "write" else {}
    names = {"object": "topics of the object", "partition": "topic", **reads}
    kinds = dict.fromkeys(names.get(kind, kind.replace("-", " ")) for kind, _ in EXAMPLES[row.message][1])
    on = ", ".join(kinds)
    if row.listing:
        return f"| `{row.name}` | `{row.permission.value}` | each item of the answer |\n"
    return f"| `{row.name}` | `{row.permission.value}` | {on} |\n"


def page_with_table(text: str) -> str:
    before = text.partition(MARK)[0]
    return before + MARK + HEAD + "".join(map(row_of, table().rows))


def test_the_table_of_operations_is_documented() -> None:
    text = PAGE.read_text()
    assert text == page_with_table(text), "run python -m tests.unit.test_docs_permissions"


if __name__ == "__main__":
    PAGE.write_text(page_with_table(PAGE.read_text()))
