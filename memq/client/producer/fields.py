"""Validated record fields, converted to the content of a block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import repeat, zip_longest
from operator import add
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from memq.client.arguments import check_kind
from memq.errors import InvalidRequestError, TooLargeError
from memq.format.blocks.envelope import SUBJECT, SUBJECT_KEY
from memq.limits import TIME_MS_END
from memq.topic import Topic

if TYPE_CHECKING:
    from memq.encryption.encryption import Encryption

BytesLike: TypeAlias = bytes | bytearray | memoryview | str
HeadersLike: TypeAlias = Mapping[str, BytesLike | None] | Iterable[tuple[str, BytesLike | None]]


class RecordFields(NamedTuple):
    """One checked record, as a block builder takes it."""

    value: bytes | None
    key: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] | None
    timestamp_ms: int | None
    tag: str | None

    @property
    def timed(self) -> tuple[bytes | None, bytes | None, int | None]:
        """Value, key and timestamp."""
        return self.value, self.key, self.timestamp_ms

    @property
    def size(self) -> int:
        """The bytes that count against the topic's record_bytes_max: value, key, names and values of headers."""
        size = len(self.value or b"") + len(self.key or b"")
        for name, value in self.headers or ():
            size += len(name) + len(value or b"")
        return size


def check_fields(
    value: BytesLike | None,
    key: BytesLike | None = None,
    headers: HeadersLike | None = None,
    timestamp_ms: int | None = None,
    tag: str | None = None,
) -> RecordFields:
    """Return the record as a block holds it; bytes-like is copied, str is encoded, an empty tag is none.

    Raises: TypeError naming the field and what it got; InvalidRequestError for text that is not Unicode.
    """
    check_kind("timestamp_ms", timestamp_ms, int)
    if timestamp_ms is not None and not -TIME_MS_END < timestamp_ms < TIME_MS_END:
        raise InvalidRequestError(f"timestamp {timestamp_ms} ms is outside -2^53 to 2^53")
    check_kind("tag", tag, str)
    return RecordFields(
        value if type(value) is bytes else as_bytes(value, "value"),
        key if type(key) is bytes else as_bytes(key, "key"),
        None if headers is None else header_pairs(headers),
        timestamp_ms,
        tag or None,
    )


def with_subject(
    headers: HeadersLike | None, subject: str, encryption: Encryption | None
) -> tuple[tuple[str, bytes | None], ...]:
    """Return headers that name the subject of a record.

    Raises: TypeError; InvalidRequestError without keys, InvalidSettingError without a file of subjects.
    """
    check_kind("subject", subject, str)
    if encryption is None:
        raise InvalidRequestError(
            "a record with a subject needs a producer with encryption",
            hint="memq.Producer(…, encryption=memq.Encryption(…, subjects='FILE'))",
        )
    if not subject:
        raise InvalidRequestError("the subject of a record is empty", hint="leave it out, or name one")
    encryption.check_subjects()
    return (*header_pairs(headers or ()), (SUBJECT, as_bytes(subject, "subject")))


def encrypted_fields(fields: RecordFields, encryption: Encryption | None, topic: Topic) -> RecordFields:
    """Return a record as its block holds it: with a subject, value and headers are encrypted.

    Raises: InvalidRequestError, InvalidSettingError, KeyMissingError, KeyProviderError.
    """
    if encryption is None or not any(name in (SUBJECT, SUBJECT_KEY) for name, _ in fields.headers or ()):
        return fields
    value, headers = encryption.seal_content(fields.value, fields.headers or (), topic.id)
    return fields._replace(value=value, headers=tuple(headers))


class RecordColumns(NamedTuple):
    """Many records, checked: columns of one length."""

    values: Sequence[bytes | None]
    keys: Sequence[bytes | None] | None
    timestamps_ms: Sequence[int] | None
    tag: str | None

    def sizes(self, start: int, end: int) -> list[int]:
        """Return the bytes of value and key of each record from `start` up to `end`."""
        values = self.values[start:end]
        try:
            if self.keys is None:
                return list(map(len, values))  # type: ignore[arg-type]  # None raises TypeError: the fastest check
            return list(map(add, map(len, values), map(len, self.keys[start:end])))  # type: ignore[arg-type]  # the same
        except TypeError:
            keys = self.keys[start:end] if self.keys is not None else ()
            return [len(value or b"") + len(key or b"") for value, key in zip_longest(values, keys)]

    def rows(self) -> Iterator[RecordFields]:
        """Yield the records one by one."""
        keys = self.keys if self.keys is not None else repeat(None)
        times = self.timestamps_ms if self.timestamps_ms is not None else repeat(None)
        for value, key, time_ms in zip(self.values, keys, times, strict=False):
            yield RecordFields(value, key, None, time_ms, self.tag)

    def part(self, start: int, end: int) -> RecordColumns:
        """Return the records from `start` up to `end`."""
        keys = self.keys and self.keys[start:end]
        times = self.timestamps_ms and self.timestamps_ms[start:end]
        return RecordColumns(self.values[start:end], keys, times, self.tag)

    def pick(self, numbers: Sequence[int]) -> RecordColumns:
        """Return some of the records, by their numbers."""
        values = [self.values[number] for number in numbers]
        keys = self.keys and [self.keys[number] for number in numbers]
        times = self.timestamps_ms and [self.timestamps_ms[number] for number in numbers]
        return RecordColumns(values, keys, times, self.tag)


def check_many(
    values: Sequence[BytesLike | None],
    keys: Sequence[BytesLike | None] | None,
    timestamps_ms: Sequence[int] | None,
    tag: str | None,
) -> RecordColumns:
    """Return records as a block holds them; an empty tag is none. Raises: TypeError, InvalidRequestError."""
    check_kind("tag", tag, str)
    checked = _as_column(values, "value")
    checked_keys = None if keys is None else _as_column(keys, "key")
    if checked_keys is not None and len(checked_keys) != len(checked):
        raise InvalidRequestError(f"{len(checked_keys)} keys for {len(checked)} values")
    if timestamps_ms is not None:
        if not isinstance(timestamps_ms, Iterable):
            raise TypeError(f"timestamps_ms must be a sequence of int, not {type(timestamps_ms).__name__}")
        timestamps_ms = list(timestamps_ms)
        if len(timestamps_ms) != len(checked):
            raise InvalidRequestError(f"{len(timestamps_ms)} timestamps for {len(checked)} values")
        for kind in dict.fromkeys(map(type, timestamps_ms)):
            if kind is not int:
                raise TypeError(f"timestamp_ms must be int, not {kind.__name__}")
        if checked and not -TIME_MS_END < min(timestamps_ms) <= max(timestamps_ms) < TIME_MS_END:
            raise InvalidRequestError("a timestamp in ms is outside -2^53 to 2^53")
    return RecordColumns(checked, checked_keys, timestamps_ms, tag or None)


def _as_column(cells: Sequence[BytesLike | None], what: str) -> Sequence[bytes | None]:
    """Return a column as a list or tuple of bytes.

    Checking the kinds as a set costs 20 ns a record, a loop 60.
    """
    if not isinstance(cells, list | tuple):
        check_not_text(cells, f"{what}s")
        cells = list(cells)
    if set(map(type, cells)) <= _KINDS:
        return cells  # type: ignore[return-value]  # it holds nothing but bytes and None
    return [as_bytes(cell, what) for cell in cells]


def check_size(size: int, topic: Topic) -> None:
    """Refuse a record above `record_bytes_max` of its topic. Raises: TooLargeError."""
    bound = topic.settings.record_bytes_max
    if size > bound:
        raise too_large(f"record of {size} bytes", bound, topic.name)


def check_sizes(many: RecordColumns, topic: Topic, at_once: int) -> None:
    """Refuse records above `record_bytes_max` of their topic, measured `at_once` at a time.

    Raises: TooLargeError.
    """
    bound = topic.settings.record_bytes_max
    for start in range(0, len(many.values), at_once):
        sizes = many.sizes(start, start + at_once)
        if max(sizes) > bound:
            number, size = next((number, size) for number, size in enumerate(sizes, start) if size > bound)
            raise too_large(f"record values[{number}] of {size} bytes", bound, topic.name)


def too_large(record: str, bound: int, topic: str) -> TooLargeError:
    """Return the error for a record above `record_bytes_max` = `bound` of its topic."""
    return TooLargeError(
        f"{record} is over record_bytes_max = {bound} of '{topic}'",
        hint=f"make it smaller, or raise the bound: memq topic alter {topic} --set record_bytes_max=SIZE",
    )


_KINDS = {bytes, type(None)}


def check_not_text(cells: object, what: str) -> None:
    """Refuse a single value in place of a sequence: bytes and str are iterable, too. Raises: TypeError."""
    if isinstance(cells, bytes | bytearray | memoryview | str) or not isinstance(cells, Iterable):
        raise TypeError(f"{what} must be a sequence of bytes, not {type(cells).__name__}")


def as_bytes(value: BytesLike | None, what: str) -> bytes | None:
    """Return bytes of bytes-like or str; None stays None. Raises: TypeError, InvalidRequestError."""
    if value is None or type(value) is bytes:
        return value
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f"{what} {value[:60]!a} is not valid Unicode") from error
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise TypeError(f"{what} must be bytes-like or str, not {type(value).__name__}")


def header_pairs(headers: HeadersLike) -> tuple[tuple[str, bytes | None], ...]:
    """Return headers as pairs of name and value.

    Raises: TypeError; InvalidRequestError for text that is not Unicode.
    """
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    if not isinstance(pairs, Iterable):
        raise TypeError(f"headers must be pairs or a mapping, not {type(headers).__name__}")
    return tuple([_as_header(pair) for pair in pairs])


def _as_header(pair: object) -> tuple[str, bytes | None]:
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
        raise TypeError(f"a header must be a pair (str, bytes), not {ascii(pair)[:60]}")
    return pair[0], as_bytes(pair[1], f"header '{pair[0][:60]}'")
