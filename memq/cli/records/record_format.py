"""The format of `consume -f`: kcat's letters, turned once into parts that are joined for each record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from memq.errors import InvalidSettingError

_ESCAPES = {"n": b"\n", "t": b"\t", "r": b"\r", "0": b"\0", "\\": b"\\"}


class Printed(Protocol):
    """A column of the output format."""

    @property
    def value(self) -> bytes | None:
        """The value."""

    @property
    def key(self) -> bytes | None:
        """The key."""

    @property
    def headers(self) -> tuple[tuple[str, bytes | None], ...]:
        """Pairs of name and value."""

    @property
    def timestamp_ms(self) -> int:
        """Unix ms."""

    @property
    def offset(self) -> int:
        """The offset in its partition."""


Part = Callable[[Printed, str, int], bytes]
Format = Callable[[Printed, str, int], bytes]


def parse_format(text: str, null: bytes = b"") -> Format:
    r"""Return a function (record, topic, partition) -> bytes for a format.

    %t topic, %p partition, %o offset, %k key, %s value, %h headers as `a=b,c=d`, %T timestamp in ms,
    %K and %S bytes of key and value (-1 for null), %% a percent sign; \n \t \r \0 \\ and \xHH. `null`
    means a null key, value or header.

    Raises: InvalidSettingError for an unknown letter.
    """
    letters: dict[str, Part] = {
        "t": lambda record, topic, partition: topic.encode(),
        "p": lambda record, topic, partition: b"%d" % partition,
        "o": lambda record, topic, partition: b"%d" % record.offset,
        "k": lambda record, topic, partition: null if record.key is None else record.key,
        "s": lambda record, topic, partition: null if record.value is None else record.value,
        "h": lambda record, topic, partition: _headers(record, null),
        "T": lambda record, topic, partition: b"%d" % record.timestamp_ms,
        "K": lambda record, topic, partition: b"%d" % _length(record.key),
        "S": lambda record, topic, partition: b"%d" % _length(record.value),
    }
    parts: list[Part] = []
    literal = bytearray()
    at = 0
    while at < len(text):
        if text[at] == "\\":
            piece, at = _escape(text, at)
            literal += piece
        elif text[at] != "%":
            literal += text[at].encode()
            at += 1
        else:
            letter = text[at + 1 : at + 2]
            at += 2
            if letter == "%":
                literal += b"%"
            elif letter in letters:
                _close_literal(parts, literal)
                parts.append(letters[letter])
            else:
                raise InvalidSettingError(
                    f"unknown letter '%{letter}' in format" if letter else "the format ends with a lone '%'",
                    hint=f"known are {' '.join('%' + one for one in letters)} %%",
                )
    _close_literal(parts, literal)
    return lambda record, topic, partition: b"".join([part(record, topic, partition) for part in parts])


def parse_delimiter(text: str) -> bytes:
    r"""Return the bytes of a delimiter: plain text with the escapes of a format.

    Raises: InvalidSettingError for an empty one.
    """
    found = bytearray()
    at = 0
    while at < len(text):
        if text[at] == "\\":
            piece, at = _escape(text, at)
            found += piece
        else:
            found += text[at].encode()
            at += 1
    if not found:
        raise InvalidSettingError("empty delimiter", hint=r"write it as ';' or '\n' or '\x1e'")
    return bytes(found)


def _escape(text: str, at: int) -> tuple[bytes, int]:
    """Return the bytes of the escape at `at`, and its end; an unknown escape is its own letter."""
    letter = text[at + 1 : at + 2]
    if letter in _ESCAPES:
        return _ESCAPES[letter], at + 2
    if letter == "x":
        digits = text[at + 2 : at + 4]
        if len(digits) == 2 and all(digit in "0123456789abcdefABCDEF" for digit in digits):
            return bytes.fromhex(digits), at + 4
    return b"\\", at + 1


def _close_literal(parts: list[Part], literal: bytearray) -> None:
    if literal:
        content = bytes(literal)
        parts.append(lambda record, topic, partition: content)
        literal.clear()


def _headers(record: Printed, null: bytes) -> bytes:
    return b",".join([name.encode() + b"=" + (null if value is None else value) for name, value in record.headers])


def _length(content: bytes | None) -> int:
    return -1 if content is None else len(content)
