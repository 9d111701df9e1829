"""A planted bug: one function of the product, the change in it, and the runs that show it.

A change works on the syntax tree of the function and finds its place by a called function or by a node of the tree.
So lines may be formatted again, moved and commented as anyone likes.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

Function = ast.FunctionDef | ast.AsyncFunctionDef
Change = Callable[[Function], None]
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Planted:
    """One bug: `change` is done to `target`, a dotted path after the module's name.

    `level` is the weather that it takes, and `aspects` what the runs must have in addition to the usual.
    """

    name: str
    module: str
    target: str
    change: Change
    level: str = "stormy"
    quick_failover: bool = False
    seed: int = 1_000  # the first to try
    producers: tuple[str, ...] = ("plain", "product")
    aspects: tuple[str, ...] = ()


def each(*changes: Change) -> Change:
    """Do several changes to one function."""

    def change(function: Function) -> None:
        for part in changes:
            part(function)

    return change


def body(code: str) -> Change:
    """Do `code` instead of all that the function does."""

    def change(function: Function) -> None:
        function.body = ast.parse(code).body

    return change


def first(code: str) -> Change:
    """Do `code` before all that the function does."""

    def change(function: Function) -> None:
        function.body[:0] = ast.parse(code).body

    return change


def omit(call: str) -> Change:
    """Leave out the statement that calls `call`, a dotted name as the function writes it."""
    return instead(call, "pass")


def instead(call: str, code: str) -> Change:
    """Do `code` instead of the statement that calls `call`."""

    def change(function: Function) -> None:
        block, at = _calling(function, call)
        block[at : at + 1] = ast.parse(code).body

    return change


def before(call: str, code: str) -> Change:
    """Do `code` before the statement that calls `call`."""

    def change(function: Function) -> None:
        block, at = _calling(function, call)
        block[at:at] = ast.parse(code).body

    return change


def after(call: str, code: str) -> Change:
    """Do `code` after the statement that calls `call`."""

    def change(function: Function) -> None:
        block, at = _calling(function, call)
        block[at + 1 : at + 1] = ast.parse(code).body

    return change


def swap(old: str, new: str) -> Change:
    """Exchange an expression, or statements in a row, for others; they are compared without their layout."""

    def change(function: Function) -> None:
        wanted, others = ast.parse(old).body, ast.parse(new).body
        if isinstance(wanted[0], ast.Expr) and isinstance(others[0], ast.Expr):
            _swap_expression(function, wanted[0].value, others[0].value)
            return
        dumps = [ast.dump(each) for each in wanted]
        places = [
            (block, at)
            for block in _blocks(function)
            for at in range(len(block))
            if [ast.dump(each) for each in block[at : at + len(wanted)]] == dumps
        ]
        block, at = _only(places, old)
        block[at : at + len(wanted)] = others

    return change


def _swap_expression(function: Function, old: ast.expr, new: ast.expr) -> None:
    wanted = ast.dump(old)
    places: list[Callable[[ast.expr], None]] = []
    for node in ast.walk(function):
        for field, value in ast.iter_fields(node):
            for at, each in enumerate(value if isinstance(value, list) else [value]):
                if isinstance(each, ast.expr) and ast.dump(each) == wanted:
                    places.append(_setter(node, field, at if isinstance(value, list) else None))
    _only(places, ast.unparse(old))(new)


def _setter(node: ast.AST, field: str, at: int | None) -> Callable[[ast.expr], None]:
    def put(new: ast.expr) -> None:
        if at is None:
            setattr(node, field, new)
        else:
            getattr(node, field)[at] = new

    return put


def _calling(function: Function, call: str) -> tuple[list[ast.stmt], int]:
    """Return the innermost statement that calls `call`, as its block and its place there."""

    def calls(node: ast.AST) -> bool:
        return any(isinstance(each, ast.Call) and ast.unparse(each.func) == call for each in ast.walk(node))

    return _only(
        [
            (block, at)
            for block in _blocks(function)
            for at, statement in enumerate(block)
            if calls(statement) and not any(calls(each) for inner in _blocks(statement) for each in inner)
        ],
        f"a call of {call}",
    )


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield each list of statements within a node."""
    for each in ast.walk(node):
        for _, value in ast.iter_fields(each):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                yield value


def _only(places: list[Found], what: str) -> Found:
    assert len(places) == 1, f"'{what}' occurs {len(places)} times in the function"
    return places[0]
