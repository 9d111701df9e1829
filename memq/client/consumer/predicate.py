"""Conditions on headers, as SQL writes them: `amount > 100 AND region = 'EU'`. Pure.

A name is a header; of several headers with one name the last one counts. Headers are bytes. Compared with a number a
header is read as a decimal number, compared with a text as UTF-8, and two headers are compared as numbers if both are.
A header that is missing or null, or that can't be read so, makes a comparison *unknown*. NOT, AND and OR treat unknown
as SQL does, and a record is wanted only if its condition is true.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from memq.errors import InvalidFilterError
from memq.format.blocks.columns import RecordHeaders
from memq.limits import KIB

CONDITION_BYTES_MAX = 4 * KIB
DEPTH_MAX = 50  # of parentheses and NOTs within each other

Text = bytes | None  # a header as it was sent; None: missing, or null
Row = Mapping[str, Text]
Truth = bool | None  # None: unknown
Test = Callable[[Row], Truth]
Value = int | float | str | bool | bytes | None  # bytes: a header, which may be a number, a text or a truth value
Operand = Callable[[Row], Value]

_GRAMMAR = r"""
?start: either
?either: both (_OR both)*
?both: inverse (_AND inverse)*
?inverse: _NOT inverse -> negation
    | test
?test: operand COMPARISON operand -> comparison
    | operand _BETWEEN operand _AND operand -> between
    | operand _NOT _BETWEEN operand _AND operand -> outside
    | operand _IN "(" literal ("," literal)* ")" -> among
    | operand _NOT _IN "(" literal ("," literal)* ")" -> not_among
    | operand _IS _NULL -> null
    | operand _IS _NOT _NULL -> present
    | "(" either ")"
    | operand -> flag
?operand: header | literal
header: NAME | QUOTED_NAME
?literal: NUMBER -> number
    | TEXT -> text
    | TRUE -> true
    | FALSE -> false

COMPARISON: ">=" | "<=" | "<>" | "!=" | "=" | ">" | "<"
_OR.2: /OR\b/i
_AND.2: /AND\b/i
_NOT.2: /NOT\b/i
_BETWEEN.2: /BETWEEN\b/i
_IN.2: /IN\b/i
_IS.2: /IS\b/i
_NULL.2: /NULL\b/i
TRUE.2: /TRUE\b/i
FALSE.2: /FALSE\b/i
NAME: /[A-Za-z_$][A-Za-z0-9_.$]*/
QUOTED_NAME: /"([^"]|"")+"/
NUMBER: /[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?(?![A-Za-z0-9_.$])/
TEXT: /'([^']|'')*'/
%ignore /\s+/
"""
_NUMBER = re.compile(rb"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_NUMBER_BYTES_MAX = 400
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "<>": operator.ne,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_TOKENS = {  # of the grammar, as they are named in an error; the others are words
    "COMPARISON": "a comparison",
    "NAME": "a header",
    "QUOTED_NAME": "a header",
    "NUMBER": "a number",
    "TEXT": "a text in single quotes",
    "LPAR": "'('",
    "RPAR": "')'",
    "COMMA": "','",
    "$END": "the end",
}
# What a condition has where it can't be read, and what to write there.
_MISTAKES = (
    ("(?<==)=", "equality is written with a single ="),
    ("'", "a text begins and ends with a single quote, and a quote in it is doubled"),
    ('"', "a name in double quotes ends with one; texts are in single quotes"),
    ("(?<=[A-Za-z0-9_.$])-", """write a name with a '-' in double quotes: "content-type\""""),
    ("&", "write AND"),
    (r"\|", "write OR"),
    ("!", "write NOT, or <>"),
    ("(?i:i?like\\b)", "patterns can't be searched: compare with =, IN or BETWEEN"),
)


class Condition:
    """A condition on the headers of a record. Raises: InvalidFilterError if it can't be read; TypeError."""

    def __init__(self, text: str) -> None:
        if not isinstance(text, str):
            raise TypeError(f"where must be a text, not {type(text).__name__}")
        self.text = text
        self._names: dict[str, None] = {}
        self._test = self._parse(text)

    def holds(self, headers: RecordHeaders) -> bool:
        """Whether the condition is true for these headers."""
        names = self._names
        return self._test({name: value for name, value in headers if name in names}) is True

    def _parse(self, text: str) -> Test:
        from lark.exceptions import UnexpectedInput, UnexpectedToken

        if len(text.encode(errors="replace")) > CONDITION_BYTES_MAX:
            raise InvalidFilterError(f"where has {len(text)} characters, {CONDITION_BYTES_MAX} bytes are allowed")
        try:
            tree = _parser().parse(text)
        except UnexpectedInput as error:
            ended = isinstance(error, UnexpectedToken) and error.token.type == "$END"
            at = len(text) if ended else error.pos_in_stream
            raise _malformed(text, None if ended else at, _expected_after(text[:at])) from None
        return self._test_of(tree, 0)

    def _test_of(self, tree: Any, depth: int) -> Test:
        """Return the function of a node of the syntax tree."""
        if depth > DEPTH_MAX:
            raise InvalidFilterError(f"where has more than {DEPTH_MAX} levels of parentheses and NOT")
        kind, parts = tree.data, tree.children
        if kind in ("either", "both"):
            return _any_or_all([self._test_of(part, depth + 1) for part in parts], decisive=kind == "either")
        if kind == "negation":
            return _inverse(self._test_of(parts[0], depth + 1))
        if kind == "comparison":
            return _comparison(self._operand(parts[0]), str(parts[1]), self._operand(parts[2]))
        values = [self._operand(part) for part in parts]
        if kind in ("between", "outside"):
            value, low, high = values
            inside = _any_or_all([_comparison(value, ">=", low), _comparison(value, "<=", high)], decisive=False)
            return inside if kind == "between" else _inverse(inside)
        if kind in ("among", "not_among"):
            found = _any_or_all([_comparison(values[0], "=", each) for each in values[1:]], decisive=True)
            return found if kind == "among" else _inverse(found)
        if kind in ("null", "present"):
            return _nullness(values[0], null=kind == "null")
        assert kind == "flag", kind
        return _flag(values[0])

    def _operand(self, tree: Any) -> Operand:
        token = str(tree.children[0])
        if tree.data == "header" and token.upper() == "NULL":
            raise InvalidFilterError(
                f"where compares with NULL, which is never true: {self.text[:200]}",
                hint='write IS NULL or IS NOT NULL; a header of this name is "NULL", in double quotes',
            )
        if tree.data == "header":
            name = token[1:-1].replace('""', '"') if token.startswith('"') else token
            self._names[name] = None
            return lambda row: row.get(name)
        value: Value = _number_of(token) if tree.data == "number" else _text_of(token)
        if tree.data in ("true", "false"):
            value = tree.data == "true"
        return lambda row: value


@lru_cache(maxsize=1)
def _parser() -> Any:
    from lark import Lark

    return Lark(_GRAMMAR, parser="lalr", maybe_placeholders=False)


def _expected_after(text: str) -> set[str]:
    """Return the names of the tokens that may follow the sound begin of a condition."""
    parser = _parser().parse_interactive(text)
    for _ in parser.iter_parse():
        pass
    return set(parser.accepts())


def _malformed(text: str, at: int | None, names: Any) -> InvalidFilterError:
    """Return the error for a mistake at an index of the text; None is its end."""
    expected = sorted({_TOKENS.get(name, name.lstrip("_")) for name in names})
    where = "at its end" if at is None else f"at character {at + 1}, '{text[at : at + 20]}'"
    wanted = f"; expected is {', '.join(expected)}" if expected else ""
    hint = "" if at is None else next((hint for start, hint in _MISTAKES if re.compile(start).match(text, at)), "")
    return InvalidFilterError(f"where can't be read {where}{wanted}: {text[:200]}", hint=hint)


def _number_of(text: str | bytes) -> int | float | None:
    """Return the number that a text is, None for another text."""
    raw = text.encode() if isinstance(text, str) else text
    if len(raw) > _NUMBER_BYTES_MAX or not _NUMBER.fullmatch(raw):
        return None
    return int(raw) if raw.lstrip(b"+-").isdigit() else float(raw)


def _text_of(token: str) -> str:
    return token[1:-1].replace("''", "'")


def _decoded(value: bytes) -> str | None:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None


def _truth_of(value: Value) -> Truth:
    if isinstance(value, bytes):
        return {b"true": True, b"false": False}.get(value.lower())
    return value if isinstance(value, bool) else None


def _as(value: Value, kind: type) -> Value:
    """Return a value as a number, text or truth value; None if it is none."""
    if kind is bool:
        return _truth_of(value)
    if isinstance(value, bytes):
        return _number_of(value) if kind is float else _decoded(value)
    if isinstance(value, bool) or isinstance(value, str) is not (kind is str):
        return None
    return value


def _comparison(left: Operand, sign: str, right: Operand) -> Test:
    compare = _COMPARE[sign]

    def test(row: Row) -> Truth:
        one, other = left(row), right(row)
        if one is None or other is None:
            return None
        one, other = _alike(one, other)
        return None if one is None or other is None else compare(one, other)

    return test


def _alike(one: Value, other: Value) -> tuple[Value, Value]:
    """Return two values as two numbers, texts or truth values."""
    if isinstance(one, bytes) and isinstance(other, bytes):
        numbers = _number_of(one), _number_of(other)
        return numbers if None not in numbers else (_decoded(one), _decoded(other))
    known = other if isinstance(one, bytes) else one
    kind = bool if isinstance(known, bool) else str if isinstance(known, str) else float
    return _as(one, kind), _as(other, kind)


def _any_or_all(tests: list[Test], *, decisive: bool) -> Test:
    """Return OR (True is decisive) or AND (False is) of tests."""

    def test(row: Row) -> Truth:
        result: Truth = not decisive
        for each in tests:
            found = each(row)
            if found is decisive:
                return decisive
            if found is None:
                result = None
        return result

    return test


def _inverse(inner: Test) -> Test:
    def test(row: Row) -> Truth:
        found = inner(row)
        return None if found is None else not found

    return test


def _nullness(value: Operand, *, null: bool) -> Test:
    return lambda row: (value(row) is None) is null


def _flag(value: Operand) -> Test:
    return lambda row: _truth_of(value(row))
