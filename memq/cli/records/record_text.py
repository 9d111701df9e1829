"""Records as text: the formats of `consume -f`, and a line of JSON for each record, both ways."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from memq.cli.output import json_text
from memq.errors import InvalidRequestError, InvalidSettingError
from memq.settings import did_you_mean

_ESCAPES = {"n": b"\n", "t": b"\t", "r": b"\r", "0": b"\0", "\\": b"\\"}
Headers = tuple[tuple[str, bytes | None], ...]
PLACE_FIELDS = ("topic", "partition", "offset", "position", "producer_id", "sequence")  # ignored when sent
FIELDS = (*PLACE_FIELDS, "timestamp_ms", "key", "key_base64", "headers", "tag", "value", "value_base64")


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


@dataclass(frozen=True, slots=True)
class ReadRecord:
    """A record from a line of JSON; its timestamp is None if the line has none."""

    value: bytes | None
    key: bytes | None
    headers: Headers
    timestamp_ms: int | None
    tag: str | None


def encode_record(
    identity: dict[str, object],
    value: bytes | None,
    key: bytes | None,
    headers: Iterable[tuple[str, bytes | None]],
    timestamp_ms: int | None,
    tag: str | None,
) -> str:
    """Return one line of JSON without its end. `identity` comes first: topic, partition, offset, position.

    Bytes that are UTF-8 are text, other bytes are in `…_base64`. A header is a pair: its name, and text, null or
    `{"base64": …}`. Absent fields (key, headers, tag, time) are left out; a null value is null.
    """
    record: dict[str, object] = {**identity}
    if timestamp_ms is not None:
        record["timestamp_ms"] = timestamp_ms
    if key is not None:
        _put_bytes(record, "key", key)
    pairs = [[name, _header_value(content)] for name, content in headers]
    if pairs:
        record["headers"] = pairs
    if tag is not None:
        record["tag"] = tag
    if value is None:
        record["value"] = None
    else:
        _put_bytes(record, "value", value)
    return json_text(record)


def decode_record(line: bytes) -> ReadRecord:
    """Read one line of JSON. Raises: InvalidRequestError naming the field."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(
            f"not JSON: {error}", hint="write one object per line, as consume --json does"
        ) from error
    if not isinstance(record, dict):
        raise InvalidRequestError(f"a {type(record).__name__}, not an object", hint="write one object per line")
    for name in record:
        if name not in FIELDS:
            raise InvalidRequestError(f"unknown field {name[:60]!a}", hint=did_you_mean(name, FIELDS))
    timestamp_ms = record.get("timestamp_ms")
    if timestamp_ms is not None and (not isinstance(timestamp_ms, int) or isinstance(timestamp_ms, bool)):
        raise _wrong("timestamp_ms", timestamp_ms, "whole milliseconds")
    tag = record.get("tag")
    if tag is not None and not isinstance(tag, str):
        raise _wrong("tag", tag, "a string or null")
    if "value" not in record and "value_base64" not in record:
        raise InvalidRequestError("neither 'value' nor 'value_base64'", hint='a null value is written "value":null')
    return ReadRecord(
        _take_bytes(record, "value"), _take_bytes(record, "key"), _take_headers(record), timestamp_ms, tag
    )


def _put_bytes(record: dict[str, object], name: str, content: bytes) -> None:
    try:
        record[name] = content.decode()
    except UnicodeDecodeError:
        record[f"{name}_base64"] = base64.b64encode(content).decode()


def _header_value(content: bytes | None) -> object:
    if content is None:
        return None
    try:
        return content.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(content).decode()}


def _take_bytes(record: dict[str, object], name: str) -> bytes | None:
    if f"{name}_base64" in record:
        if name in record:
            raise InvalidRequestError(f"both '{name}' and '{name}_base64'", hint="leave one out")
        return _from_base64(record[f"{name}_base64"], f"{name}_base64")
    return _from_text(record.get(name), name)


def _take_headers(record: dict[str, object]) -> Headers:
    pairs = record.get("headers")
    if pairs is None:
        return ()
    if not isinstance(pairs, list):
        raise _wrong("headers", pairs, "a list of pairs")
    headers: list[tuple[str, bytes | None]] = []
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise _wrong("headers", pair, "pairs of name and value")
        name, content = pair
        if isinstance(content, dict) and list(content) == ["base64"]:
            headers.append((name, _from_base64(content["base64"], "headers")))
        else:
            headers.append((name, _from_text(content, "headers")))
    return tuple(headers)


def _from_text(content: object, name: str) -> bytes | None:
    if content is None:
        return None
    if not isinstance(content, str):
        raise _wrong(name, content, "a string or null")
    try:
        return content.encode()
    except UnicodeEncodeError as error:
        raise _wrong(name, content, "a string without lone surrogates") from error


def _from_base64(content: object, name: str) -> bytes:
    try:
        return base64.b64decode(content if isinstance(content, str) else "?", validate=True)
    except (binascii.Error, ValueError) as error:
        raise _wrong(name, content, "base64") from error


def _wrong(name: str, content: object, wanted: str) -> InvalidRequestError:
    return InvalidRequestError(f"field '{name}' is {ascii(content)[:60]}, not {wanted}", hint=f"write {wanted}")
