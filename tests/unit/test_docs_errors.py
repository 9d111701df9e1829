"""docs/errors.md has every error of memq: `python -m tests.unit.test_docs_errors` writes it, the test compares."""

from __future__ import annotations

import sys
from pathlib import Path

from memq.errors import KINDS, all_errors, kind_of

PAGE = Path(__file__).parents[2] / "docs" / "errors.md"
HEAD = """# Errors

Every error descends from `memq.errors.MemqError` and from exactly one kind, which says what the caller does. `code` is
stable text: it is in `--json` output, in logs and on the wire. The command line's exit code follows from the kind: see
[cli.md](cli.md).
"""


def page() -> str:
    """Return what the page has to say."""
    parts = [HEAD]
    for kind in KINDS:
        parts.append(
            f"\n## {kind.__name__}\n\n{_doc(kind)}\n\n| error | code | when | what to do |\n|---|---|---|---|\n"
        )
        errors = [error for error in all_errors() if kind_of(error) is kind]
        parts += [
            f"| `{error.__name__}` | `{error.code}` | {_doc(error)} | {error.default_hint} |\n" for error in errors
        ]
    return "".join(parts)


def _doc(error: type) -> str:
    return " ".join((error.__doc__ or "").split())


def test_the_page_has_every_error() -> None:
    assert PAGE.read_text() == page(), "write it again: python -m tests.unit.test_docs_errors"


if __name__ == "__main__":
    sys.exit(PAGE.write_text(page()) == 0)
