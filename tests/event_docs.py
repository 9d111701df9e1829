"""Events of the log, as the code writes them and as docs/events.md lists them."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "events.md"
LEVELS = ("debug", "info", "warning", "error")
LOGGERS = ("events", "_events")
HOME = "memq/runtime/logs.py"  # the one place that writes events which it was given


def logged() -> dict[str, set[str]]:
    """Return every event of the code with its levels; an event that is no literal fails."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted((ROOT / "memq").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if name == HOME or not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            owner = node.func.value
            logger = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
            if logger not in LOGGERS or node.func.attr not in (*LEVELS, "outage"):
                continue
            outage = node.func.attr == "outage"
            for argument, level in zip(node.args, ("warning", "info") if outage else (node.func.attr,), strict=False):
                text = argument.value if isinstance(argument, ast.Constant) else None
                assert isinstance(text, str), f"{name}:{node.lineno}: an event is stable text, not an expression"
                found[text].add(level)
    return found


def documented() -> dict[str, str]:
    """Return the events of the page, each with its level."""
    rows = re.findall(r"^\| `([^`]+)` \| (\w+) \| [^|]+ \| [^|]+ \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    names = [name for name, _ in rows]
    assert names == sorted(names), "the table is sorted by event"
    assert len(names) == len(set(names))
    return dict(rows)
