"""One mutant: a source file of the product with one small fault."""

from __future__ import annotations

import ast
import difflib
import hashlib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BY_HAND = "by hand"


@dataclass(frozen=True, slots=True)
class Mutant:
    """In `path`, from byte `start` to `end`, the text `old` becomes `new`.

    `function` is the qualified name around the place, `at` the number of equal faults before it in that function: so a
    mutant keeps its key when lines above it change. `reason` names the rule that a hand-made mutant breaks.
    """

    path: str
    function: str
    line: int
    operator: str
    start: int
    end: int
    old: str
    new: str
    at: int = 0
    reason: str = ""

    @property
    def key(self) -> str:
        """Return its identity by content: no line number goes into it."""
        parts = (self.path, self.function, self.operator, self.old, self.new, str(self.at))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]

    @property
    def module(self) -> str:
        """Return the name under which its file is imported."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    def original(self) -> str:
        """Return the source without the fault."""
        return (ROOT / self.path).read_text(encoding="utf-8")

    def source(self) -> str:
        """Return the source with the fault."""
        data = self.original().encode()
        assert data[self.start : self.end].decode() == self.old, f"{self.path} has changed since {self} was made"
        return (data[: self.start] + self.new.encode() + data[self.end :]).decode()

    def diff(self) -> str:
        """Return the lines that change."""
        pair = (self.original().splitlines(), self.source().splitlines())
        lines = difflib.unified_diff(*pair, lineterm="", n=0)
        return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))

    def __str__(self) -> str:
        name = self.reason or self.operator
        return f"{self.path}:{self.line} {self.function}: {name} [{self.key}]"


def function_at(tree: ast.Module, line: int) -> str:
    """Return the qualified name of the innermost function or class around a line, "" at module level."""
    names: list[str] = []
    scope: ast.AST = tree
    while True:
        for node in ast.iter_child_nodes(scope):
            if getattr(node, "lineno", line + 1) <= line <= (getattr(node, "end_lineno", None) or 0):
                scope = node
                if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    names.append(node.name)
                break
        else:
            return ".".join(names)
