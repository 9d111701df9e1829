"""Guesses the schema of JSON values, as the DDL that the option `schema` takes. Pure.

A guess is None (only nulls were seen), the name of a type, a list with the guess of its items, or a dict of fields in
the order in which they were first seen. Guesses can be joined: those of two tasks are that of all their values.
"""

from __future__ import annotations

import msgspec

FIELDS_MAX = 1_000  # of one object: with more it is no record but a table of its own, and stays text
DEPTH_MAX = 32
Guess = None | str | list["Guess"] | dict[str, "Guess"]
_TEXT = "STRING"
_DECODER = msgspec.json.Decoder()


def guess_of(value: object, depth: int = 0) -> Guess:
    """Return the guess of one decoded value."""
    if value is None:
        return None
    if isinstance(value, bool):
        return "BOOLEAN"
    if isinstance(value, int):
        return "BIGINT" if -(1 << 63) <= value < 1 << 63 else "DOUBLE"
    if isinstance(value, float):
        return "DOUBLE"
    if depth < DEPTH_MAX and isinstance(value, list):
        items: Guess = None
        for item in value:
            items = joined(items, guess_of(item, depth + 1))
        return [items]
    if depth < DEPTH_MAX and isinstance(value, dict) and 0 < len(value) <= FIELDS_MAX:
        return {name: guess_of(item, depth + 1) for name, item in value.items()}
    return _TEXT


def joined(one: Guess, other: Guess) -> Guess:
    """Return the guess for the values of both; what does not go together is text."""
    if one is None or other is None:
        return other if one is None else one
    if isinstance(one, list) and isinstance(other, list):
        return [joined(one[0], other[0])]
    if isinstance(one, dict) and isinstance(other, dict):
        fields = {name: joined(one.get(name), other.get(name)) for name in (*one, *other)}
        return fields if len(fields) <= FIELDS_MAX else _TEXT
    if one == other:
        return one
    return "DOUBLE" if {str(one), str(other)} == {"BIGINT", "DOUBLE"} else _TEXT


def ddl_of(guess: Guess) -> str:
    """Return the DDL of a table of such values; empty when they are not objects."""
    return ", ".join(f"{_quoted(name)} {_type_of(field)}" for name, field in _fields(guess).items())


def guess_value(value: bytes) -> dict[str, Guess] | None:
    """Return the guess of a value; None when it is no JSON object."""
    try:
        decoded = _DECODER.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return _fields(guess_of(decoded)) or None


def _fields(guess: Guess) -> dict[str, Guess]:
    return guess if isinstance(guess, dict) else {}


def _type_of(guess: Guess) -> str:
    if guess is None:
        return _TEXT
    if isinstance(guess, list):
        return f"ARRAY<{_type_of(guess[0])}>"
    if isinstance(guess, dict):
        return f"STRUCT<{', '.join(f'{_quoted(name)}: {_type_of(field)}' for name, field in guess.items())}>"
    return guess


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
